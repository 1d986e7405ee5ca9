"""Readers: one file a format, which owns its name, its options and their checks.

The file's name is the format's. It has `Options`, a frozen dataclass beneath `record.Options`, whose fields
are keys of a recipe and parts of a store's key, and which raises InputError (`<option> = <value>: why`) for
what cannot be; and `read(files, options)`, which yields a `Document` or a `Damage` for every record. A record
that cannot be read is reported, never dropped.
"""

import importlib
import pkgutil
from types import ModuleType

from jaxthru.runtime import plain

FORMATS = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
"""The formats that are read: the files of this folder."""


def reader(format: str) -> ModuleType:
    """Returns the file of a format."""
    return importlib.import_module(f"{__name__}.{format}")


def options_of(format: str) -> type:
    """Returns the class of a format's options."""
    return reader(format).Options


def formats_with(option: str) -> list[str]:
    """Returns the formats that have an option."""
    return [format for format in FORMATS if option in plain.fields(options_of(format))]
