"""A folder's config.json: from it to a model's configuration, and back."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxthru.models import family
from jaxthru.models.family import FamilyConfig
from jaxthru.models.published import Published, value_of
from jaxthru.runtime.errors import InputError, did_you_mean, require

log = logging.getLogger(__name__)
NAME = "config.json"


def read_config(folder: Path) -> tuple[FamilyConfig, dict[str, Any]]:
    """Returns the configuration of the model in a folder, and its config.json as it stands there. Raises
    InputError, which names the file and the key."""
    path = Path(folder) / NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: there is no such file; a folder of published weights has one") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is no JSON: {error}") from error
    return model_config(raw, str(path)), raw


def model_config(raw: Any, where: str) -> FamilyConfig:
    """Returns the configuration that the keys of a config.json describe, its `loop` the default.

    where: what messages call the file. Raises InputError, which names it and the key: for a value that is not
    built, of a wrong type, or contradicted by another.
    """
    try:
        require(isinstance(raw, dict), "must be a JSON object, {...}")
        cls, published = _publication(raw)
        require(
            raw.get("quantization_config") is None,
            "quantization_config: quantised weights are not built; take the folder that they were made from",
        )
        config = cls(**published.read(raw))
        if dropout := value_of(raw, "attention_dropout", float, 0.0):
            log.warning("%s: attention_dropout = %s: is not applied", where, dropout)
        return config
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _publication(raw: Mapping[str, Any]) -> tuple[type[FamilyConfig], Published]:
    """Returns the family of a config.json. Raises InputError."""
    kind = value_of(raw, "model_type", str, None)
    require(kind is not None, "model_type is missing")
    found = list(family.publications())
    for cls, published in found:
        if kind in published.model_types:
            return cls, published
    refused = {name: why for _, published in found for name, why in published.refused.items()}
    require(kind not in refused, lambda: f"model_type = {kind!r}: {refused[kind]}")
    known = [name for _, published in found for name in published.model_types]
    raise InputError(f"model_type = {kind!r}: is not built{did_you_mean(kind, known)}")


def written(config: FamilyConfig, dtype: str, source: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the config.json of a model, with the keys of transformers 4 and of 5.

    dtype: of the tensors, as `bfloat16`. source: the config.json that the model began from, None without one.
    What `config` does not decide is carried through; of a model of the same shape all of it is, as it was,
    but for `dtype`. Raises InputError for a shape that no published model type has.
    """
    published = family.published(config)
    own = published.write(config)
    types = {"dtype": dtype, "torch_dtype": dtype}
    if source is None:
        return own | types
    kept = {name: source[name] for name in ("model_type", "architectures") if name in source}
    for merged in ({**own, **source}, {**source, **own, **kept}, {**source, **own}):
        if _means(merged, config, published):
            return merged | types
    return own | types


def _means(raw: Mapping[str, Any], config: FamilyConfig, published: Published) -> bool:
    """Says whether a config.json would be read as this configuration."""
    if raw.get("model_type") not in published.model_types:
        return False
    try:
        read = type(config)(**published.read(raw), loop=config.loop)
    except InputError:
        return False
    return published.write(read) == published.write(config)
