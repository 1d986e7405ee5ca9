"""Adapters in PEFT's form: adapter_config.json and adapter_model.safetensors, read and written.

Of each target there are two tensors, `base_model.model.<module>.lora_A.weight` [r, in] and `.lora_B.weight`
[out, r], where the module is called as in the base's published weights.

Source: https://github.com/huggingface/peft, "Checkpoint format".
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxthru.huggingface import safetensors
from jaxthru.huggingface.folder import read_json
from jaxthru.huggingface.safetensors import NAMES, Reader, TensorInfo
from jaxthru.huggingface.weights import FLOATS
from jaxthru.huggingface.write import new_folder
from jaxthru.models import family
from jaxthru.models.family import FamilyConfig
from jaxthru.models.lora import LORA, LoraConfig
from jaxthru.models.published import Tensor, hub_id
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import require
from jaxthru.runtime.weights import WeightInfo

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
SIDES = {"a": "lora_A", "b": "lora_B"}
"""Which tensor of a target is which of its matrices."""
BUILT = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layers_to_transform": (),
    "layers_pattern": (),
    "layer_replication": (),
    "target_parameters": (),
    "trainable_token_indices": (),
    "exclude_modules": (),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "alora_invocation_tokens": (),
    "use_bdlora": (False,),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the base, too
}
"""Keys of adapter_config.json that change what an adapter does -> the values that are built; what is absent
or empty is."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One of a target's two matrices. path: where it is in `params`. shape: there. order: its dims as they
    are published. published: its shape in the file."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    published: tuple[int, int]


def sides(model: FamilyConfig, paths: Mapping[tuple[str, ...], Any], rank: int) -> dict[str, Side]:
    """Returns {published name: Side} of the adapters of a model, in the order of its weights.

    paths: holds the place in `params` of each weight that has an adapter.
    """
    found = {}
    for tensor, info, shape in family.published_weights(model):
        if tensor.path in paths:
            for side in SIDES:
                found[_name(tensor, side)] = _side(tensor, info, shape, side, rank)
    return found


def _name(tensor: Tensor, side: str) -> str:
    return f"{PREFIX}{tensor.name.removesuffix('.weight')}.{SIDES[side]}.weight"


def _side(tensor: Tensor, info: WeightInfo, shape: tuple[int, ...], side: str, rank: int) -> Side:
    inputs, outputs = ([shape[dim] for dim in dims] for dims in (info.inputs, info.outputs))
    path = (*tensor.path[:2], LORA, *tensor.path[2:], side)
    if side == "a":  # [*in, r] here, [r, in] there
        order = (len(inputs), *range(len(inputs)))
        return Side(path, (*inputs, rank), order, (rank, math.prod(inputs)))
    return Side(path, (rank, *outputs), (*range(1, len(outputs) + 1), 0), (math.prod(outputs), rank))


def taken(config: LoraConfig) -> LoraConfig:
    """Returns the settings of a configuration with `lora.adapter`, with rank, scale and targets as the folder
    has them. Raises InputError for a key that is set, and not as it is there.

    A run's own configuration has them already: that it can be read again does not hang on the folder.
    """
    folder = Path(config.adapter).expanduser()
    if config.on and not (folder / CONFIG).is_file():
        return config
    there, default = read_settings(folder), LoraConfig()
    for name, value in there.items():
        ours = getattr(config, name)
        if name == "targets":
            same = not ours or set(ours) == set(value)
        else:
            same = ours in (getattr(default, name), value)
        require(
            same,
            f"lora.{name} = {ours!r}: {folder / CONFIG} has {value!r}; leave it to the adapter, or give "
            "another lora.adapter",
        )
    return dataclasses.replace(config, **there)


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns rank, alpha, rslora and targets of an adapter's folder, as `LoraConfig` has them. Raises
    InputError for one that is not built."""
    path, raw = folder / CONFIG, _settings(folder)
    require("peft_type" in raw, f"{path}: has no peft_type, so it is no adapter of PEFT")
    for name, values in BUILT.items():
        value = raw.get(name)
        built = value in (None, [], {}, *values)
        hint = f"; built: {', '.join(map(repr, values))}" if values else "; must be null"
        require(
            built, lambda name=name, value=value, hint=hint: f"{path}: {name} = {value!r}: is not built{hint}"
        )
    rank, alpha, targets = raw.get("r", 8), raw.get("lora_alpha", 8), raw.get("target_modules")
    require(type(rank) is int and rank >= 1, f"{path}: r = {rank!r}: must be a whole number from 1")
    require(type(alpha) in (int, float) and alpha > 0, f"{path}: lora_alpha = {alpha!r}: must be above 0")
    names = [targets] if targets == "all-linear" else targets
    require(
        isinstance(names, list) and names and all(isinstance(each, str) for each in names),
        f"{path}: target_modules = {targets!r}: must be a list of names; patterns are not built",
    )
    chosen = () if names == ["all-linear"] else tuple(sorted(names))
    return {"rank": rank, "alpha": float(alpha), "rslora": bool(raw.get("use_rslora")), "targets": chosen}


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    require(path.is_file(), f"lora.adapter = {str(folder)!r}: has no {CONFIG}; give a folder in PEFT's form")
    return read_json(path)


class AdapterWeights:
    """The tensors of an adapter's folder. Raises InputError that names the tensor for one that is missing, of
    another shape, or of no weight that is adapted."""

    def __init__(self, folder: Path, wanted: Mapping[str, Side]):
        """wanted: of `sides`."""
        path = folder / WEIGHTS
        require(path.is_file(), f"lora.adapter = {str(folder)!r}: has no {WEIGHTS}")
        self._reader, self._by_path = Reader(path), {side.path: name for name, side in wanted.items()}
        self._sides, there = wanted, self._reader.tensors
        for name, side in wanted.items():
            require(name in there, f"{path}: lacks tensor {name!r}: it is an adapter of another base")
            shape, dtype = there[name].shape, there[name].dtype
            require(
                shape == side.published,
                f"{path}: tensor {name!r} has the shape {[*shape]}, for the base it is {[*side.published]}: "
                "it is an adapter of another base",
            )
            require(dtype in FLOATS, f"{path}: tensor {name!r}: is {dtype}; one of {', '.join(FLOATS)}")
        rest = [name for name in there if name not in wanted]
        require(not rest, lambda: f"{path}: tensor {rest[0]!r}: is of no linear layer that is adapted")

    def __call__(self, path: tuple[str, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns a matrix with the shape, dtype and sharding of `like`. path: its place in `params`."""
        name = self._by_path[path]
        side = self._sides[name]
        x = self._reader.array(name).reshape([side.shape[dim] for dim in side.order])
        x = np.ascontiguousarray(x.transpose(np.argsort(side.order)).astype(like.dtype))
        return jax.device_put(x, like.sharding)


def check_base(folder: Path, base: Path) -> None:
    """Raises InputError for an adapter that says it is of another base, by the last part of its name. base:
    the folder."""
    said = str(_settings(folder).get("base_model_name_or_path") or "")
    own = read_json(base / "config.json").get("_name_or_path")
    names = [Path(str(name)).name for name in (hub_id(base) or base.absolute(), own) if name]
    require(
        not said or Path(said).name in names,
        f"lora.adapter = {str(folder)!r}: is an adapter of {said!r}, and model.pretrained = {str(base)!r} is "
        f"{' or '.join(names)}; give its own base (if this is it, name it so in {CONFIG})",
    )


def settings_of(config: LoraConfig, targets: list[str], base: str) -> bytes:
    """Returns adapter_config.json. targets: names of the adapted modules. base: what the base is called."""
    keys = {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": config.rslora,
    }
    return (json.dumps(keys, indent=2, ensure_ascii=False) + "\n").encode()


def write_adapter(
    folder: Path,
    wanted: Mapping[str, Side],
    read: "Read",
    dtype: str,
    files: Mapping[str, bytes],
) -> None:
    """Writes the tensors of an adapter, and files beside them, as a folder that appears whole.

    wanted: of `sides`. read: gives each matrix. dtype: of the tensors, as "bfloat16". files: {name: content}.
    Raises InputError, and then leaves nothing.
    """
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    kind = np.dtype(dtype)

    def arrays(names: Iterable[str]) -> Iterator[np.ndarray]:
        for name in names:
            side = wanted[name]
            matrix = read(side.path, jax.ShapeDtypeStruct(side.shape, jnp.float32, sharding=where))
            published = np.asarray(matrix).transpose(side.order).reshape(side.published)
            yield np.ascontiguousarray(published.astype(kind))

    tensors = {name: TensorInfo(NAMES[kind], side.published) for name, side in wanted.items()}
    with new_folder(folder) as partial:
        safetensors.write(partial / WEIGHTS, tensors, arrays)
        for name, content in files.items():
            write_atomically(partial / name, content)


Read = Callable[[tuple[str, ...], jax.ShapeDtypeStruct], jax.Array]
"""(A place in `params`, shape, dtype and sharding) -> what lies there."""


@dataclasses.dataclass(frozen=True)
class Merged:
    """Reads weights with their adapters in them: W + s·A·B in float32, rounded once.

    base, adapters: read weights, and the matrices beside them. infos: {place of a weight with an adapter:
    what it is}.
    """

    base: Read
    adapters: Read
    infos: Mapping[tuple[str, ...], WeightInfo]
    config: LoraConfig

    def __call__(self, path: tuple[str, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
        if (info := self.infos.get(path)) is None:
            return self.base(path, like)
        place, rank = like.sharding, self.config.rank
        # A and B are small: each device has all of them.
        whole = NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else place
        inputs, outputs = ([like.shape[dim] for dim in dims] for dims in (info.inputs, info.outputs))
        pair = [
            self.adapters(
                (*path[:2], LORA, *path[2:], side), jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole)
            )
            for side, shape in (("a", (*inputs, rank)), ("b", (rank, *outputs)))
        ]
        weight = self.base(path, jax.ShapeDtypeStruct(like.shape, jnp.float32, sharding=place))
        return _merge(self.config.scale, jnp.dtype(like.dtype), place)(weight, *pair)


@functools.cache  # a jitted function keeps what it compiled
def _merge(scale: float, dtype: jnp.dtype, sharding: Sharding) -> Callable[..., jax.Array]:
    def merge(weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        change = jnp.tensordot(a, b, 1, precision="highest")
        return (weight + scale * change).astype(dtype)

    return jax.jit(merge, out_shardings=sharding)
