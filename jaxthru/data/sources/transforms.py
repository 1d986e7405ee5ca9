"""Transforms: a function that a mix names and that is applied to each text of a source."""

import dataclasses
import functools
import hashlib
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from jaxthru.runtime.errors import InputError, did_you_mean, require

GROUP = "jaxthru.transforms"
"""The group of entry points by which an installed package offers transforms."""
MESSAGE = 200
"""Characters of an exception's message that are told: some hold the whole text."""
FAILURES = (Exception, SystemExit)
"""What a user's code may raise. A script that is imported may exit: no command is to end so."""


@dataclasses.dataclass(frozen=True)
class Transform:
    """name: "module:function", of a module in `folder`, where the file lies that says so; or an entry point
    of GROUP that an installed package declares. "" changes nothing."""

    name: str = ""
    folder: str = ""

    def __bool__(self) -> bool:
        return bool(self.name)

    @property
    def file(self) -> Path:
        """Where the module lies, if its name is one."""
        return Path(self.folder, *self.name.partition(":")[0].split(".")).with_suffix(".py")

    @property
    def digest(self) -> str:
        """What tells functions of one name apart: the hash of the module's file, or the package and version
        that declare the entry point. "" where there is none; `find_transform` says what is wrong."""
        if ":" in self.name:
            try:
                return hashlib.sha256(self.file.read_bytes()).hexdigest()
            except (OSError, ValueError):
                return ""
        entry = _declared().get(self.name) if self.name else None
        return f"{entry.value} {entry.dist and (entry.dist.name, entry.dist.version)}" if entry else ""


@functools.cache
def find_transform(transform: Transform) -> Callable[[str], str]:
    """Returns the function that a transform names. Raises InputError when there is none.

    Nothing but these two places is looked at: a name that came with somebody's data is to run nothing.
    """
    if not transform:
        return lambda text: text
    module, colon, function = transform.name.partition(":")
    try:
        found = getattr(_module(transform, module), function) if colon else _entry_point(transform.name)
    except InputError:
        raise
    except FAILURES as error:
        why = _one_line(error)
        raise InputError(f"transform = {transform.name!r}: cannot be imported ({why})") from error
    require(callable(found), f"transform = {transform.name!r}: is not a function")
    return found


def _module(transform: Transform, module: str):
    """Returns a module by its file, whatever else has its name."""
    require(
        re.fullmatch(r"\w+(\.\w+)*", module) is not None and transform.file.is_file(),
        lambda: (
            f"transform = {transform.name!r}: no module {module!r} lies in {transform.folder}; give "
            f"module:function of one that does, or the name of an entry point of {GROUP}"
        ),
    )
    name = f"{module}_{hashlib.sha256(str(transform.file).encode()).hexdigest()[:8]}"
    loader = _Source(name, str(transform.file))
    specification = importlib.util.spec_from_file_location(name, transform.file, loader=loader)
    loaded = sys.modules[name] = importlib.util.module_from_spec(specification)
    sys.path.append(transform.folder)  # for what it imports from beside it, last, so that nothing is hidden
    try:
        specification.loader.exec_module(loaded)
    finally:
        sys.path.remove(transform.folder)
    return loaded


class _Source(importlib.machinery.SourceFileLoader):
    """Compiles a file as it is now, for a store's key is the hash of it: Python's own bytecode may be of
    before an edit that took no second and left the file as long."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _declared() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def _entry_point(name: str) -> object:
    declared = _declared()
    if name not in declared:
        known = did_you_mean(name, tuple(declared)) if declared else ""
        why = f"no installed package declares it as an entry point of {GROUP}{known}"
        raise InputError(f"transform = {name!r}: {why}; module:function names one beside the mix")
    return declared[name].load()


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
