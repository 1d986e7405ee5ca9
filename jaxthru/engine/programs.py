"""The compiled programs of a dispatched step: forward, backward and update of each kind of stage.

Shapes: M micro-batches, R rows of one, T tokens, N = R·T, D embed.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxthru.engine import advance, walk
from jaxthru.engine.gradients import gradient_dtype, linearise, squares
from jaxthru.engine.model import Batch, Model
from jaxthru.engine.offload import Pace
from jaxthru.engine.step import State, Step
from jaxthru.engine.terms import Terms, merged, over_micro_batches
from jaxthru.models.stage import Context, Stage, distinct
from jaxthru.runtime.first_run import FirstAlone

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """The functions that a step is made of, each to be compiled."""

    step: Step

    @property
    def model(self) -> Model:
        return self.step.model

    @property
    def held(self) -> bool:
        """Says whether all gradients wait for their norm."""
        return self.step.optimizer.config.clip_rule == "exact"

    def begin(self, batch: Batch, tried: jax.Array) -> tuple[Batch, Context, jax.Array]:
        """Returns the batch in micro-batches [M, R, T], what stages need of each, and the weight of
        what the loss is a mean over. tried: updates before this one."""
        batch_MRT, weight = jax.tree.map(self.step.split, batch), self.step.objective.weight(batch)

        def context(each: tuple[Batch, jax.Array | None]) -> Context:
            batch_RT, draw = each
            segments, share = self.step.objective.max_segments, 1 / self.step.microbatches
            return self.model.context(batch_RT, segments, share, draw)

        return batch_MRT, jax.lax.map(context, (batch_MRT, self.step.draws(tried))), weight

    def embed(self, params: Tree, batch_MRT: Batch, context: Context) -> tuple[jax.Array, Terms]:
        """Returns the first block's input [M, N, D], and terms."""

        def one(each):
            (x_ND, _), terms = walk.embedding(self.model, *each)(params)
            return x_ND, terms

        x_MND, terms = jax.lax.map(one, (batch_MRT["tokens"], context))
        return x_MND, over_micro_batches(self.model.chain, terms)

    def forward(
        self, params: Tree, x_MND: jax.Array, context: Context, *, stage: Stage
    ) -> tuple[jax.Array, list, Terms, jax.Array]:
        """Returns a block's output, what its backward pass needs beside its input, its terms, and a scalar
        that is there when they are."""

        def one(each):
            link = walk.linearised_block(self.model, stage, params, *each)
            return link.result[0], link.kept, link.aux

        y_MND, kept, terms = jax.lax.map(one, (x_MND, context))
        return y_MND, kept, over_micro_batches(self.model.chain, terms), y_MND[0, 0, 0]

    def backward(
        self,
        params: Tree,
        x_MND: jax.Array,
        kept: list,
        dy_MND: jax.Array,
        context: Context,
        so_far: jax.Array,
        *,
        stage: Stage,
    ) -> tuple[jax.Array, Tree, jax.Array]:
        """Returns the gradient of a block's input, those of its parameters, and the sum of squares so far."""

        def one(each):
            x_ND, context, kept, dy_ND = each
            link = walk.linearised_block(self.model, stage, params, x_ND, context, kept)
            return link.pullback(walk.cotangents(link, dy_ND, context))

        gradients, dx_MND = _accumulated(one, (x_MND, context, kept, dy_MND))
        if self.held:
            compute = self.model.ops.compute
            to = lambda info, leaf: leaf.astype(gradient_dtype(info, compute)) if info.trains else None  # noqa: E731
            gradients = jax.tree.map(to, stage.weights, gradients)
        return dx_MND, gradients, so_far + squares(gradients)

    def head(
        self,
        params: Tree,
        table: Tree,
        x_MND: jax.Array,
        batch_MRT: Batch,
        weight: jax.Array,
        context: Context,
    ) -> tuple[Terms, jax.Array, Tree, Tree, jax.Array]:
        """Returns the terms, the gradients of the last block's output, of the head and of the embedding, and
        the sum of the head's squares. table: of the embedding; None unless it is the LM head."""
        params = walk.head_params(self.model, table, params)

        def one(each):
            x_ND, batch, context = each
            terms, gradients, dx_ND = walk.linearised_head(
                self.step.objective, params, x_ND, batch, weight, context
            )
            return gradients, (terms, dx_ND)

        gradients, (terms, dx_MND) = _accumulated(one, (x_MND, batch_MRT, context))
        d_head, terms = gradients["head"], over_micro_batches(self.model.chain, terms)
        return terms, dx_MND, d_head, gradients.get("embedding"), squares(d_head)

    def embed_backward(
        self,
        params: Tree,
        batch_MRT: Batch,
        context: Context,
        dx_MND: jax.Array,
        d_table: Tree,
        so_far: jax.Array,
    ) -> tuple[Tree, jax.Array]:
        """Returns the embedding's gradients, to which d_table is added, and the sum of squares of all."""
        model = self.model

        def one(each):
            tokens_RT, context, dx_ND = each
            embed, infos = walk.embedding(model, tokens_RT, context), model.chain.embedding.weights
            link = linearise(embed, params, infos, model.ops.compute, given=context)
            return *link.pullback(walk.cotangents(link, dx_ND, context)), None

        gradients, _ = _accumulated(one, (batch_MRT["tokens"], context, dx_MND))
        if d_table is not None:
            gradients = jax.tree.map(jnp.add, gradients, d_table)
        return gradients, so_far + squares(gradients)

    def update(
        self,
        weights: Tree,
        slots: Tree,
        gradients: Tree,
        counters: State,
        so_far: jax.Array,
        loss: jax.Array,
        index: jax.Array,
        terms: Terms,
        *,
        infos: Tree,
        stage: Stage,
    ) -> tuple[Tree, Tree]:
        """Returns the next weights and slots of one stage. so_far: the sum of squares of the gradients that
        are known. index: of the stage. terms: what it counted by layer."""
        known = {"infos": infos, "counters": counters, "norm": jnp.sqrt(so_far), "loss": loss}
        known["advance"] = advance.of_layer(stage, terms)
        return self.step.update(index, gradients, weights, slots, **known)

    def finish(
        self, counters: State, batch: Batch, terms: list[Terms], of_head: jax.Array, of_all: jax.Array
    ) -> tuple[State, Terms]:
        """Returns the next counters and this update's metrics. terms: of all stages. of_head, of_all: the
        sums of squares of the head's gradients, which are used first, and of all."""
        terms = functools.reduce(functools.partial(merged, self.model.chain), terms)
        norm = jnp.sqrt(of_all)
        following, metrics = self.step.finish(counters, batch, terms, norm)
        if not self.held:
            usable = self.step.optimizer.clipping(norm, counters["grad_norm"])[1]
            begun = jnp.isfinite(terms["loss"]) & jnp.isfinite(of_head) & usable
            metrics["partly_updated"] = begun & ~jnp.isfinite(norm)
        return following, metrics

    def evaluation(self) -> tuple[FirstAlone, list[FirstAlone], FirstAlone]:
        """Returns `eval_embed`, `eval_block` of each kind of block, and `eval_head`, each compiled at its
        first use."""
        jit = functools.partial(jax.jit, compiler_options=self.model.compiler_options())
        kinds = distinct(self.model.chain.layers)
        blocks = [FirstAlone(jit(functools.partial(self.eval_block, stage=stage))) for stage in kinds]
        return FirstAlone(jit(self.eval_embed)), blocks, FirstAlone(jit(self.eval_head))

    def eval_embed(self, params: Tree, batch: Batch) -> tuple[jax.Array, Context, Terms]:
        """Returns the first block's input [N, D], the context of one micro-batch, and terms."""
        context = self.model.context(batch, self.step.objective.max_segments)
        (x_ND, _), terms = walk.embedding(self.model, batch["tokens"], context)(params)
        return x_ND, context, terms

    def eval_block(
        self, params: Tree, x_ND: jax.Array, context: Context, *, stage: Stage
    ) -> tuple[jax.Array, Terms, jax.Array]:
        """Returns a block's output, its terms, and a scalar that is there when they are."""
        (y_ND, _), terms = walk.block(self.model, stage)(params, x_ND, context)
        return y_ND, terms, y_ND[0, 0]

    def eval_head(
        self, params: Tree, table: Tree, x_ND: jax.Array, batch: Batch, weight: jax.Array, context: Context
    ) -> Terms:
        """Returns the terms of one micro-batch. table: as of `head`."""
        params = walk.head_params(self.model, table, params)
        return walk.head(self.step.objective, batch, weight, context)(params, x_ND)[1]


def evaluated(
    programs: tuple,
    kinds: Iterable[int],
    trees: Iterator[Tree],
    batch: Batch,
    weight: jax.Array,
    tied: bool,
) -> Terms:
    """Returns the terms of the head. programs: of `evaluation`. kinds: of the layers. trees: the weights of
    all stages in the order of the forward pass, which are let go as they are used."""
    embed, blocks, head = programs
    embedding, pace = next(trees), Pace()
    x_ND, context, _ = embed(embedding, batch)
    table = embedding if tied else None
    del embedding
    for kind in kinds:
        x_ND, _, there = blocks[kind](next(trees), x_ND, context)
        pace(there)
    return head(next(trees), table, x_ND, batch, weight, context)


def compiler_with(options: dict[str, Any]) -> Callable:
    """Returns the function that a dispatched step compiles its programs with: (name, function, arguments,
    donate, out_shardings, statics) -> (compiled, what it returns: shapes, dtypes and shardings). Of such a
    step copies are nearly always under way, so the first run of each program waits for them."""

    def compile_(name, function, arguments, donate=(), out_shardings=None, **statics):
        traced = trace(name, function, arguments, donate, out_shardings, **statics)
        compiled = traced.lower().compile(compiler_options=options)
        return FirstAlone(compiled), with_shardings(traced.out_info, compiled.output_shardings)

    return compile_


def trace(name, function, arguments, donate=(), out_shardings=None, **statics) -> jax.stages.Traced:
    """Returns one of the programs, traced for abstract arguments. name: what traces call it."""
    function = functools.partial(function, **statics)
    function.__name__ = name
    return jax.jit(function, donate_argnums=donate, out_shardings=out_shardings).trace(*arguments)


def with_shardings(tree: Tree, shardings: Tree) -> Tree:
    """Returns abstract arrays with these shardings."""
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # noqa: E731
    return jax.tree.map(place, tree, shardings)


def by_rows(programs: Programs, batch: Batch, rows: Sharding, scalar: Sharding) -> Tree:
    """Returns the sharding of each array of a context [M, ...]: by rows where its next dim is theirs."""
    tried = jax.ShapeDtypeStruct((), jnp.int32)
    batch_MRT, context, _ = jax.eval_shape(programs.begin, batch, tried)
    of_rows = batch_MRT["tokens"].shape[:2]
    return jax.tree.map(lambda leaf: rows if leaf.shape[:2] == of_rows else scalar, context)


def _accumulated(function: Callable, pieces: Tree) -> tuple[Tree, Tree]:
    """Returns the first result of `function`, gradients, summed over the micro-batches [M, ...] of `pieces`,
    in float32 where there are several, and its second for each."""
    count = len(jax.tree.leaves(pieces)[0])
    if count == 1:
        total, each = function(jax.tree.map(lambda piece: piece[0], pieces))
        return total, jax.tree.map(lambda leaf: leaf[None], each)
    shapes = jax.eval_shape(function, jax.tree.map(lambda piece: piece[0], pieces))[0]

    def add(total, piece):
        term, each = function(piece)
        return jax.tree.map(lambda sum_, term: sum_ + term.astype(jnp.float32), total, term), each

    return jax.lax.scan(add, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes), pieces)
