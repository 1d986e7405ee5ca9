"""The file of a configuration: found by its path or its name, and read."""

import difflib
import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxthru import moved
from jaxthru.runtime.errors import InputError, require

CHECKOUT = Path(__file__).resolve().parent.parent
"""The folder of the jaxthru package. Only that of a checkout has shipped configurations, in `configs`."""


def find(given: str | Path) -> Path:
    """Returns the path of a configuration's file.

    given: a path; or the name of a file in ./configs, or in the folder `configs` of a checkout of jaxthru,
    with or without `.py`. Raises InputError, which lists the names there are and says which one is near.
    """
    path = Path(given)
    if path.is_file():
        return path
    alone = path.name == str(given)
    found = named().get(path.name.removesuffix(".py")) if alone else None
    require(found is not None, lambda: f"--config {given}: {_missing(path)}")
    return found


def named() -> dict[str, Path]:
    """Returns {name: path} of the configurations that a name finds; ./configs comes before the checkout's."""
    folders = [Path("configs")]
    if (CHECKOUT / "pyproject.toml").is_file():
        folders.append(CHECKOUT / "configs")
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            found.setdefault(path.stem, path)
    return found


def _missing(path: Path) -> str:
    """Returns what to say of a file that is not there."""
    if (path / "config.json").is_file():
        return f"is a folder; did you mean '{path / 'config.json'}'?"
    names = named()
    beside = [each.name for end in ("*.py", "*.json") for each in path.parent.glob(end)]
    said = "no such file"
    if near := difflib.get_close_matches(path.name, beside, n=1):
        said += f"; did you mean '{path.parent / near[0]}'?"
    elif near := difflib.get_close_matches(path.stem, names, n=1):
        said += f"; did you mean {near[0]!r}?"
    if names:
        said += f"{'' if near else ';'} There are, by name: {', '.join(sorted(names))}"
    return said


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises InputError."""
    try:
        tree = json.loads(path.read_text(), object_pairs_hook=_group)
    except ValueError as error:
        raise InputError(f"--config {path}: not valid JSON ({error})") from error
    require(isinstance(tree, dict), f"--config {path}: must hold one JSON object")
    return tree


def run(path: Path) -> Any:
    """Returns what `config()` of a Python file returns. Raises InputError for whatever the file raises."""
    try:
        moved.say_imports(path.read_bytes())
        function = runpy.run_path(str(path)).get("config")
        require(callable(function), f"--config {path}: must define `def config() -> RunConfig`")
        return function()
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # it may call sys.exit
        raise InputError(f"--config {path}: {type(error).__name__}: {error}") from error


def _group(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object. Raises ValueError for a key that stands twice, of which JSON takes the last."""
    group = dict(pairs)
    if len(group) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return group


def keys(overrides: Sequence[str]) -> list[str]:
    """Returns the key of each `a.b=value`."""
    return [override.partition("=")[0].strip() for override in overrides]
