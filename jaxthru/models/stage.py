"""A model as a chain of stages: embedding, blocks, head. What a family hands to the engine.

Shapes: B rows, T tokens, N = B·T, D embed.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from flax import nnx

from jaxthru.models.ops import Ops
from jaxthru.runtime.weights import WeightInfo
from pallas_kernels.attention import Segments

Tree = Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("positions", "segments", "valid", "prepared", "share", "draw"),
    meta_fields=("ops", "attention"),
)
@dataclasses.dataclass(frozen=True)
class Context:
    """What a run gives to every stage.

    positions: int32 [B, T], restarting in each document. segments: of `pallas_kernels.attention`. prepared:
    what `Chain.prepare` made of positions, e.g. rotary angles. valid: bool [B, T], the tokens of documents;
    the others are padding. share: of the step's rows, those of this
    micro-batch. ops: linear layers and the mesh's operations as this run does them. attention:
    takes the place of theirs, (queries, keys, values, segments, window) -> heads' outputs. draw: the number
    of this micro-batch in the run, which what is drawn at random is made of; None draws nothing.
    """

    positions: jax.Array
    segments: Segments
    valid: jax.Array
    prepared: Tree
    share: jax.Array
    ops: Ops
    attention: Callable[..., jax.Array] | None = None
    draw: jax.Array | None = None

    def attend(
        self, q_BTHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array, window: int | None = None
    ) -> jax.Array:
        """Returns causal attention within documents, [B, T, H, C]. window: each token sees no more than so
        many tokens, the last of which is itself; None is all of its document."""
        attention = self.attention or self.ops.attention
        return attention(q_BTHC, k_BTKC, v_BTKC, self.segments, window)


class Extras(NamedTuple):
    """What a stage has beside its output, of the micro-batch that it was given.

    losses: {name: scalar}, auxiliary losses: means over its rows × positions, which the step minimises beside
    the cross-entropy and records. metrics: {name: array} for the record, declared as `Stage.metrics`.
    """

    losses: Mapping[str, jax.Array] = {}
    metrics: Mapping[str, jax.Array] = {}


class Mixture(NamedTuple):
    """A stage's mixture of experts: `top_k` of so many `experts` for each token. together: so many of them
    have to stay side by side, as their places have a say in the choice."""

    top_k: int
    experts: int
    together: int = 1

    def rows(self, devices: int) -> float:
        """Returns the rows for which a device has room, over those that it has where all experts are equally
        busy. devices: over which experts are split. Each of those that a device gathers tokens from may send
        all, and of a token no more of its experts than there are here."""
        return devices * min(self.top_k, self.experts // devices) / self.top_k


@dataclasses.dataclass(frozen=True)
class Metric:
    """reduce: how values of several micro-batches, and of several stages, become one. Stages see
    the micro-batch of all devices, so over these nothing is left to add. Micro-batches have equally many
    rows, and count alike in a `mean`. `layers`: those of micro-batches are added up, and those of stages stay
    apart, [layers that have it, ...]; integers stay what they are, where all other metrics are float32.
    shown: what the record has in its place, made of its value over the step: {name: array}; None is itself.
    """

    reduce: Literal["sum", "mean", "max", "layers"] = "sum"
    shown: Callable[[jax.Array], Mapping[str, jax.Array]] | None = None


Advance = Callable[[Tree, Mapping[str, jax.Array]], Tree]
"""(params, {metric: of this layer, over the step}) -> params; see `Stage.advance`."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One link of the chain. Equal stages share their compiled programs.

    name: of its kind, in programs' names. apply: (params, x, context) -> (y, Extras). init: key -> params,
    float32. weights: a WeightInfo for each of the params. kept: numbers per token of the activations that
    have a name (`jax.ad_checkpoint.checkpoint_name`), and of what else the backward pass needs if nothing is
    computed again: as "rest" the inputs of matmuls, of which "float8" are those multiplied in float8, and
    what is no matmul's input under names of the family's own. See `remat.kept_bytes`. matmul_flops: FLOPs per
    token of those with a name that are matmuls, which a policy may have computed again. metrics: those that
    `apply` gives. scopes: name scopes of its own, which the profiler is to tell apart. exchanges: {name scope
    whose all-to-alls are meant: logical axis that is split where there are any}. advance: moves weights that
    do not train by what the layer counted, its metrics of `layers`: once a step, behind the optimizer's
    update and only where that is made. Without a gradient there is no clipping and no weight decay. It is
    given all of the layer's params, and returns them with those replaced. mixture: of experts, if it has one.
    """

    name: str
    apply: Callable[[Tree, Any, Context], tuple[Any, Extras]]
    init: Callable[[jax.Array], Tree]
    weights: Tree
    kept: Mapping[str, int] = dataclasses.field(default_factory=dict)
    matmul_flops: Mapping[str, int] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    scopes: tuple[str, ...] = ()
    exchanges: Mapping[str, str] = dataclasses.field(default_factory=dict)
    advance: Advance | None = None
    mixture: Mixture | None = None

    @property
    def shapes(self) -> Tree:
        """The params' shapes and dtypes. The key is made within: outside it would start JAX's backend."""
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    @property
    def matrices(self) -> list[tuple[WeightInfo, tuple[int, ...]]]:
        """The weights of its linear layers, each with its shape."""
        pairs = zip(jax.tree.leaves(self.weights), jax.tree.leaves(self.shapes), strict=True)
        return [(info, leaf.shape) for info, leaf in pairs if info.role == "matrix"]

    @property
    def largest(self) -> int:
        """Numbers in the largest of the params' arrays."""
        return max((leaf.size for leaf in jax.tree.leaves(self.shapes)), default=0)

    @property
    def by_layer(self) -> tuple[str, ...]:
        """The metrics that each layer has for itself."""
        return tuple(name for name, metric in self.metrics.items() if metric.reduce == "layers")


class Group(NamedTuple):
    """A pattern of blocks, repeated."""

    blocks: tuple[Stage, ...]
    repetitions: int

    @property
    def loops(self) -> bool:
        """Says whether XLA makes a loop over its stacked layers, as it does not of one repetition."""
        return self.repetitions > 1


class Chain(NamedTuple):
    """A family's model. prepare: positions [B, T] -> what all blocks need of them. output: where in the
    params of embedding and head the matrix is that makes logits, e.g. ("head", "matrix"). draws: whether
    stages draw at random as they train, by `Context.draw`."""

    embedding: Stage
    groups: tuple[Group, ...]
    head: Stage
    output: tuple[str, ...]
    prepare: Callable[[jax.Array], Tree] = lambda positions_BT: None
    draws: bool = False

    @property
    def tied(self) -> bool:
        """Says whether the embedding's table also makes the logits."""
        return self.output[0] == "embedding"

    @property
    def layers(self) -> list[Stage]:
        """All blocks, in the order of the forward pass."""
        return [stage for group in self.groups for stage in group.blocks * group.repetitions]

    @property
    def dims(self) -> list[tuple[str, int]]:
        """Logical axis and size of each dim of a weight, all that there are; an axis may have several."""
        found: dict[tuple[str, int], None] = {}
        for stage in self.stages:
            for info, leaf in zip(jax.tree.leaves(stage.weights), jax.tree.leaves(stage.shapes), strict=True):
                found |= {pair: None for pair in zip(info.axes, leaf.shape, strict=True) if pair[0]}
        return list(found)

    @property
    def stages(self) -> Iterator[Stage]:
        """All stages that differ."""
        return iter([self.embedding, *distinct(self.layers), self.head])


def repeated(pattern: Sequence[Stage], layers: int) -> tuple[Group, ...]:
    """Returns the groups of so many layers: the pattern as often as it fits, and the rest of one."""
    whole, rest = divmod(layers, len(pattern))
    groups = Group(tuple(pattern), whole), Group(tuple(pattern[:rest]), 1)
    return tuple(group for group in groups if group.blocks and group.repetitions)


def by_kind(kinds: Iterable[Any], make: Callable[[Any], Any]) -> list[Any]:
    """Returns what `make` gives of each; of those that are equal, which need no hash, it is asked once."""
    known: list[tuple[Any, Any]] = []
    found = []
    for kind in kinds:
        at = next((at for at, (other, _) in enumerate(known) if other == kind), len(known))
        if at == len(known):
            known.append((kind, make(kind)))
        found.append(known[at][1])
    return found


def distinct(stages: Sequence[Stage]) -> list[Stage]:
    """Returns the stages that are not equal to one before."""
    return [stage for index, stage in enumerate(stages) if stage not in stages[:index]]


def module_stage(name: str, module: Callable[..., nnx.Module], config: Any, **about: Any) -> Stage:
    """Returns the stage of a Flax NNX module, made as `module(config, rngs)`, whose parameters are all
    `layers.Weight`s. It is called as (x, context), and returns y, or (y, Extras).

    config: hashable; equal ones make equal stages. about: further fields of the Stage.
    """
    return Stage(name, *_bound(module, config), **about)


@functools.cache
def _bound(module: Callable[..., nnx.Module], config: Any) -> tuple[Callable, Callable, Tree]:
    """Returns `apply`, `init` and `weights` of a module. What is compiled walks no module graph."""
    graph, state = nnx.split(nnx.eval_shape(lambda: module(config, nnx.Rngs(params=0))))

    def init(key: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(module(config, nnx.Rngs(params=key))))

    def apply(params: Tree, x: Any, context: Context) -> tuple[Any, Extras]:
        result = nnx.merge(graph, params)(x, context)
        return result if isinstance(result, tuple) else (result, Extras())

    is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    weights = jax.tree.map(lambda variable: variable.info, state, is_leaf=is_variable)
    return apply, init, nnx.to_pure_dict(weights)
