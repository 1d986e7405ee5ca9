"""The error that is the user's to mend, and how a command says it."""

import re
import sys
from collections.abc import Callable

import jax

INTERRUPTED = 130  # the exit code that shells give a process ended by SIGINT


class InputError(ValueError):
    """Input that cannot work, found before device work starts.

    Its message is one line that names what is wrong and what would be right. Commands print that line and
    exit with code 2; they never print a traceback for it.
    """


def did_you_mean(name: str, valid: list[str] | tuple[str, ...]) -> str:
    """Returns `; did you mean 'x'?` for the valid name nearest to `name`, or the list of valid names."""
    import difflib

    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; valid: {', '.join(sorted(valid))}"


def require(condition: bool, message: str) -> None:
    """Raises `InputError(message)` unless `condition` holds."""
    if not condition:
        raise InputError(message)


OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED: .*?\b(out of memory\b[^\n]*)", re.I)


def exit_code(
    command: Callable[[], int | None],
    failures: tuple[type[Exception], ...] = (),
    interrupted: str = "interrupted",
) -> int:
    """Runs a command; returns its exit code, 0 unless it says another. What ends it is said in one line: 2
    is for bad input, 1 for `failures` and where a device's memory is too small, 130 for Ctrl-C."""
    try:
        return command() or 0
    except InputError as error:
        return _said(error, 2)
    except failures as error:
        return _said(error, 1)
    except jax.errors.JaxRuntimeError as error:
        if not (found := OUT_OF_MEMORY.search(str(error))):
            raise
        less = "more train.microbatches, another remat.policy or offload.level make a step take less, and"
        return _said(f"{found[1].rstrip('. ')}; {less} `python -m jaxthru.plan memory` says how much", 1)
    except KeyboardInterrupt:
        return _said(interrupted, INTERRUPTED)


def _said(line: object, code: int) -> int:
    print(f"jaxthru: {line}", file=sys.stderr)
    return code
