"""The sizes that the memory estimate goes by: of what a step keeps, works in and gathers.

They follow from the model's chain of stages and from the mesh; of a loop over layers, from its trace.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from jaxthru.build.step import Assembled
from jaxthru.engine.memory_tally import shard_size
from jaxthru.engine.model import LAYERS, Model, split_stages
from jaxthru.engine.walk import cotangents, linearised_block
from jaxthru.models.ops import Ops
from jaxthru.models.remat import EXPERT_HIDDEN, kept_bytes
from jaxthru.models.stage import Group, Stage, distinct
from jaxthru.optim.shards import parts_of_whole_blocks
from jaxthru.runtime.weights import WeightInfo
from pallas_kernels import dispatch

LOSS_CHUNK = 2048
"""Tokens whose logits and gradient exist at once in linear_cross_entropy by XLA, at a vocabulary of 128,256.
By Triton they are up to twice as many, and the gradient takes the logits' place. Large chunks say their own
bytes (`train.loss_chunk`)."""

WORK = 1.5
"""Numbers that a block's backward pass has at once for each that it could keep: these, what it makes again,
and gradients on their way through it."""

GATHERED_TOKENS = 5
"""Arrays of a block's tokens, gathered over `tensor`, that its backward pass has at once: the inputs of
attention's and the feed-forward's matmuls, the gradients of their outputs, and one on its way."""


ROW_WORK = 1.8
"""The same of what there is one of for each row that experts have room for. Of two matmuls, their inputs,
outputs and all of their gradients."""

WAITING = 0.8
"""Of what the blocks of a pattern keep, how much is there beside the stacks at the end of a loop's body, in
the forward pass: XLA puts what all of them keep into the stacks together."""


def loops(model: Model) -> bool:
    """Says whether a step has a loop over layers."""
    return model.loop == "scan" and any(group.loops for group in model.chain.groups)


def stacked(made: Assembled, segments: int) -> int:
    """Returns the bytes of a device that a loop over layers stacks for the backward pass, beside their
    inputs: all that is kept, as it is. Of unrolled layers XLA makes much again from less, such as float32
    from the bfloat16 that it was widened from. segments: most documents in a row."""
    model, (rows, length) = made.step.model, made.batch["tokens"].shape
    rows //= made.step.microbatches
    width = dict(model.chain.dims)["embed"]

    def linearised(stage: Stage, params: Any, ids: jax.Array, x_ND: jax.Array, draw: Any, kept=None) -> tuple:
        context = model.context({"segment_ids": ids, "positions": ids}, segments, draw=draw)
        return linearised_block(model, stage, params, x_ND, context, kept), context

    def back(stage: Stage, kept: list[jax.Array], params: Any, ids: jax.Array, x_ND: jax.Array, draw: Any):
        link, context = linearised(stage, params, ids, x_ND, draw, kept)
        return link.pullback(cotangents(link, x_ND, context))  # a gradient is like what it is of

    def kept(stage: Stage, rows: int) -> list[int]:
        ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        x_ND = jax.ShapeDtypeStruct((rows * length, width), model.ops.compute)
        draw = jax.ShapeDtypeStruct((), jnp.int32) if model.chain.draws else None
        given = stage.shapes, ids, x_ND, draw
        leaves = jax.eval_shape(lambda *given: linearised(stage, *given)[0].kept, *given)
        if not all(info.trains for info in jax.tree.leaves(stage.weights)):
            # Kernels keep what frozen weights' gradients would need, too; XLA leaves it out.
            way = jax.make_jaxpr(functools.partial(back, stage))(leaves, *given).jaxpr
            _, read = partial_eval.dce_jaxpr(way, [True] * len(way.outvars))
            leaves = [leaf for leaf, needed in zip(leaves, read, strict=False) if needed]
        return [leaf.size * leaf.dtype.itemsize for leaf in leaves]

    total, mesh = 0, model.ops.layout.mesh
    with dispatch.assumed("cpu"):
        for stage in distinct(model.chain.layers):
            # What does not grow with the rows are weights, which are whole over `fsdp` and `data`.
            pairs = zip(kept(stage, rows), kept(stage, 2 * rows), strict=True)
            each = (one // (mesh.size if two > one else mesh.shape["tensor"]) for one, two in pairs)
            total += model.chain.layers.count(stage) * sum(each)
    return total


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the formulas go by, on one device. layer, layers, tables: trained parameters of the largest layer
    (where layers are unrolled), of all, and of embedding and head, as the state is split. table: of the
    larger of these. whole: of that, gathered over `fsdp`. item: bytes of a number in the compute dtype.
    stream: bytes of a block's input. kept: of what all blocks keep. at_once: of what one block's backward
    pass has. first: the same of the block that it begins with, beside `kept`. forward: of what is kept at the
    end of a loop's forward pass over a pattern of several blocks, with what waits for its stacks. logits: of
    those of a chunk. gathered: of a layer's weights as matmuls take them, where that is not as they are
    stored."""

    layer: int
    layers: int
    table: int
    tables: int
    whole: int
    item: int
    stream: int
    kept: int
    at_once: int
    first: int
    forward: int
    logits: int
    gathered: int

    @classmethod
    def of(cls, made: Assembled, workspace: int, stacked: int | None = None) -> "Sizes":
        """workspace: bytes of attention's. stacked: of what a loop over layers stacks, if there is one."""
        model, micro = made.step.model, made.step.microbatches
        ops, mesh, chain, item = model.ops, model.ops.layout.mesh, model.chain, model.ops.compute.itemsize
        params, infos = split_stages(made.abstract["params"]), split_stages(model.weights)
        embedding, head, *layers = map(_trained, infos, params)
        all_layers = [_on_a_device(tree) for tree in params[LAYERS:]]
        # Along `tensor` a device has all tokens of a part of the heads and of the feed-forward's width.
        tokens = made.batch["tokens"].size // mesh.size // micro
        dims, of = dict(chain.dims), functools.partial(kept_bytes, item=item)
        stream = item * dims["embed"] * tokens
        split = ops.layout.size("experts")
        room = [stage.mixture.rows(split) if stage.mixture else 1 for stage in chain.layers]
        kept = [
            tokens * of(stage.kept, model.policy, float8=ops.float8, rows=rows)
            for stage, rows in zip(chain.layers, room, strict=True)
        ]
        one = item * sum(all_layers) // len(chain.layers)
        work = max(_work(stage, ops, tokens, stream, one) for stage in distinct(chain.layers))
        in_one_program = stacked is None and not made.offload.layered
        if mesh.shape["tensor"] > 1:  # of two blocks, where matmuls of the one before are put off
            work += GATHERED_TOKENS * (1 + in_one_program) * stream * mesh.shape["tensor"]
        attention = 2 * tokens * max(of(stage.kept, "attention") for stage in chain.layers)
        # Attention's turn comes when the feed-forward's work is over. In a loop's body, and on several
        # devices in a program of many blocks, XLA puts matmuls of weights' gradients off until after it.
        # Those of experts it does not, but in a loop: for them the layer before waits. Frozen ones have none.
        dense = [stage for stage in distinct(chain.layers) if stage.mixture is None]
        waits = dense or any(map(_experts_train, distinct(chain.layers)))
        put_off = waits if stacked is not None else dense and mesh.size > 1 and in_one_program
        at_once = work + workspace if put_off else max(work, attention + workspace)
        if stacked is not None:
            at_once = max([at_once, *(_feed_forward(stage, tokens, stream, item) for stage in dense)])
        # Of a matrix; those of a quantised base are not stored as the embedding is.
        largest = (max(jax.tree.leaves(of), key=lambda leaf: leaf.size) for of in (params, params[LAYERS:]))
        stored = {leaf.dtype.itemsize for leaf in largest}
        # Experts are gathered as they are computed in, also where they are multiplied in float8.
        mixtures = any(stage.mixture for stage in chain.layers)
        product = 1 if ops.float8 and not mixtures else item
        cast = mesh.shape["fsdp"] > 1 or product not in stored
        gathered = product * sum(all_layers) * mesh.shape["fsdp"] // len(chain.layers) if cast else 0
        in_all = sum(kept)
        if stacked is not None:
            in_all = stacked
        elif ops.keep_parameters or model.policy == "none":
            in_all += gathered * len(chain.layers)
        in_all += stream * len(chain.layers)
        return cls(
            layer=max(layers),
            layers=sum(layers),
            table=max(embedding, head),
            tables=embedding + head,
            whole=max(embedding, head) * mesh.shape["fsdp"],
            item=item,
            stream=stream,
            kept=in_all,
            at_once=at_once,
            # A stack stays whole, and its slices are copies.
            first=at_once if stacked is not None else max(at_once - max(kept), 0),
            forward=_over_a_pattern(chain.groups, in_all, kept, stream) if stacked is not None else 0,
            logits=max(
                4 * LOSS_CHUNK * dims["vocab"],
                min(ops.loss_chunk_bytes or 0, item * tokens * dims["vocab"]),
            ),
            gathered=gathered,
        )


def _over_a_pattern(groups: Iterable[Group], in_all: int, kept: Sequence[int], stream: int) -> int:
    """Returns the most bytes that the forward pass of a loop over several blocks has kept at its end, with
    what waits for its stacks; 0 without such a loop. in_all: of all layers. kept: of each, beside its input,
    the stream."""
    most = done = 0
    share = in_all / sum(each + stream for each in kept)
    for blocks, repetitions in groups:
        waiting = WAITING * sum(kept[done : done + len(blocks)])
        done += len(blocks) * repetitions
        if len(blocks) > 1 and repetitions > 1:
            most = max(most, round(share * sum(each + stream for each in kept[:done]) + waiting))
    return most


def _work(stage: Stage, ops: Ops, tokens: int, stream: int, layer: int) -> int:
    """Returns the bytes that a block's backward pass has at once. layer: of a layer's gradients."""
    of = functools.partial(kept_bytes, stage.kept, "none", ops.compute.itemsize)
    if stage.mixture is None:
        return round(WORK * tokens * of())
    experts, split = ops.layout.size("experts"), ops.layout.size("experts") * ops.layout.size("mlp")
    parts = ops.expert_chunks if split > 1 else 1
    share = 1 / parts
    if ops.copies and split > 1:  # a device's own tokens are one part, those of each other device are several
        parts, share = 1 + (split - 1) * parts, 1 / split
    room, trained = stage.mixture.rows(experts), _experts_train(stage)
    by_row = tokens * (of(rows=room) - of(rows=0))
    # Of frozen experts: what gate and up give, its gradient, and what goes in, or the gradient of the result.
    of_rows = ROW_WORK * by_row if trained else 2 * by_row + stage.mixture.top_k * room * stream
    # Rows of one part of the tokens are there at once. All parts have their tokens gathered, and the
    # gradients of these; and each has gradients of the experts' weights.
    moved = (parts > 1) * (2 * split * stream + trained * (parts - 1) * layer)
    if ops.float8_experts:  # all matrices once more in eight bits, and the rows of one product
        hidden = tokens * room * stage.kept[EXPERT_HIDDEN]
        moved += layer // ops.compute.itemsize + hidden * share
    return round(WORK * tokens * of(rows=0) + of_rows * share + moved)


def _experts_train(stage: Stage) -> bool:
    """Says whether a stage has experts that are no frozen base."""
    return any(info.stack and info.trains for info in jax.tree.leaves(stage.weights))


def _feed_forward(stage: Stage, tokens: int, stream: int, item: int) -> int:
    """Returns the bytes that a dense block in a loop has when its backward pass is behind the feed-forward's
    activation: all that it could keep, for matmuls of weights' gradients wait, the gradients of gate, up and
    of their product, and two of the stream."""
    kept = kept_bytes(stage.kept, "none", item)
    return tokens * (kept + 3 * item * stage.kept.get("gate", 0)) + 2 * stream


def update_in_8_bits(made: Assembled) -> tuple[int, int]:
    """Returns the bytes of a device that an update takes beside the state: of embedding or head, and of a
    layer. Where XLA partitions it both moments are float32; else what goes to other devices for it is there
    twice, with its gradient."""
    optimizer, layout = made.step.optimizer, made.step.optimizer.layout

    def taken(info: WeightInfo, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | None:
        if not (info.trains and info.decays):
            return None
        spec = layout and layout.spec(info.axes)
        return None if layout and parts_of_whole_blocks(layout, info.axes, leaf.shape) == spec else leaf

    bytes_of = optimizer.config.format.bytes_per_parameter()
    each = 8 if layout is None else 2 * (sum(bytes_of) + made.step.model.ops.compute.itemsize)
    pairs = zip(split_stages(made.step.model.weights), split_stages(made.abstract["params"]), strict=True)
    embedding, head, *layers = (round(each * _on_a_device(jax.tree.map(taken, *pair))) for pair in pairs)
    return max(embedding, head), max(layers)


def _trained(infos: Any, tree: Any) -> int:
    """Returns how many numbers of what trains are on one device."""
    return _on_a_device(jax.tree.map(lambda info, leaf: leaf if info.trains else None, infos, tree))


def _on_a_device(tree: Any) -> int:
    """Returns how many numbers of an abstract tree are on one device."""
    return sum(shard_size(leaf.shape, leaf.sharding) for leaf in jax.tree.leaves(tree))
