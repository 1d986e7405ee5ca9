"""The keys of rotary positions (RoPE) in a config.json, as transformers 4 and 5 write them.

Version 4 has `rope_theta` and `rope_scaling {rope_type or type, factor, ...}`, and reads nothing else;
version 5 has `rope_parameters {rope_theta, rope_type, factor, ...}`. Both are read, and both written.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxthru.models.published import value_of
from jaxthru.models.rotary import RopeScaling
from jaxthru.runtime import plain
from jaxthru.runtime.errors import InputError, require

KINDS = ("default", "llama3", "linear", "yarn")
FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_sequence",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
}
"""A published key -> the field of RopeScaling."""

OF_KIND = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "truncate", "attention_factor"),
    ),
}
"""What the kinds ask for; what stands there beside it is without effect."""

REQUIRED = {"linear": ("factor",), "llama3": OF_KIND["llama3"][:3], "yarn": ("factor",)}
OTHER = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim")


def read(
    raw: Mapping[str, Any], theta: float, original: int, kinds: tuple[str, ...] = KINDS
) -> tuple[float, RopeScaling | None]:
    """Returns the base and the scaling of a config.json with the same positions in all layers.

    theta: the base where no key says it. original: tokens in a row, for kinds that were trained on fewer and
    do not say on how many. Raises InputError that names the key.
    """
    whole(raw, "partial_rotary_factor", "")
    original = value_of(raw, "original_max_position_embeddings", int, original)
    old, new = (group(raw, name) for name in ("rope_scaling", "rope_parameters"))
    bases = {"rope_theta": value_of(raw, "rope_theta", float, None)}
    found = {}
    for name, given in (("rope_scaling", old), ("rope_parameters", new)):
        if given is not None:
            bases[f"{name}.rope_theta"] = value_of(given, "rope_theta", float, None, f"{name}.")
        if given is not None or (name == "rope_scaling" and name in raw):
            found[name] = scaling(given or {}, f"{name}.", original, kinds)
    base = agreed({key: value for key, value in bases.items() if value is not None}, theta)
    return base, agreed(found, None)


def agreed(found: Mapping[str, Any], default: Any) -> Any:
    """Returns what all keys say, the default without any. Raises InputError where two differ."""
    for key, value in found.items():
        first = next(iter(found))
        require(value == found[first], f"{first} and {key} contradict each other: {found[first]}, {value}")
    return next(iter(found.values()), default)


def group(raw: Mapping[str, Any], name: str, prefix: str = "") -> Mapping[str, Any] | None:
    """Returns a key's group of keys, None where there is none."""
    found = raw.get(name)
    fits = found is None or isinstance(found, dict)
    require(fits, lambda: f"{prefix}{name} = {found!r}: must be a group of keys")
    return found


def whole(raw: Mapping[str, Any], name: str, prefix: str) -> None:
    """Raises InputError where only a part of each head is rotated."""
    part = value_of(raw, name, float, 1.0, prefix)
    require(part == 1, f"{prefix}{name} = {part}: only heads rotated as a whole are built, which is 1")


def scaling(
    given: Mapping[str, Any], prefix: str, original: int, kinds: tuple[str, ...] = KINDS
) -> RopeScaling | None:
    """Returns the scaling that a group of keys describes. prefix: the group's name, for messages."""
    names = [name for name in ("rope_type", "type") if given.get(name) is not None]
    kind = agreed({f"{prefix}{name}": given[name] for name in names}, "default")
    key = prefix + (names or ["rope_type"])[0]
    require(
        isinstance(kind, str) and kind in kinds,
        f"{key} = {kind!r}: is not built; built: {', '.join(kinds)}",
    )
    unknown = [name for name in given if name not in FIELDS and name not in OTHER]
    require(not unknown, lambda: f"{prefix}{unknown[0]} = {given[unknown[0]]!r}: is not built")
    whole(given, "partial_rotary_factor", prefix)
    if kind == "default":
        return None
    declared = plain.fields(RopeScaling)
    values: dict[str, Any] = {}
    for name in OF_KIND[kind]:
        value = value_of(given, name, plain.without_none(declared[FIELDS[name]]), None, prefix)
        require(value is not None or name not in REQUIRED[kind], f"{prefix}{name} is missing, for {kind}")
        if value is not None:
            values[FIELDS[name]] = value
    if "original_max_position_embeddings" in OF_KIND[kind]:
        values.setdefault("original_sequence", original)
    if kind == "yarn":
        values["attention_factor"] = amplitude(given, prefix, values.get("attention_factor"))
    try:
        return RopeScaling(kind=kind, **values)
    except InputError as error:
        named = {f"model.rope_scaling.{field}": f"{prefix}{name}" for name, field in FIELDS.items()}
        said = str(error)
        for field, name in named.items():
            said = said.replace(field, name)
        raise InputError(said) from error


def amplitude(given: Mapping[str, Any], prefix: str, factor: float | None) -> float | None:
    """Returns yarn's attention_factor: the given one, or the ratio of two, or None."""
    scales = [value_of(given, name, float, None, prefix) for name in ("mscale", "mscale_all_dim")]
    if factor is not None or not all(scales):
        return factor
    logarithm = math.log(max(given["factor"], 1))
    above, below = (0.1 * scale * logarithm + 1 for scale in scales)
    return above / below


def write(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns the keys of both versions."""
    said = group_of(scaling)
    old = None if scaling is None else said
    return {"rope_theta": theta, "rope_scaling": old, "rope_parameters": {"rope_theta": theta, **said}}


def group_of(scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns the keys of one group, without the base."""
    if scaling is None:
        return {"rope_type": "default"}
    values = {name: getattr(scaling, FIELDS[name]) for name in OF_KIND[scaling.kind]}
    return {"rope_type": scaling.kind} | {name: value for name, value in values.items() if value is not None}
