"""What a family has been published as: the tensors and the config.json of Hugging Face folders.

A family's module exports `PUBLISHED`, a `Published`. A family without one can be trained, and neither
started from published weights nor exported.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxthru.runtime import plain
from jaxthru.runtime.errors import require
from jaxthru.runtime.weights import WeightInfo


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One published tensor, and which weight it is.

    name: in the files, as `model.layers.3.self_attn.q_proj.weight`. path: where the weight is in a training
    state's `params`, one entry a layer: ("layers", "3", "attention", "query"). transposed: it is
    published as [*out, *in] and here is [*in, *out]. Dims of a side are published as one: [D, H, C] is
    [H·C, D].
    Dims of a stack stay before them, the last ones with the outputs: [E, D, 2, M] is [E, 2·M, D].
    part: (dim, place) of the weight, where this tensor is only what lies at these places, as one of many
    experts.
    """

    name: str
    path: tuple[str, ...]
    transposed: bool = False
    part: tuple[tuple[int, int], ...] = ()

    def own(self, info: WeightInfo, shape: tuple[int, ...]) -> tuple[WeightInfo, tuple[int, ...]]:
        """Returns what of a weight this tensor is: the same without the dims in which it has one place."""
        taken = [dim for dim, _ in self.part]
        return info.without(taken), tuple(size for dim, size in enumerate(shape) if dim not in taken)

    def shape(self, info: WeightInfo, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the published shape. info, shape: of the weight."""
        info, shape = self.own(info, shape)
        if not self.transposed:
            return tuple(shape) if info.inputs else (math.prod(shape),)
        inputs = math.prod(shape[dim] for dim in info.inputs)
        stack = tuple(shape[dim] for dim in info.stack[:1])
        return *stack, math.prod(shape) // (inputs * math.prod(stack)), inputs


@dataclasses.dataclass(frozen=True)
class Published:
    """model_types: of config.json, those that are this family. read: the keys of a config.json -> the keyword
    arguments of `Config`; raises InputError that names a key whose value is not built. write: a Config -> the
    keys of config.json that it decides, `model_type` and `architectures` among them. tensors: a Config -> all
    tensors, each once, in the order in which they are written. ignored: patterns (`re.fullmatch`) of names
    that may stand in a file and hold nothing that is trained. refused: model types near to these that are not
    built -> why. others: further tables, of the same weights in other tensors, by which folders are read too.
    """

    model_types: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    tensors: Callable[[Any], Iterable[Tensor]]
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    others: tuple[Callable[[Any], Iterable[Tensor]], ...] = ()


def value_of(raw: Mapping[str, Any], name: str, kind: type, default: Any, prefix: str = "") -> Any:
    """Returns the value of a key of config.json: a finite one of this type, or the default where it is absent
    or null. prefix: the group that the key stands in, for messages. Raises InputError."""
    value = raw.get(name)
    if value is None:
        return default
    plain.check(f"{prefix}{name}", value, kind)
    return float(value) if kind is float else value


def size_of(raw: Mapping[str, Any], name: str, default: Any, most: int = 2**31 - 1) -> Any:
    """Returns the value of a key that counts something. Raises InputError."""
    value = value_of(raw, name, int, default)
    require(value is None or 1 <= value <= most, f"{name} = {value}: must be from 1 to {most}")
    return value


def refuse(raw: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises InputError for a key whose value is not built. allowed: key -> the values that are; what is
    absent or null is."""
    for name, values in allowed.items():
        value = raw.get(name)
        built = value is None or any(value == each and type(value) is type(each) for each in values)
        hint = f"; built: {', '.join(map(repr, values))}" if values else "; must be null"
        require(built, lambda name=name, value=value, hint=hint: f"{name} = {value!r}: is not built{hint}")


def kinds_of_layers(raw: Mapping[str, Any], layers: int) -> list[bool] | None:
    """Returns of each layer whether it has a window, as `layer_types` says; None without that key."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return None
    require(isinstance(kinds, list), lambda: f"layer_types = {kinds!r}: must be a list")
    require(len(kinds) == layers, f"layer_types: has {len(kinds)} entries for num_hidden_layers = {layers}")
    for kind in kinds:
        known = kind in ("full_attention", "sliding_attention")
        built = "is not built; built: full_attention, sliding_attention"
        require(known, f"layer_types: {kind!r} {built}")
    return [kind == "sliding_attention" for kind in kinds]


def layer_kinds(windowed: Iterable[bool]) -> list[str]:
    """Returns `layer_types` of layers of which some have a window."""
    return ["sliding_attention" if each else "full_attention" for each in windowed]


def layer_tensors(layer: int, table: Mapping[str, tuple[str, str]]) -> Iterable[Tensor]:
    """Yields the tensors of one layer of `model.layers`. table: published name -> (module, weight), the place
    within the layer; a module may be several, joined by "/". Those called `*_proj.weight` are transposed."""
    for name, (module, weight) in table.items():
        path = ("layers", str(layer), *module.split("/"), weight)
        yield Tensor(f"model.layers.{layer}.{name}", path, name.endswith("_proj.weight"))


def hub_id(base: Any) -> str | None:
    """Returns the owner and the name of a folder that the hub's cache has, None of others."""
    parts = Path(str(base)).parts
    found = re.match(r"models--(.+?)--(.+)", next((each for each in parts if each[:8] == "models--"), ""))
    return f"{found[1]}/{found[2]}" if found else None


def name_of(base: Any) -> str:
    """Returns what a folder of weights is called: an owner and a name, as the hub has them, or its own."""
    return hub_id(base) or Path(str(base)).name or str(base)
