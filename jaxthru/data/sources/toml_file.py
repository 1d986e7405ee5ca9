"""TOML files of mixes and recipes: they are read, their keys checked and their values typed."""

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxthru.data.mixture.configuration import is_number
from jaxthru.runtime import plain
from jaxthru.runtime.errors import InputError, require


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the values of a TOML file. Raises InputError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: cannot be read as TOML ({error})") from error


def check_keys(path: Path, table: dict[str, Any], valid: Collection[str], prefix: str) -> None:
    """Raises InputError for the first key of a table that is none of the valid ones."""
    for key in table:
        plain.check_key(key, valid, prefix, where=f"{path}: ")


def typed(path: Path, key: str, value: Any, declared: Any) -> Any:
    """Returns a value of the type declared for it. A number is not below 0."""
    if declared is float:
        require(is_number(value), f"{path}: {key} = {value}: must be a number >= 0")
    value = plain.read(declared, value, f"{path}: {key}")
    require(declared is not int or value >= 0, f"{path}: {key} = {value}: must not be negative")
    return value


def home(said: str, text: str) -> Path:
    """Returns a path with its `~` replaced. said: by what key. Raises InputError."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InputError(f"{said} = {text!r}: no home folder is known for it") from error
