"""Plain values, as JSON, TOML and a command line give them, read as the types that fields are declared with.

What is not of its type raises InputError, which names the key.
"""

import contextlib
import dataclasses
import difflib
import functools
import json
import math
import types
import typing
from collections.abc import Collection, Iterable
from typing import Any, Literal

from jaxthru.runtime.errors import InputError, did_you_mean, require

UNIONS = (types.UnionType, typing.Union)


@functools.cache
def fields(cls: type) -> dict[str, Any]:
    """Returns {name: declared type} of a dataclass."""
    declared = typing.get_type_hints(cls)
    return {field.name: declared[field.name] for field in dataclasses.fields(cls)}


def field(cls: type, name: str, prefix: str, value: Any) -> Any:
    """Returns the declared type of a field. prefix, value: of the key that asks for it, for the message."""
    valid = fields(cls)
    hint = functools.partial(did_you_mean, name, [*valid], prefix)
    require(name in valid, lambda: f"unknown key {prefix}{name} = {value!r}{hint()}")
    return valid[name]


def check_key(name: str, valid: Collection[str], prefix: str = "", where: str = "") -> None:
    """Raises InputError unless a name is valid. prefix, where: what stands before it, for the message."""
    require(name in valid, lambda: f"{where}unknown key {prefix}{name}{did_you_mean(name, [*valid])}")


def nearest(key: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'optim.learning_rate'?` for what is none of the known keys; or nothing.

    key, known: whole names, as `optim.clip`, of groups too. One of the very same name in another group comes
    before one of a similar name in the same group.
    """
    group, _, name = key.rpartition(".")
    owners: dict[str, list[str]] = {}
    for whole in known:
        owners.setdefault(whole.rpartition(".")[2], []).append(whole)
    found = owners.get(name, [])
    if len(found) > 1 and group:
        found = difflib.get_close_matches(key, found, n=1, cutoff=0.75) or found
    if not found:
        within = f"{group}." if group else ""
        here = [last for last, keys in owners.items() if within + last in keys]
        if near := difflib.get_close_matches(name, here, n=1):
            found = [within + near[0]]
        elif near := difflib.get_close_matches(name, owners, n=1, cutoff=0.75):
            found = owners[near[0]]
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def build(cls: type, tree: Any, prefix: str = "") -> Any:
    """Returns an instance of the dataclass `cls` from plain values; `prefix` names it in errors."""
    require(isinstance(tree, dict), lambda: f"{prefix[:-1] or 'config'} = {tree!r}: must be a group of keys")
    values = {
        name: read(field(cls, name, prefix, value), value, f"{prefix}{name}") for name, value in tree.items()
    }
    for each in dataclasses.fields(cls):
        given = each.name in values or each.default is not each.default_factory  # else both are MISSING
        require(given, lambda each=each: f"{prefix}{each.name} is missing")
    return cls(**values)


def read(declared: Any, value: Any, key: str) -> Any:
    """Returns a plain value as the declared type: a group of keys as its dataclass, a list as a tuple."""
    kind = without_none(declared)
    inner = typing.get_args(kind)
    if value is not None and dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else build(kind, value, f"{key}.")
    if value is not None and typing.get_origin(kind) is tuple:
        require(isinstance(value, list | tuple), f"{key} must be a list{' of strings' * (str in inner)}")
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        require(len(value) == len(kinds), lambda: f"{key} = {value!r}: must have {len(kinds)} entries")
        return tuple(read(one, item, key) for one, item in zip(kinds, value, strict=True))
    check(key, value, declared)
    return float(value) if type(value) is int and matches(0.5, declared) else value


def check(key: str, value: Any, declared: Any) -> None:
    """Raises InputError unless a key's value is of its declared type, and finite."""
    require(not isinstance(value, int) or abs(value) < 2**64, f"{key}: is too large a number")
    require(matches(value, declared), lambda: f"{key} = {value!r}: must be {_describe(declared)}")
    require(not isinstance(value, float) or math.isfinite(value), lambda: f"{key} = {value}: must be finite")


def parse(key: str, text: str, declared: Any) -> Any:
    """Returns the first reading of a command line's text that the declared type accepts; of a list, its JSON,
    or the text as the only entry."""
    if typing.get_origin(without_none(declared)) is tuple:
        return read(declared, _entries(key, text), key)
    readings: list[Any] = []
    if text in ("None", "none", "null"):
        readings.append(None)
    if text.lower() in ("true", "false"):
        readings.append(text.lower() == "true")
    for number in (int, float, _whole):
        with contextlib.suppress(ValueError, OverflowError):
            readings.append(number(text.replace("_", "")))
    for value in (*readings, text):  # a type that takes both has digits be a number
        if matches(value, declared):
            return value
    choices = [str(choice) for choice in typing.get_args(declared) if typing.get_origin(declared) is Literal]
    hint = did_you_mean(text, choices)
    raise InputError(f"{key} = {text!r}: must be {_describe(declared)}{hint if '?' in hint else ''}")


def _entries(key: str, text: str) -> list:
    if not text.startswith("["):
        return [text] if text else []
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{key} = {text!r}: must be a JSON list ({error}), or one entry as it is") from error


def _whole(text: str) -> int:
    """Returns the whole number in `1e3` or `1000.0`. Raises ValueError for others, and for what a float does
    not hold exactly."""
    number = float(text)
    if not number.is_integer() or abs(number) > 2**53:
        raise ValueError(text)
    return int(number)


def matches(value: Any, declared: Any) -> bool:
    """Says whether a value is of a declared type; a whole number also is one of float."""
    origin = typing.get_origin(declared)
    if origin in UNIONS:
        return any(matches(value, option) for option in typing.get_args(declared))
    if origin is Literal:
        return value in typing.get_args(declared)
    if declared in (int, float):
        return isinstance(value, int | declared) and not isinstance(value, bool)
    return isinstance(value, origin or declared)


def without_none(declared: Any) -> Any:
    """Returns X of `X | None`, and any other type as it is."""
    if typing.get_origin(declared) not in UNIONS:
        return declared
    options = [option for option in typing.get_args(declared) if option is not types.NoneType]
    return options[0] if len(options) == 1 else declared


def _describe(declared: Any) -> str:
    if typing.get_origin(declared) in UNIONS:
        return " or ".join(_describe(option) for option in typing.get_args(declared))
    if typing.get_origin(declared) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(declared))
    return "None" if declared is types.NoneType else declared.__name__


def flat(tree: dict, prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested dicts, each by its whole name, as `optim.clip`."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def check_groups(config: Any) -> None:
    """Raises InputError for the first field of a group (a dataclass) whose value is not of its declared
    type."""
    for group in dataclasses.fields(config):
        part = getattr(config, group.name)
        require(
            isinstance(part, group.type),
            f"{group.name} is {type(part).__name__}: must be a {group.type.__name__}",
        )
        for name, declared in fields(type(part)).items():
            check(f"{group.name}.{name}", getattr(part, name), declared)
