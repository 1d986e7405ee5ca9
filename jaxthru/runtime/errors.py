"""The error that is the user's to mend."""


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
