"""What a run starts from, read from published weights: the model, or a frozen base and its first adapters."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.build.step import chain_of
from jaxthru.config import RunConfig
from jaxthru.engine.model import LAYERS, Model
from jaxthru.huggingface.adapter import (
    CONFIG,
    PREFIX,
    AdapterWeights,
    Merged,
    Read,
    check_base,
    settings_of,
    sides,
    write_adapter,
)
from jaxthru.huggingface.weights import Weights
from jaxthru.models.lora import LORA, SCALES, LoraConfig, quantise
from jaxthru.models.published import hub_id
from jaxthru.models.stage import Chain
from jaxthru.runtime.errors import require
from jaxthru.runtime.weights import WeightInfo
from jaxthru.training.base_files import BaseFiles
from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.saved import SavedParameters

Tree = Any
Path_ = tuple[str, ...]
WITHOUT_BASE = (
    "model.pretrained = None: the adapters are beside weights drawn from train.seed, which no folder has"
)


def published_weights(config: RunConfig, fresh: bool = True) -> Weights | None:
    """Returns the published weights that a run is to start from, every tensor accounted for; None for random
    ones. fresh: whether it starts from `lora.adapter` too, which then is looked at as well. Raises
    InputError."""
    if fresh and config.lora.on:
        adapter_of(config, chain_of(config))
    if config.model.pretrained is None:
        return None
    return Weights(Path(config.model.pretrained).expanduser(), config.model)


def adapted_paths(chain: Chain) -> dict[Path_, WeightInfo]:
    """Returns {a weight's place in `params`, one entry a layer: what it is} of those with an adapter."""
    return {
        ("layers", str(layer), *target.path): target.info
        for layer, stage in enumerate(chain.layers)
        for target in stage.apply.targets
    }


def adapter_of(config: RunConfig, chain: Chain) -> AdapterWeights | None:
    """Returns the adapter that a run starts from, None without one. Raises InputError."""
    if config.lora.adapter is None:
        return None
    folder = Path(config.lora.adapter).expanduser()
    base = config.model.pretrained
    require(base is not None, f"lora.adapter = {str(folder)!r}: needs model.pretrained, its base")
    check_base(folder, Path(base).expanduser())
    return AdapterWeights(folder, sides(config.model, adapted_paths(chain), config.lora.rank))


class AdaptedWeights:
    """Reads the params of a model with adapters: of the base from published weights, quantised where it is to
    be, and of adapters the first ones, or those of a folder."""

    def __init__(self, config: RunConfig, model: Model, weights: Weights, adapter: AdapterWeights | None):
        self._base, self._weights, self._adapter = config.lora.base, weights, adapter
        # Keys are those of the layers one by one, however they lie.
        self._made = Model(model.chain, model.ops, model.policy, "unroll").stage_keys(
            jax.random.key(config.train.seed)
        )[LAYERS:]
        self._scales: dict[Path_, jax.Array] = {}
        self._first: dict[str, Tree] = {}

    def array(self, path: Path_, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns what lies at a place in `params` with the shape, dtype and sharding of `like`."""
        inner = path[2] if path[0] == "layers" else None
        if inner == LORA:
            return self._adapter(path, like) if self._adapter else self._initial(path, like)
        if inner == SCALES:
            of = (*path[:2], *path[3:])
            if of not in self._scales:  # asked for before the weight: that is then read twice
                self._quantised(of, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
            return jax.device_put(self._scales.pop(of), like.sharding)
        if jnp.dtype(like.dtype).itemsize == 1:
            return jax.device_put(self._quantised(path, like.sharding), like.sharding)
        return self._weights.array(path, like)

    def _quantised(self, path: Path_, sharding: jax.sharding.Sharding) -> jax.Array:
        """Returns the values of a weight, and keeps its scale until that is asked for."""
        about = self._weights.tensors[path]
        like = jax.ShapeDtypeStruct(about.shape, jnp.float32, sharding=sharding)
        found = _quantise(self._weights.array(path, like), about.info, self._base)
        self._scales[path] = found.scale
        return found.values

    def _initial(self, path: Path_, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns a first matrix. All of a layer are made at once."""
        if path[1] not in self._first:
            stage, key = self._made[int(path[1])]
            self._first[path[1]] = jax.jit(stage.init.adapters)(key)
        tree: Mapping = self._first[path[1]]
        for name in path[3:]:
            tree = tree[name]
        return jax.device_put(tree, like.sharding)


_quantise = jax.jit(quantise, static_argnums=(1, 2))


def reader_of(config: RunConfig, model: Model, weights: Weights) -> Read:
    """Returns what reads the params of a run that starts from published weights."""
    if not config.lora.on:
        return weights.array
    return AdaptedWeights(config, model, weights, adapter_of(config, model.chain)).array


def merged_weights(
    config: RunConfig, adapters: Read | None = None, run: RunDirectory | None = None
) -> Merged:
    """Returns what reads the weights of a configuration with its adapters in them.

    adapters: read A and B; None are those of `lora.adapter`. run: whose checkpoints have them, and whose base
    it has to be. Raises InputError.
    """
    weights = base_weights(config, run)
    chain = chain_of(config)
    return Merged(weights.array, adapters or adapter_of(config, chain), adapted_paths(chain), config.lora)


def base_weights(config: RunConfig, run: RunDirectory | None) -> Weights:
    """Returns the published weights that adapters are beside. run: whose base they have to be. Raises
    InputError."""
    require(config.model.pretrained is not None, WITHOUT_BASE)
    weights = Weights(Path(config.model.pretrained).expanduser(), config.model)
    if run is not None:
        BaseFiles(weights.folder, run.base).settle(keep=False)
    return weights


def without_adapters(config: RunConfig) -> RunConfig:
    """Returns a configuration of the model alone."""
    return dataclasses.replace(config, lora=LoraConfig())


def export_adapter(
    run: RunDirectory,
    config: RunConfig,
    saved: SavedParameters,
    folder: Path,
    files: Mapping[str, bytes],
    card: str,
) -> None:
    """Writes the adapters of a run's checkpoint in PEFT's form, in float32 as they were trained.

    files: {name: content} of the tokenizer. card: README.md. Raises InputError.
    """
    require(config.model.pretrained is not None, WITHOUT_BASE)
    wanted = sides(config.model, adapted_paths(chain_of(config)), config.lora.rank)
    modules = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in wanted}
    targets = sorted({module.rpartition(".")[2] for module in modules})
    base = config.model.pretrained
    base = hub_id(base) or str(Path(base).expanduser().absolute())  # as PEFT is to load it
    settings = settings_of(config.lora, targets, base)
    files = {**files, CONFIG: settings, "README.md": card.encode()}
    write_adapter(folder, wanted, saved.master, "float32", files)
