"""`InputError` and `TrainingError`, and how a command reports them: one line and an exit code."""

import contextlib
import dataclasses
import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from jaxthru.runtime import termination
from jaxthru.runtime.exit_codes import BAD_INPUT, CANNOT_GO_ON, INTERRUPTED


class InputError(ValueError):
    """Input that cannot work, found before device work starts.

    Its message is one line that names what is wrong and what would be right. Commands print that line and
    exit with code 2; they never print a traceback for it.
    """

    def __init__(self, message: str):
        super().__init__(one_line(message))


class TrainingError(RuntimeError):
    """Training cannot go on, through no fault of its input: numbers that are not finite, a disk that is full.

    Its message is one line; the command prints it and exits with code 1.
    """

    def __init__(self, message: str):
        super().__init__(one_line(message))


class PeerError(RuntimeError):
    """Another process of the run has ended, or is lost. code: the exit code that this one ends with too."""

    def __init__(self, message: str, code: int):
        super().__init__(one_line(message))
        self.code = code


@dataclasses.dataclass(frozen=True)
class Fault:
    """Why a run of several processes ends. process, host: whose fault it is. code: the exit code of all."""

    process: int
    host: str
    code: int
    why: str

    @property
    def line(self) -> str:
        return one_line(f"process {self.process} ({self.host}) {self.why}")


LONGEST = 1000
"""Characters of a message: what it quotes may be a file's content."""


def one_line(text: str) -> str:
    """Returns a text that any terminal shows as one line: control characters and broken Unicode are escaped,
    and the middle of a long one is left out."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2 - 5]} ... {line[-LONGEST // 2 :]}"


def shown(text: str) -> str:
    """Returns a text whose control characters are escaped, but for tabs and line ends: a terminal would obey
    those that somebody's data holds."""
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda found: ascii(found[0])[1:-1], text)


NAMED = 8
"""Of many, those that a line names."""


def listed(names: Sequence[str]) -> str:
    """Returns names as one part of a line, of many the first ones."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def did_you_mean(name: str, valid: list[str] | tuple[str, ...], prefix: str = "") -> str:
    """Returns `; did you mean 'x'?` for the valid name nearest to `name`, or the list of valid names.

    prefix: what the nearest name is shown with, as the group of a key is.
    """
    import difflib

    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return f"; did you mean {prefix + near[0]!r}?" if near else f"; valid: {', '.join(sorted(valid))}"


def require(condition: bool, message: str | Callable[[], str]) -> None:
    """Raises `InputError(message)` unless `condition` holds. message: or what returns it, where it costs."""
    if not condition:
        raise InputError(message() if callable(message) else message)


OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED: .*?\b(out of memory\b[^\n]*)", re.I)


def exit_code(command: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Runs a command; returns its exit code, one of `runtime.exit_codes`: 0 unless the command says another.
    What ends it is said in one line, if `ending` knows it. SIGTERM is handled meanwhile."""
    try:
        with termination.handled():
            return command() or 0
    except BaseException as error:
        if not (found := ending(error)):
            raise
        if isinstance(error, termination.Terminated):
            termination.said()
        line, code = found
        return _said(interrupted if isinstance(error, KeyboardInterrupt) else line, code)


def ending(error: BaseException) -> tuple[str, int] | None:
    """Returns the line and the exit code with which an error ends a command; None for what nobody foresaw.

    Foreseen are bad input, training that cannot go on, a lack of memory, threads or room on the disk, another
    process's end, Ctrl-C and SIGTERM.
    """
    match error:
        case InputError():
            return str(error), BAD_INPUT
        case TrainingError():
            return str(error), CANNOT_GO_ON
        case PeerError():
            return str(error), error.code
        case MemoryError() | OSError() | RuntimeError():
            return (lack, CANNOT_GO_ON) if (lack := lacking(error)) else None
        case KeyboardInterrupt():
            return "interrupted", INTERRUPTED
        case termination.Terminated():
            return termination.SAID, termination.exit_code()
    return None


def lacking(error: Exception) -> str | None:
    """Returns what the machine has too little of, if that is what an error says, and what to do about it."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return "out of memory: the host, or a limit on this process (`ulimit -v`, a container's), has no more"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{error.filename or 'a file'}: {error.strerror}"
    import jax  # not above: `jaxthru --help` needs none

    if isinstance(error, jax.errors.JaxRuntimeError) and (found := OUT_OF_MEMORY.search(str(error))):
        less = "more train.microbatches, another remat.policy or offload.level make a step take less, and"
        return f"{found[1].rstrip('. ')}; {less} `python -m jaxthru.plan memory` says how much"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "no more threads can be started: raise this process's limits (`ulimit -u`, `ulimit -v`)"
    return None


BY_ANOTHER = re.compile(r"\b(Gloo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED|Connection (reset|closed))")
"""What an error says that may be due to another process, whoever has wrapped it."""


def may_be_anothers(error: BaseException | None) -> bool:
    """Says whether an error may be due to another process: one of JAX, or one that says so."""
    import jax

    while error is not None:
        of_jax = isinstance(error, jax.errors.JaxRuntimeError) and not lacking(error)
        if of_jax or BY_ANOTHER.search(str(error)):
            return True
        error = error.__cause__
    return False


def leave(code: int, hung: bool = False) -> NoReturn:
    """Ends the command's own process. One that failed alone ends at once: the threads of a library may still
    wait for what never comes, or say at length what has been said in one line. hung: one of them is known to
    wait, so that the interpreter's end would."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if (peers := sys.modules.get("jaxthru.runtime.peers")) and peers.current().fault:
        peers.current().go(code)
    if code == CANNOT_GO_ON or hung:
        import jax

        if hung and jax.distributed.is_initialized():
            jax.distributed.shutdown()  # else the others would take this process for lost
        if not jax.distributed.is_initialized():
            os._exit(code)
    sys.exit(code)


def _said(line: object, code: int) -> int:
    with contextlib.suppress(OSError):  # of a log on the disk that is full
        print(f"jaxthru: {line}", file=sys.stderr, flush=True)
    return code
