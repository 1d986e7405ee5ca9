"""Prefill and decode: the chain of stages, walked once over the prompts, and then for each token.

The first walk keeps keys and values, the others take one token of each row.

A block's attention is replaced through `Context.attention`, in the trace that its stage is applied in; so
any family's blocks can be walked, that ask for attention by `Context.attend` and by nothing that traces them
anew (a loop or a rematerialisation within a block).

Shapes: B rows, T tokens, N = B·T, D embed, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.engine.model import Model, unrolled
from jaxthru.generation.cache import Cached, Capture, Time
from jaxthru.models.ops import Ops
from jaxthru.models.stage import Context, Group
from pallas_kernels.rms_norm import PARTITIONED

Tree = Any
Caches = tuple
"""{group: {block: caches of its calls of attention}} as tuples; of unrolled layers one more between them:
{group: {block: {repetition: caches}}}."""


@dataclasses.dataclass(frozen=True)
class GenerationOps(Ops):
    """The run's operations but for what only training gains by."""

    @classmethod
    def of(cls, ops: Ops) -> "GenerationOps":
        """Returns those in place of a run's. Linear layers are of the compute type: scales of float8 would be
        of all rows, and a row's text then depend on the others'. Tokens are too few for kernels that move
        them while they multiply, and for norms of their own."""
        fields = {field.name: getattr(ops, field.name) for field in dataclasses.fields(ops)}
        other = {"float8": False, "float8_experts": False, "collective_matmul_by": "none", "copies": False}
        other |= {"keep_parameters": False, "rms_norm_by": PARTITIONED}
        return cls(**fields | other)

    def embed(self, table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        """Returns [N, D]. On one device the rows are looked up before they are cast: the sums of a gradient,
        for which training casts the whole table, are none here, and the table is read for each token."""
        if self.layout.mesh.size > 1:
            return super().embed(table_VD, tokens_BT)
        return table_VD[tokens_BT.reshape(-1)].astype(self.compute)


def for_generation(model: Model) -> Model:
    """Returns the model with `GenerationOps`."""
    return dataclasses.replace(model, ops=GenerationOps.of(model.ops))


def in_compute_dtype(model: Model, params: Tree) -> Tree:
    """Returns the parameters as generation reads them, once for each token: on the model's devices, matrices
    and tables in the compute type, leaf by leaf. Those that are so already are not copied."""

    def cast(info: Any, leaf: jax.Array) -> jax.Array:
        leaf = jax.device_put(leaf, model.ops.layout.sharding(info.axes))
        return leaf.astype(model.ops.compute) if info.decays else leaf

    return jax.tree.map(cast, model.weights, params)


def prefill(
    model: Model, params: Tree, tokens_BT: jax.Array, lengths_B: jax.Array, slots: int
) -> tuple[jax.Array, Caches]:
    """Returns the logits [B, V] after each row's last token, and the caches.

    tokens_BT: int32, prompts of `lengths_B` tokens, padded behind. slots: of a cache without a window.
    """
    positions_BT, ids_BT = prompt_positions(tokens_BT, lengths_B)
    context = model.context({"positions": positions_BT, "segment_ids": ids_BT}, 2)
    x_ND, _ = model.embed(params["embedding"], tokens_BT, context)

    def repetition(group: Group, x_ND: jax.Array, trees: Tree) -> tuple:
        caches = []
        for stage, tree in zip(group.blocks, trees, strict=True):
            capture = Capture(model.ops, slots, lengths_B)
            x_ND, _ = stage.apply(tree, x_ND, dataclasses.replace(context, attention=capture))
            caches.append(tuple(capture.caches))
        return x_ND, tuple(caches)

    found = []
    for group, trees in zip(model.chain.groups, params["layers"], strict=True):
        if unrolled(trees):
            each = []
            for of_one in zip(*trees, strict=True):
                x_ND, caches = repetition(group, x_ND, of_one)
                each.append(caches)
            found.append(tuple(zip(*each, strict=True)))
        else:
            x_ND, caches = jax.lax.scan(
                lambda x_ND, trees, group=group: repetition(group, x_ND, trees),
                *(x_ND, trees),
                length=group.repetitions,
            )
            found.append(caches)
    last_B = lengths_B - 1
    x_BTD = x_ND.reshape(*tokens_BT.shape, -1)
    x_BD = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)[:, 0]
    return logits(model, params, x_BD, token_context(model, last_B)), tuple(found)


def step(
    model: Model, params: Tree, tokens_B: jax.Array, time: Time, caches: Caches
) -> tuple[jax.Array, Caches]:
    """Returns the logits [B, V] after one more token of each row, and the caches with it."""
    context = token_context(model, time.now - time.began)
    x_ND, _ = model.embed(params["embedding"], tokens_B[:, None], context)

    def repetition(
        group: Group, x_ND: jax.Array, trees: Tree, caches: Tree, layer: jax.Array | None = None
    ) -> tuple:
        after = []
        for stage, tree, before in zip(group.blocks, trees, caches, strict=True):
            cached = Cached(model.ops, list(before), time, layer)
            x_ND, _ = stage.apply(tree, x_ND, dataclasses.replace(context, attention=cached))
            after.append(tuple(cached.caches))
        return x_ND, tuple(after)

    found = []
    for group, trees, of_group in zip(model.chain.groups, params["layers"], caches, strict=True):
        if unrolled(trees):
            each = []
            for of_one, before in zip(zip(*trees, strict=True), zip(*of_group, strict=True), strict=True):
                x_ND, after = repetition(group, x_ND, of_one, before)
                each.append(after)
            found.append(tuple(zip(*each, strict=True)))
        else:
            # The caches of all layers go from one to the next, each of which writes to its own in place:
            # as what a loop takes and gives by layers they would be copied whole, for every token.
            def body(carry: tuple, layer: tuple, group=group) -> tuple:
                (x_ND, caches), (index, trees) = carry, layer
                return repetition(group, x_ND, trees, caches, index), None

            layers = jnp.arange(group.repetitions, dtype=jnp.int32), trees
            (x_ND, after), _ = jax.lax.scan(body, (x_ND, of_group), layers)
            found.append(after)
    return logits(model, params, x_ND, context), tuple(found)


def token_context(model: Model, positions_B: jax.Array) -> Context:
    """Returns the context of one token a row."""
    positions_B1 = positions_B[:, None]
    return model.context({"positions": positions_B1, "segment_ids": jnp.ones_like(positions_B1)}, 1)


def prompt_positions(tokens_BT: jax.Array, lengths_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns positions and segments, int32 [B, T], of one document a row, of `lengths_B` tokens, and padding
    behind."""
    positions_1T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
    within_BT = positions_1T < lengths_B[:, None]
    return jnp.where(within_BT, positions_1T, 0), within_BT.astype(jnp.int32)


def logits(model: Model, params: Tree, x_ND: jax.Array, context: Context) -> jax.Array:
    """Returns the logits [N, V], float32, of the last block's output."""
    return lm_head_logits(model, params, model.chain.head.apply(params["head"], x_ND, context)[0])


def lm_head_logits(model: Model, params: Tree, hidden_ND: jax.Array) -> jax.Array:
    """Returns the logits [N, V], float32, of the head's output."""
    matrix, axes = model.lm_head(params)
    matrix = model.ops.gather(matrix, axes)
    sums = "nd,dv->nv" if axes.index("vocab") else "nd,vd->nv"
    # GPUs and TPUs by default multiply float32 matrices in fewer bits.
    how = {"precision": "highest" if matrix.dtype == jnp.float32 else None}
    return jnp.einsum(sums, hidden_ND, matrix, preferred_element_type=jnp.float32, **how)
