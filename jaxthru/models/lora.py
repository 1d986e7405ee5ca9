"""Low-rank adapters (LoRA, arXiv:2106.09685): a frozen base, and beside each target two small matrices.

A target W gives x·W + s·(x·A)·B, with s = alpha / rank, or alpha / √rank (rsLoRA, arXiv:2312.03732). W is
kept in the compute dtype, in float8 or in int8, and never changes: no gradient, optimizer state or checkpoint
is of it.

An adapted chain is a chain like any other. A block's params are those of the base and, in a tree of their own
under "lora", A and B of each target; a quantised base has its scales under "scales". `Adapters` multiplies.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxthru.models import fp8
from jaxthru.models.adapters import Adapters, Path, Target, kept
from jaxthru.models.quantised import Quantised, quantise_int8
from jaxthru.models.stage import Chain, Context, Extras, Group, Stage, by_kind
from jaxthru.runtime.errors import did_you_mean, require
from jaxthru.runtime.weights import WeightInfo

Tree = Any
LORA, SCALES, SEED = "lora", "scales", "seed"
"""Where a block's params have the adapters, the scales of a quantised base, and among the adapters what a
layer's dropout is drawn from."""


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """rank: of the adapters; 0 trains the whole model.
    alpha: adapters are scaled by alpha / rank. rslora: by alpha / √rank instead.
    dropout: share of an adapter's input that is left out, drawn anew in every step.
    targets: linear layers that have an adapter, by their published name, as `q_proj` or `mlp.down_proj`, or
        by jaxthru's, as `query`; empty is all of the blocks'.
    base: how the frozen weights are kept: `compute`: as precision.compute has it. `fp8`: the blocks' linear
        layers in float8, quantised once, and multiplied in that. `int8`: one scale for each output, widened
        for each use.
    adapter: a folder with an adapter in PEFT's form to start from, which gives rank, alpha, rslora and
        targets; None starts from zero.
    """

    rank: int = 0
    alpha: float = 32.0
    rslora: bool = False
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    base: Literal["compute", "fp8", "int8"] = "compute"
    adapter: str | None = None

    def __post_init__(self):
        require(self.rank >= 0, f"lora.rank = {self.rank}: must be at least 0, which is off")
        require(self.alpha > 0, f"lora.alpha = {self.alpha}: must be above 0")
        require(0 <= self.dropout < 1, f"lora.dropout = {self.dropout}: must be at least 0 and below 1")
        for name in () if self.on or self.adapter else ("rslora", "dropout", "targets", "base"):
            value = getattr(self, name)
            said = f"lora.{name} = {value!r}: is of adapters, and lora.rank is 0; choose a rank, as 16"
            require(value == getattr(LoraConfig, name), said)

    @property
    def on(self) -> bool:
        """Says whether adapters are trained, and not the model."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """What adapters are multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def adapted(chain: Chain, config: LoraConfig, compute: jnp.dtype, names: Mapping[Path, str]) -> Chain:
    """Returns a chain with its weights frozen and adapters beside its targets.

    compute: the dtype of activations. names: {a weight's place in its block: its published name there}, as
    {("attention", "query"): "self_attn.q_proj"}. Raises InputError for a target that no block has.
    """
    _check_targets(chain, config, names)

    def block(stage: Stage) -> Stage:
        return _adapted_block(stage, config, compute, names)

    frozen = functools.partial(_frozen_stage, compute=compute, base="compute")
    blocks = iter(by_kind([stage for group in chain.groups for stage in group.blocks], block))
    groups = tuple(
        Group(tuple(next(blocks) for _ in group.blocks), group.repetitions) for group in chain.groups
    )
    ends = {"embedding": frozen(chain.embedding), "head": frozen(chain.head)}
    return chain._replace(groups=groups, draws=config.dropout > 0, **ends)


def off(chain: Chain) -> Chain:
    """Returns an adapted chain whose adapters add nothing: the base alone, of the same params."""

    def block(stage: Stage) -> Stage:
        return dataclasses.replace(stage, apply=dataclasses.replace(stage.apply, on=False))

    groups = tuple(Group(tuple(map(block, group.blocks)), group.repetitions) for group in chain.groups)
    return chain._replace(groups=groups)


def needed_flops(
    train_flops: Callable[[float, float], float], adapters: int, tokens: float, attention_span: float
) -> float:
    """Returns the floating-point operations that one update of adapters needs.

    train_flops: (tokens, attention_span) -> those of an update of the whole model. adapters: their numbers.
    Of the base's matmuls the gradients of its weights, a third, are not needed; adapters need all three.
    """
    matmuls = train_flops(tokens, 0)
    attention = train_flops(tokens, attention_span) - matmuls
    return matmuls * 2 / 3 + attention + 6.0 * adapters * tokens


def adapter_parameters(chain: Chain) -> int:
    """Returns how many numbers the adapters of an adapted chain are."""
    return sum(
        by_kind(chain.layers, lambda stage: sum(leaf.size for leaf in jax.tree.leaves(stage.shapes[LORA])))
    )


def targets_of(stage: Stage) -> list[tuple[Path, WeightInfo, tuple[int, ...]]]:
    """Returns the linear layers of a block that may have an adapter: each one's place, what it is, and its
    shape. Stacks of them, as of experts, have none."""
    return [each for each in _matrices(stage) if not each[1].stack]


def _matrices(stage: Stage) -> list[tuple[Path, WeightInfo, tuple[int, ...]]]:
    infos = jax.tree_util.tree_leaves_with_path(stage.weights)
    found = [(tuple(str(key.key) for key in keys), info) for keys, info in infos]
    pairs = zip(found, jax.tree.leaves(stage.shapes), strict=True)
    return [(*each, leaf.shape) for each, leaf in pairs if each[1].role == "matrix"]


def _check_targets(chain: Chain, config: LoraConfig, names: Mapping[Path, str]) -> None:
    paths = {path: None for stage in chain.layers for path, _, _ in targets_of(stage)}
    known = [names.get(path, ".".join(path)).rpartition(".")[2] for path in paths]
    require(bool(paths), f"lora.rank = {config.rank}: the model's blocks have no linear layer to adapt")
    experts = [path for stage in chain.layers for path, info, _ in _matrices(stage) if info.stack]
    for target in config.targets:
        hint = did_you_mean(target, known)
        why = f"matches nothing{hint if '?' in hint else ''}"
        if any(_named(path, names, target) for path in experts):
            why = "is of experts, which have no adapters"
        said = f"lora.targets: {target!r} {why}; the blocks' linear layers are {', '.join(sorted({*known}))}"
        require(any(_named(path, names, target) for path in paths), said)


def _named(path: Path, names: Mapping[Path, str], target: str) -> bool:
    """Says whether a target means a weight, by its whole name or by the end of it, as PEFT takes it."""
    return any(f".{name}".endswith(f".{target}") for name in (names.get(path, ""), ".".join(path)) if name)


def _frozen(info: WeightInfo) -> WeightInfo:
    return dataclasses.replace(info, trains=False, in_base=True)


def _frozen_stage(stage: Stage, compute: jnp.dtype, base: str) -> Stage:
    """Returns a stage with its weights frozen."""
    init = FrozenInit(stage, jnp.dtype(compute), base)
    weights = jax.tree.map(_frozen, stage.weights)
    if base != "compute":
        weights[SCALES] = _tree({path: _scale_info(info, base) for path, info, _ in targets_of(stage)})
    return dataclasses.replace(stage, init=init, weights=weights, advance=None)


def _scale_info(info: WeightInfo, base: str) -> WeightInfo:
    axes = tuple(info.axes[dim] for dim in info.outputs) if base == "int8" else ()
    return WeightInfo(axes, "bias", trains=False, in_base=True)


def _adapted_block(stage: Stage, config: LoraConfig, compute: jnp.dtype, names: Mapping[Path, str]) -> Stage:
    chosen = [
        Target(path, info, shape)
        for path, info, shape in targets_of(stage)
        if not config.targets or any(_named(path, names, target) for target in config.targets)
    ]
    frozen = _frozen_stage(stage, compute, config.base)
    adapters = _tree({each.path: each.infos for each in chosen})
    if config.dropout:
        adapters[SEED] = WeightInfo((None,), "bias", trains=False)
    weights = frozen.weights | {LORA: adapters}
    return dataclasses.replace(
        frozen,
        apply=AdaptedApply(stage, config, tuple(chosen)),
        init=AdaptedInit(frozen.init, tuple(chosen), config.rank, config.dropout > 0),
        weights=weights,
        kept=kept(stage.kept, chosen, config.rank, config.dropout > 0),
    )


def _tree(leaves: Mapping[Path, Any]) -> dict:
    """Returns nested dicts of what lies at these places."""
    found: dict = {}
    for path, leaf in leaves.items():
        functools.reduce(lambda tree, name: tree.setdefault(name, {}), path[:-1], found)[path[-1]] = leaf
    return found


def _at(tree: Tree, path: Path) -> Any:
    return functools.reduce(lambda tree, name: tree[name], path, tree)


def quantise(matrix: jax.Array, info: WeightInfo, base: str) -> Quantised:
    """Returns a weight of a linear layer [*in, *out] as a quantised base has it. base: `fp8` or `int8`."""
    if base == "fp8":
        return fp8.quantise(matrix, fp8.FORWARD)
    return quantise_int8(matrix, info.inputs)


@dataclasses.dataclass(frozen=True)
class FrozenInit:
    """Makes the frozen weights of a stage: key -> params."""

    stage: Stage
    compute: jnp.dtype
    base: str

    def __call__(self, key: jax.Array) -> Tree:
        return self.frozen(self.stage.init(key))

    def frozen(self, params: Tree) -> Tree:
        """Returns the stage's params as they are kept."""
        cast = lambda info, leaf: leaf.astype(self.compute) if info.decays else leaf  # noqa: E731
        params = jax.tree.map(cast, self.stage.weights, params)
        if self.base == "compute":
            return params
        scales = {}
        for path, info, _ in targets_of(self.stage):
            values, scales[path] = quantise(_at(params, path), info, self.base)
            _at(params, path[:-1])[path[-1]] = values
        return params | {SCALES: _tree(scales)}


@dataclasses.dataclass(frozen=True)
class AdaptedInit:
    """Makes the params of a block with adapters: key -> params."""

    base: FrozenInit
    targets: tuple[Target, ...]
    rank: int
    draws: bool

    def __call__(self, key: jax.Array) -> Tree:
        return self.base(key) | {LORA: self.adapters(key)}

    def adapters(self, key: jax.Array) -> Tree:
        """Returns the adapters that the block of this key starts with."""
        first = jax.random.fold_in(key, 1)
        keys = jax.random.split(first, max(len(self.targets), 1))
        pairs = zip(self.targets, keys, strict=False)
        found = _tree({each.path: each.init(one, self.rank) for each, one in pairs})
        return found | ({SEED: jax.random.key_data(first)} if self.draws else {})


@dataclasses.dataclass(frozen=True)
class AdaptedApply:
    """Applies a block with adapters, or without them: (params, x, context) -> (y, Extras)."""

    stage: Stage
    config: LoraConfig
    targets: tuple[Target, ...]
    on: bool = True

    def __call__(self, params: Tree, x: Any, context: Context) -> tuple[Any, Extras]:
        base = {name: tree for name, tree in params.items() if name not in (LORA, SCALES)}
        # A weight is known by the very array: modules hand it on as it is.
        pairs = {}
        if self.on:
            pairs = {id(_at(base, each.path)): _at(params[LORA], each.path) for each in self.targets}
        scales = {}
        if SCALES in params:
            for path, _, _ in targets_of(self.stage):
                scales[id(_at(base, path))] = _at(params[SCALES], path)
        key = None
        if self.config.dropout and context.draw is not None:
            key = jax.random.fold_in(jax.random.wrap_key_data(params[LORA][SEED]), context.draw)
        adapters = Adapters(pairs, scales, self.config.scale, self.config.dropout, key)
        result = self.stage.apply(
            base, x, dataclasses.replace(context, ops=dataclasses.replace(context.ops, adapters=adapters))
        )
        adapters.check()
        return result
