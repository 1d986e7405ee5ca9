"""The error that is the user's to mend, and how a command says it."""

import sys
from collections.abc import Callable

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


def exit_code(command: Callable[[], int]) -> int:
    """Runs a command; returns its exit code: 2 for bad input, 130 for Ctrl-C, each said in one line."""
    try:
        return command()
    except InputError as error:
        print(f"jaxthru: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxthru: interrupted", file=sys.stderr)
        return INTERRUPTED
