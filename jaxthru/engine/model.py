"""A chain of stages bound to a layout, and the trees of its parameters.

`params` is {"embedding": tree, "layers": groups, "head": tree}. A group is a tuple with an entry for each
block of its pattern: a tree whose arrays are stacked over the repetitions (`model.loop = "scan"`), or a tuple
with a tree for each (`"unroll"`).

Shapes: B rows, T tokens, N = B·T, D embed.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxthru.models import scopes
from jaxthru.models.ops import Ops
from jaxthru.models.stage import Chain, Context, Extras, Stage, by_kind, distinct
from jaxthru.runtime import xla
from jaxthru.runtime.sharding import Axes
from jaxthru.runtime.weights import WeightInfo
from pallas_kernels.attention import find_segments
from pallas_kernels.collective_matmul import WRITES_TO_PEERS

Tree = Any
Batch = dict[str, jax.Array]


class AttentionShape(NamedTuple):
    """One kind of attention of a model. window: as for `pallas_kernels.attention`, None where it covers a
    row."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """policy: of rematerialisation. loop: `scan` or `unroll`."""

    chain: Chain
    ops: Ops
    policy: str
    loop: str

    @property
    def weights(self) -> Tree:
        """What each parameter is, a WeightInfo, in the structure of `params`."""

        def block(stage: Stage, repetitions: int) -> Tree:
            if self.loop == "unroll":
                return (stage.weights,) * repetitions
            return jax.tree.map(WeightInfo.stacked, stage.weights)

        groups = tuple(
            tuple(block(stage, group.repetitions) for stage in group.blocks) for group in self.chain.groups
        )
        return {"embedding": self.chain.embedding.weights, "layers": groups, "head": self.chain.head.weights}

    @property
    def parameters(self) -> int:
        """How many numbers the parameters are."""
        stages = self.chain.embedding, *self.chain.layers, self.chain.head
        return sum(by_kind(stages, lambda stage: sum(leaf.size for leaf in jax.tree.leaves(stage.shapes))))

    def compiler_options(
        self, deterministic: bool = False, autotuned: Path | None = None, platform: str = ""
    ) -> dict[str, Any]:
        """Returns the options for compiling its programs, a step and an evaluation alike: see
        `xla.compiler_options`. platform: by default what this process runs on."""
        layout = self.ops.layout
        return xla.compiler_options(
            platform or jax.default_backend(),
            layout.mesh.size,
            deterministic,
            writes_to_peers=self.ops.collective_matmul_by in WRITES_TO_PEERS,
            copies=self.ops.copies,
            experts="expert" in layout.live_axes,
            loops=self.loop == "scan",
            autotuned=autotuned,
        )

    def init(self, key: jax.Array) -> Tree:
        """Returns fresh parameters, all float32; the same values for `scan` and `unroll`, on any mesh."""
        made = [init(stage, keys) for stage, keys in self.stage_keys(key)]
        return join_stages(made, self.weights)

    def stage_keys(self, key: jax.Array) -> list[tuple[Stage, jax.Array]]:
        """Returns what each tree of `split_stages` is made by and from: its stage and its key, or the keys of
        all that are stacked. key: of them all."""
        first, layers, last = jax.random.split(key, 3)
        return self.by_tree(first, list(jax.random.split(layers, len(self.chain.layers))), last, jnp.stack)

    def by_tree(
        self, embedding: Any, layers: list, head: Any, stack: Callable[[list], Any]
    ) -> list[tuple[Stage, Any]]:
        """Returns for each tree of `split_stages` its stage and what is given of it: of embedding, head or
        one of all layers; of stacked layers what `stack` makes of theirs."""
        found, rest = [(self.chain.embedding, embedding), (self.chain.head, head)], layers
        for group in self.chain.groups:
            count = len(group.blocks)
            own, rest = rest[: count * group.repetitions], rest[count * group.repetitions :]
            if self.loop == "unroll":
                found += zip(group.blocks * group.repetitions, own, strict=True)
            else:
                found += [(stage, stack(own[at::count])) for at, stage in enumerate(group.blocks)]
        return found

    def context(
        self, batch: Batch, max_segments: int, share: float = 1.0, draw: jax.Array | None = None
    ) -> Context:
        """Returns what all stages need of a micro-batch. share: of the step's rows, those in it. draw: see
        Context."""
        positions = batch["positions"]
        segments = find_segments(batch["segment_ids"], max_segments)
        prepared = self.chain.prepare(positions)
        valid = batch["segment_ids"] > 0
        ops = dataclasses.replace(self.ops, policy=self.policy)
        return Context(positions, segments, valid, prepared, jnp.float32(share), ops, draw=draw)

    def embed(self, params: Tree, tokens_BT: jax.Array, context: Context) -> tuple[jax.Array, Extras]:
        """Returns the first block's input [N, D]; for a row of too many segments NaN, so that no step is ever
        made from it. params: of the embedding."""
        with jax.named_scope(scopes.MODEL), jax.named_scope(scopes.EMBEDDING):
            x_ND, extras = self.chain.embedding.apply(params, tokens_BT, context)
            # Said of rows, or the partitioner would split them as tokens, and gather what they came from.
            overflow_B = self.ops.constrain(context.segments.overflow, "batch")
            overflow_N = jnp.repeat(overflow_B, tokens_BT.shape[1])
            return jnp.where(overflow_N[:, None], jnp.nan, x_ND).astype(x_ND.dtype), extras

    def attention_shapes(self, rows: int, sequence: int) -> list[AttentionShape]:
        """Returns each kind of attention that blocks ask for, with so many rows of so many tokens."""
        found: list[AttentionShape] = []

        def note(q_BTHC: jax.Array, k_BTKC: jax.Array, v_BTKC, segments, window: int | None) -> jax.Array:
            if window is not None and window >= sequence:
                window = None
            found.append(AttentionShape(q_BTHC.shape[2], k_BTKC.shape[2], q_BTHC.shape[3], window))
            return q_BTHC

        def run(params: list[Tree]) -> None:
            ids = jnp.ones((rows, sequence), jnp.int32)
            context = self.context({"segment_ids": ids, "positions": ids}, 1)
            context = dataclasses.replace(context, attention=note)
            x_ND, _ = self.embed(params[0], ids, context)
            for stage, tree in zip(kinds, params[1:], strict=True):
                stage.apply(tree, x_ND, context)

        kinds = distinct(self.chain.layers)
        jax.eval_shape(run, [stage.shapes for stage in (self.chain.embedding, *kinds)])
        return list(dict.fromkeys(found))

    def lm_head(self, params: Tree) -> tuple[jax.Array, Axes]:
        """Returns the LM head, which turns hidden vectors into logits, as it is stored, and its axes. params:
        without layers will do."""
        matrix, info = params, {"embedding": self.chain.embedding.weights, "head": self.chain.head.weights}
        for name in self.chain.output:
            matrix, info = matrix[name], info[name]
        return matrix, info.axes


def init(stage: Stage, keys: jax.Array) -> Tree:
    """Returns fresh parameters of a stage, float32; of several keys those of several, stacked."""
    return jax.vmap(stage.init)(keys) if keys.ndim else stage.init(keys)


EMBEDDING, HEAD, LAYERS = 0, 1, 2
"""Where `split_stages` has the embedding, the head and the first block."""


def split_stages(tree: Tree) -> list[Tree]:
    """Returns what a tree in the structure of `params` is updated by: embedding, head, and each layer in its
    order (of scanned layers, each stacked block)."""
    blocks = []
    for group in tree["layers"]:
        blocks += [tree for each in zip(*group, strict=True) for tree in each] if unrolled(group) else group
    return [tree["embedding"], tree["head"], *blocks]


def join_stages(trees: list[Tree], like: Tree) -> Tree:
    """Returns the tree that `split_stages` split. like: a tree whose layers lie alike."""
    embedding, head, *blocks = trees
    groups, rest = [], iter(blocks)
    for group in like["layers"]:
        if unrolled(group):
            each = [[next(rest) for _ in group] for _ in group[0]]
            groups.append(tuple(zip(*each, strict=True)))
        else:
            groups.append(tuple(next(rest) for _ in group))
    return {"embedding": embedding, "layers": tuple(groups), "head": head}


def unrolled(group: tuple[Tree, ...]) -> bool:
    """Says whether a group's layers lie one by one, not stacked."""
    return isinstance(group[0], tuple)
