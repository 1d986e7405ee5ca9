"""The inline executor: the whole step in one compiled program.

Shapes: B rows, T tokens, N = B·T, D embed.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.engine import advance, walk
from jaxthru.engine.gradients import added, linearise, squares, stored_order
from jaxthru.engine.model import EMBEDDING, HEAD, LAYERS, Batch, Model, join_stages, split_stages, unrolled
from jaxthru.engine.objectives.objective import Objective
from jaxthru.engine.step import State, Step, counters_of, slots_by_stage, state_of
from jaxthru.engine.terms import Terms, merged, none_yet, over_repetitions, with_micro_batch
from jaxthru.models import scopes
from jaxthru.models.stage import Context, Group, by_kind
from jaxthru.runtime.first_run import FirstAlone

Tree = Any
Back = Callable[[jax.Array], jax.Array]
"""Goes back through some of the chain: from the gradient of its output to that of its input."""


@dataclasses.dataclass(frozen=True, eq=False)
class InlineStep:
    """A step as one function: (state, batch) -> (state, metrics)."""

    __name__ = scopes.STEP  # what traces call the compiled program

    step: Step

    def __call__(self, state: State, batch: Batch) -> tuple[State, Terms]:
        """Returns the next state and this update's metrics, all on the device.

        A non-finite loss or gradient norm leaves parameters and optimizer as they were and is counted.
        """
        step, counters = self.step, counters_of(state)
        terms, gradients = self.gradients(state["params"], batch, step.draws(counters["step"]))
        with jax.named_scope(scopes.OPTIMIZER):
            if step.model.ops.layout.mesh.size > 1:
                gradients = stored_order(gradients)
            norm = jnp.sqrt(squares(gradients))
            known = {"counters": counters, "norm": norm, "loss": terms["loss"]}
            columns = (
                updates(step, terms),
                split_stages(gradients),
                split_stages(state["params"]),
                slots_by_stage(state),
            )
            updated = [
                update(index, *stage, **known)
                for index, (update, *stage) in enumerate(zip(*columns, strict=True))
            ]
        following, metrics = step.finish(counters, batch, terms, norm)
        return state_of(*map(list, zip(*updated, strict=True)), following, state["params"]), metrics

    def gradients(self, params: Tree, batch: Batch, draws: jax.Array | None = None) -> tuple[Terms, Tree]:
        """Returns the terms of the batch and its gradients, micro-batch after micro-batch. draws: of
        `Step.draws`."""
        step, model, weight = self.step, self.step.model, self.step.objective.weight(batch)
        if step.microbatches == 1:
            draw = None if draws is None else draws[0]
            return micro_batch(step.objective, params, batch, weight, draw=draw)
        pieces = jax.tree.map(step.split, batch)
        first = jax.tree.map(lambda piece: piece[0], pieces)
        share = 1 / step.microbatches
        shapes, _ = jax.eval_shape(lambda: micro_batch(step.objective, params, first, weight))

        def zeros(info, leaf: jax.Array) -> jax.Array | None:
            zero = jnp.zeros(leaf.shape, jnp.float32)
            return model.ops.layout.constrain(zero, info.axes) if info.trains else None

        def add(total: tuple, each: tuple) -> tuple:
            (terms, sums), (piece, draw) = total, each
            more, sums = micro_batch(step.objective, params, piece, weight, share, sums, draw)
            return (with_micro_batch(model.chain, terms, more), sums), None

        begun = none_yet(model.chain, shapes), jax.tree.map(zeros, model.weights, params)
        return jax.lax.scan(add, begun, (pieces, draws))[0]


def micro_batch(
    objective: Objective,
    params: Tree,
    batch: Batch,
    weight: jax.Array,
    share: float = 1.0,
    sums: Tree | None = None,
    draw: jax.Array | None = None,
) -> tuple[Terms, Tree]:
    """Returns the terms of a micro-batch and its gradients, added to `sums` where there are some.

    weight: one token's. share: of the step's rows. draw: see Context.
    """
    model, chain = objective.model, objective.model.chain
    batch = with_reference(objective, params, batch)
    context = model.context(batch, objective.max_segments, share, draw)
    made: dict[int, Tree] = {}
    before = None if sums is None else split_stages(sums)

    def book(index: int, gradients: Tree) -> None:
        made[index] = gradients if before is None else added(before[index], gradients)

    embed = walk.embedding(model, batch["tokens"], context)
    link = linearise(embed, params["embedding"], chain.embedding.weights, model.ops.compute, given=context)
    (x_ND, _), terms = link.result, link.aux
    back, index = [], LAYERS
    for group, trees in zip(chain.groups, params["layers"], strict=True):
        forward = _unrolled if unrolled(trees) else _scanned
        x_ND, more, backward = forward(model, group, trees, x_ND, context, index, book)
        terms = merged(chain, terms, more)
        back.append(backward)
        index += len(group.blocks) * (group.repetitions if unrolled(trees) else 1)
    trees = walk.head_params(model, params["embedding"], params["head"])
    more, gradients, dx_ND = walk.linearised_head(objective, trees, x_ND, batch, weight, context)
    terms = merged(chain, terms, more)
    book(HEAD, gradients["head"])
    for backward in reversed(back):
        dx_ND = backward(dx_ND, {} if sums is None else made)
    (of_embedding,) = link.pullback(walk.cotangents(link, dx_ND, context))
    if chain.tied:
        of_embedding = jax.tree.map(jnp.add, gradients["embedding"], of_embedding)
    book(EMBEDDING, of_embedding)
    return terms, join_stages([made[index] for index in range(len(made))], params)


def updates(step: Step, terms: Terms) -> list[Callable]:
    """Returns `step.update` of each tree of `split_stages`. terms: of the whole step.

    Of a kind of stage Python walks through the first alone: the updates of 36 layers took three quarters of a
    step's tracing. Not so where what a layer counted moves its weights.
    """
    infos, advances = split_stages(step.model.weights), advance.by_stage(step.model, terms)
    bound = functools.partial(functools.partial, step.update)
    once = by_kind(infos, lambda its: jax.jit(bound(infos=its), inline=True))
    return [
        of_kind if advancing is None else bound(infos=its, advance=advancing)
        for of_kind, its, advancing in zip(once, infos, advances, strict=True)
    ]


def traced_once(model: Model, group: Group) -> list[Callable]:
    """Returns `walk.block` of each block of a group, for all repetitions: Python walks through the first of
    them alone, where 36 layers took it 11.6 s."""
    return [jax.jit(walk.block(model, stage)) for stage in group.blocks]


def _unrolled(
    model: Model, group: Group, trees: Tree, x_ND: jax.Array, context: Context, first: int, book: Callable
) -> tuple[jax.Array, Terms, Back]:
    """Returns the output of a group's layers, which lie one by one, their terms, and the way back.

    first: index of the first, as `split_stages` counts. book: takes (index, gradients).
    """
    links, terms = [], {}
    blocks = traced_once(model, group)
    for repetition in zip(*trees, strict=True):
        for stage, apply, tree in zip(group.blocks, blocks, repetition, strict=True):
            links.append(walk.linearised_block(model, stage, tree, x_ND, context, apply=apply))
            x_ND, terms = links[-1].result[0], merged(model.chain, terms, links[-1].aux)
    # On several devices a layer later: meanwhile gradients are on their way between them.
    later = int(model.ops.layout.mesh.size > 1)

    def backward(dx_ND: jax.Array, sums: dict[int, Tree]) -> jax.Array:
        for at in reversed(range(len(links))):
            gradients, dx_ND = links[at].pullback(walk.cotangents(links[at], dx_ND, context))
            book(first + at, gradients)
            if (made := first + at + later) in sums:
                # Goes on to the layer before only when these sums are made: left to itself, XLA puts off
                # matmuls that nothing waits for, and keeps their operands, or the gradients, of all layers.
                dx_ND, sums[made] = jax.lax.optimization_barrier((dx_ND, sums[made]))
        return dx_ND

    return x_ND, terms, backward


def _scanned(
    model: Model, group: Group, trees: Tree, x_ND: jax.Array, context: Context, first: int, book: Callable
) -> tuple[jax.Array, Terms, Back]:
    """Returns the same of a group whose layers are stacked, by a loop over its repetitions."""
    blocks = [(at, one, walk.block(model, one, in_loop=group.loops)) for at, one in enumerate(group.blocks)]

    def forward(x_ND: jax.Array, trees: Tree) -> tuple:
        saved, terms = [], {}
        for at, stage, apply in blocks:
            link = walk.linearised_block(model, stage, trees[at], x_ND, context, apply=apply)
            saved.append((x_ND, link.kept))
            x_ND, terms = link.result[0], merged(model.chain, terms, link.aux)
        return x_ND, (saved, terms)

    def back(carry: tuple, each: tuple) -> tuple:
        (dx_ND, repetition), (trees, at_hand), gradients = carry, each, [None] * len(blocks)
        for at, stage, apply in reversed(blocks):
            x_ND, kept = at_hand
            link = walk.linearised_block(model, stage, trees[at], x_ND, context, kept, apply)
            gradients[at], dx_ND = link.pullback(walk.cotangents(link, dx_ND, context))
            if at:
                # As if each block were a loop's whole body: left to itself, XLA puts off matmuls that nothing
                # waits for until all blocks' operands are there, and begins with slices for all blocks.
                dx_ND, gradients[at], stacks = jax.lax.optimization_barrier(
                    (dx_ND, gradients[at], saved[at - 1])
                )
                one = functools.partial(jax.lax.dynamic_index_in_dim, index=repetition, keepdims=False)
                at_hand = jax.tree.map(one, stacks)
            elif not group.loops:  # a loop's end would have the matmuls made
                dx_ND, gradients[at] = jax.lax.optimization_barrier((dx_ND, gradients[at]))
        return (dx_ND, repetition - 1), gradients

    # What a loop makes itself, such as the stacks of what is saved, lies in no scope of its body's.
    with jax.named_scope(scopes.MODEL), jax.named_scope(scopes.FORWARD):
        x_ND, (saved, terms) = jax.lax.scan(forward, x_ND, trees, length=group.repetitions)

    def backward(dx_ND: jax.Array, sums: dict[int, Tree]) -> jax.Array:
        # The last block has its slices of what is saved from the loop. Others ask for theirs, by the count.
        begun, each = (dx_ND, jnp.int32(group.repetitions - 1)), (trees, saved[-1])
        with jax.named_scope(scopes.MODEL), jax.named_scope(scopes.BACKWARD):
            (dx_ND, _), gradients = jax.lax.scan(back, begun, each, length=group.repetitions, reverse=True)
        for at, of_block in enumerate(gradients):
            book(first + at, of_block)
        return dx_ND

    return x_ND, over_repetitions(model.chain, terms), backward


def forward(model: Model, params: Tree, batch: Batch, context: Context) -> tuple[jax.Array, list, Terms]:
    """Returns the last block's output [N, D], auxiliary losses, and terms, with nothing kept for a gradient
    that is not asked for."""
    chain = model.chain
    (x_ND, losses), terms = walk.embedding(model, batch["tokens"], context)(params["embedding"])
    losses = list(losses.values())

    def repetition(blocks: list[Callable], x_ND: jax.Array, trees: Tree) -> tuple:
        losses, terms = [], {}
        for apply, tree in zip(blocks, trees, strict=True):
            (x_ND, more), of_stage = apply(tree, x_ND, context)
            losses, terms = [*losses, *more.values()], merged(chain, terms, of_stage)
        return x_ND, (losses, terms)

    for group, trees in zip(chain.groups, params["layers"], strict=True):
        one = functools.partial(repetition, traced_once(model, group))
        if unrolled(trees):
            for each in zip(*trees, strict=True):
                x_ND, (more, of_layers) = one(x_ND, each)
                losses, terms = losses + more, merged(chain, terms, of_layers)
        else:
            x_ND, (more, of_layers) = jax.lax.scan(one, x_ND, trees, length=group.repetitions)
            losses += [jnp.sum(each) for each in more]
            terms = merged(chain, terms, over_repetitions(chain, of_layers))
    return x_ND, losses, terms


def loss(objective: Objective, params: Tree, batch: Batch, weight: jax.Array) -> tuple[jax.Array, Terms]:
    """Returns what a step minimises of a batch of one micro-batch, and its terms. weight: one token's."""
    model, batch = objective.model, with_reference(objective, params, batch)
    context = model.context(batch, objective.max_segments)
    x_ND, losses, terms = forward(model, params, batch, context)
    head = walk.head(objective, batch, weight, context)
    (minimised, more), of_head = head(walk.head_params(model, params["embedding"], params["head"]), x_ND)
    minimised += sum(each * context.share for each in (*losses, *more.values()))
    return minimised, merged(model.chain, terms, of_head)


def with_reference(objective: Objective, params: Tree, batch: Batch) -> Batch:
    """Returns a batch with what the objective's reference makes of it, if it has one to ask."""
    if objective.reference is None:
        return batch
    _, terms = loss(objective.reference, jax.lax.stop_gradient(params), batch, jnp.ones((), jnp.float32))
    return batch | {"reference": terms["answers"]}


def hidden(model: Model, params: Tree, batch: Batch, max_segments: int) -> jax.Array:
    """Returns the normed output of the last block, [N, D] in the compute dtype, sharded over tokens.

    batch: `tokens`, `positions`, `segment_ids`, each int32 [B, T], and `loss_mask`. A row with more than
    `max_segments` segments comes out as NaN.
    """
    context = model.context(batch, max_segments)
    x_ND, _, _ = forward(model, params, batch, context)
    with jax.named_scope(scopes.MODEL):
        return model.chain.head.apply(params["head"], x_ND, context)[0]


@functools.lru_cache(maxsize=4)
def loss_terms(objective: Objective) -> jax.stages.Wrapped:
    """Returns (params, batch, weight) -> the terms of an objective, jitted: the same function each time, so
    that what is compiled of it once need not be again."""

    def terms(params: Tree, batch: Batch, weight: jax.Array) -> Terms:
        return loss(objective, params, batch, weight)[1]

    return jax.jit(terms, compiler_options=objective.model.compiler_options())


class CompiledStep:
    """A step as one program. `dispatched.DispatchedStep` is called alike."""

    def __init__(self, program: jax.stages.Compiled):
        self._run = FirstAlone(program)
        self.program = program

    def __call__(self, state: State, batch: Batch) -> tuple[State, Terms]:
        """Returns the next state and the update's metrics; takes over the state."""
        return self._run(state, batch)

    def as_text(self) -> str:
        """Returns the compiled program's HLO."""
        return self._run.as_text()

    def settled(self, state: State) -> State:
        """Returns the state: all of its updates are made."""
        return state

    def terms_of(self, objective: Objective) -> Callable[[Tree, Batch, jax.Array], Terms]:
        """Returns (params, batch, weight) -> the terms of an objective, compiled at its first use."""
        return FirstAlone(loss_terms(objective))
