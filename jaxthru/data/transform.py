"""What a source may do to each of its texts: a function by name, the same result for the same text."""

import functools
import importlib
from collections.abc import Callable

from jaxthru.runtime.errors import InputError


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
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"transform = {name!r}: cannot be imported as module:function ({error})") from error
    if not callable(found):
        raise InputError(f"transform = {name!r}: is not a function")
    return found
