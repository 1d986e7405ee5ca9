"""`model.pretrained`: a configuration takes the shape of a folder of published weights."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxthru.huggingface.config import NAME, read_config
from jaxthru.models import family
from jaxthru.models.family import FamilyConfig
from jaxthru.runtime.errors import InputError, require

OWN = ("family", "loop", "pretrained")
"""Keys of every family that are no part of a shape."""


def taken(model: FamilyConfig) -> FamilyConfig:
    """Returns a model of the shape that `model.pretrained`'s config.json has.

    A run's own configuration has the whole shape already: that it can be read again does not hang on the
    folder. Raises InputError for a key that is not its default, and not as the folder has it.
    """
    folder, unset = Path(model.pretrained).expanduser(), family.to_plain(type(model)())
    given = {name: value for name, value in family.to_plain(model).items() if value != unset[name]}
    given = {name: value for name, value in given.items() if name not in (*OWN, *model.TRAINING)}
    if given and not (folder / NAME).is_file():
        return model
    published, _ = read_config(folder)
    there = family.to_plain(published)
    # The default family is that of a configuration which names none.
    agrees = model.family in (there["family"], family.SHIPPED[0])
    require(agrees, lambda: _contradicts("model.family", model.family, folder, repr(there["family"])))
    for name, value in given.items():
        found = repr(there[name]) if name in there else f"a model of family {there['family']!r}"
        require(there.get(name) == value, lambda: _contradicts(f"model.{name}", value, folder, found))  # noqa: B023
    kept = ("loop", "pretrained", *(name for name in model.TRAINING if name in published.TRAINING))
    return dataclasses.replace(published, **{name: getattr(model, name) for name in kept})


def check_set(asked: Mapping[str, Any], found: Mapping[str, Any], folder: str) -> None:
    """Raises InputError for a key of the model that was set, and that a folder has otherwise.

    asked: the keys that were set, by their whole names. found: all keys of the configuration now.
    """
    for key, value in asked.items():
        if key.startswith("model.") and value != found.get(key):
            raise InputError(_contradicts(key, value, Path(folder), repr(found.get(key))))


def leave(tree: dict, folder: str) -> None:
    """Forgets the shape and the tokenizer that the plain values of a configuration have of one folder of
    published weights, where another is asked for."""
    model, before = tree["model"], tree["model"].get("pretrained")
    if before in (None, folder):
        return
    tree["model"] = {name: model[name] for name in ("loop",) if name in model}
    if tree.get("data", {}).get("tokenizer") == before:
        tree["data"]["tokenizer"] = None


def _contradicts(key: str, value: Any, folder: Path, found: str) -> str:
    said = f"{key} = {value!r}: {folder / 'config.json'} has {found}"
    return f"{said}; leave the shape to the folder, or give another model.pretrained"
