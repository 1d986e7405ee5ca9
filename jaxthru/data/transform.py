"""What a source may do to each of its texts: a function by name, the same result for the same text."""

import functools
import importlib
from collections.abc import Callable

from jaxthru.runtime.errors import InputError

MESSAGE = 200
"""Characters of an exception's message that are told: some hold the whole text."""
FAILURES = (Exception, SystemExit)
"""What a user's code may raise. A script that is imported may exit: no command is to end so."""


@functools.cache
def find_transform(name: str) -> Callable[[str], str]:
    """Returns the function that "module:function" names, or for "" the one that changes nothing.

    Raises InputError when there is none.
    """
    if not name:
        return lambda text: text
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except FAILURES as error:
        why = _one_line(error)
        raise InputError(f"transform = {name!r}: cannot be imported as module:function ({why})") from error
    if not callable(found):
        raise InputError(f"transform = {name!r}: is not a function")
    return found


def apply(transform: Callable[[str], str], text: str) -> str:
    """Returns what a transform makes of a text. Raises InputError, of one line, when that is no text."""
    try:
        result = transform(text)
    except FAILURES as error:  # whatever it is, this one text is what it could not be done for
        raise InputError(f"the transform raised {_one_line(error)}") from error
    if not isinstance(result, str):
        raise InputError(f"the transform returned {type(result).__name__}, not str")
    try:
        result.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError("the transform returned what is not valid Unicode") from error
    return result


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:MESSAGE]
