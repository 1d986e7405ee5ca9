"""The functions that a layered step is made of, see training/layered.py.

Shapes: M micro-batches, R rows of one, T tokens, N = R·T, D embed.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.models.bind import Substituted, wide_stand_in, widened
from jaxthru.optim.formats import rounding_key
from jaxthru.runtime.first_run import FirstAlone
from jaxthru.training.loss import Batch, Metrics
from jaxthru.training.state import State
from jaxthru.training.step import Step, token_weight

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """The functions that a step is made of, each to be compiled."""

    step: Step

    @property
    def model(self):
        return self.step.objective.model

    def begin(self, batch: Batch) -> tuple[Batch, Any, jax.Array]:
        """Returns the batch in micro-batches [M, R, T], what layers need of each, and one token's weight."""
        batch_MRT = jax.tree.map(self.step.split, batch)
        most = self.step.objective.max_segments
        return (
            batch_MRT,
            jax.lax.map(lambda part: self.model.context(part, most), batch_MRT),
            token_weight(batch),
        )

    def embed(self, tree: Tree, batch_MRT: Batch, context: Any) -> jax.Array:
        """Returns the first layer's input [M, N, D]."""
        one = lambda each: self.model.embed(tree, each[0], each[1])  # noqa: E731
        return jax.lax.map(one, (batch_MRT["tokens"], context))

    def forward(self, tree: Tree, x_MND: jax.Array, context: Any) -> tuple[jax.Array, list, jax.Array]:
        """Returns a layer's output, what its backward pass needs beside its input, and a scalar that is there
        when they are."""

        def one(each):
            y_ND, pullback = self._layer(tree, *each)
            return y_ND, _residuals(pullback, (tree, *each))

        y_MND, kept = jax.lax.map(one, (x_MND, context))
        return y_MND, kept, y_MND[0, 0, 0]

    def backward(
        self, tree: Tree, x_MND: jax.Array, kept: list, dy_MND: jax.Array, context: Any, squares: jax.Array
    ) -> tuple[jax.Array, Tree, jax.Array]:
        """Returns the gradient of a layer's input, those of its parameters, and the sum of squares so far."""

        def one(each):
            *inputs, kept, dy_ND = each
            # What the forward pass kept takes the place of what computing it again would give, which is then
            # dead code.
            _, pullback = self._layer(tree, *inputs)
            gradients, dx_ND = _with_residuals(pullback, kept, (tree, *inputs))(dy_ND)
            return gradients, dx_ND

        gradients, dx_MND = _accumulated(one, (x_MND, context, kept, dy_MND))
        if self.held:
            gradients = jax.tree.map(
                lambda sum_, like: sum_.astype(like.dtype), gradients, self.model.layer_stand_ins(tree)
            )
        return dx_MND, gradients, squares + _squares(gradients)

    def head(
        self, tree: Tree, table: Tree, x_MND: jax.Array, batch_MRT: Batch, weight: jax.Array
    ) -> tuple[Metrics, jax.Array, Tree, Tree, jax.Array]:
        """Returns the sums for the record, the gradients of the last layer's output, of the head and of the
        embedding's table, and the sum of the head's squares. table: None unless it is the output matrix."""
        trees = {"head": tree} | ({} if table is None else {"embedding": table})
        stand_ins = jax.tree.map(wide_stand_in, trees)

        def one(each):
            x_ND, batch = each

            def loss(stand_ins, x_ND):
                params = widened(trees, stand_ins)
                hidden_ND = self.model.head.apply(params["head"], x_ND)
                return self.step.objective.of_hidden(params, hidden_ND, batch, weight)

            (_, sums), (gradients, dx_ND) = jax.value_and_grad(loss, (0, 1), has_aux=True)(stand_ins, x_ND)
            return (sums, gradients), dx_ND

        (sums, gradients), dx_MND = _accumulated(one, (x_MND, batch_MRT))
        d_head = gradients["head"]
        return sums, dx_MND, d_head, gradients.get("embedding"), _squares(d_head)

    def embed_backward(
        self,
        tree: Tree,
        batch_MRT: Batch,
        context: Any,
        dx_MND: jax.Array,
        d_table: Tree,
        squares: jax.Array,
    ) -> tuple[Tree, jax.Array]:
        """Returns the embedding's gradients, to which d_table is added, and the sum of squares of all."""

        def one(each):
            tokens_RT, context, dx_ND = each
            embed = lambda stand_ins: self.model.embed(widened(tree, stand_ins), tokens_RT, context)  # noqa: E731
            return jax.vjp(embed, jax.tree.map(wide_stand_in, tree))[1](dx_ND)[0], None

        gradients, _ = _accumulated(one, (batch_MRT["tokens"], context, dx_MND))
        if d_table is not None:
            gradients = jax.tree.map(jnp.add, gradients, d_table)
        return gradients, squares + _squares(gradients)

    def update(
        self,
        weights: Tree,
        slots: Tree,
        gradients: Tree,
        counters: State,
        squares: jax.Array,
        loss: jax.Array,
        index: jax.Array,
        *,
        matrices: Tree,
    ) -> tuple[Tree, Tree]:
        """Returns the next weights and slots of one part. squares: of the gradients that are known. index: of
        the part."""
        optimizer, count = self.step.optimizer, counters["count"]
        norm = jnp.sqrt(squares)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        clip_scale, usable = optimizer.clipping(norm, counters["grad_norm"])
        return optimizer.update(
            gradients,
            weights,
            slots,
            count=count,
            learning_rate=self.step.schedule(count),
            clip_scale=clip_scale,
            finite=finite & usable,
            matrices=matrices,
            key=rounding_key(self.step.seed, count, index),
        )

    def finish(
        self, counters: State, batch: Batch, sums: Metrics, of_head: jax.Array, squares: jax.Array
    ) -> tuple[State, Metrics]:
        """Returns the next counters and this update's metrics. of_head, squares: the sums of squares of the
        head's gradients, which are used first, and of all."""
        count, norm = counters["count"], jnp.sqrt(squares)
        finite = jnp.isfinite(sums["loss"]) & jnp.isfinite(norm)
        rate = self.step.schedule(count)
        following, metrics = self.step.finish(counters, batch, sums, norm, rate, finite)
        usable = self.step.optimizer.clipping(norm, counters["grad_norm"])[1]
        if not self.held:
            begun = jnp.isfinite(sums["loss"]) & jnp.isfinite(of_head) & usable
            metrics["partly_updated"] = begun & ~finite
        return following | {"count": count + (finite & usable).astype(jnp.int32)}, metrics

    def eval_embed(self, tree: Tree, batch: Batch) -> tuple[jax.Array, Any]:
        """Returns the first layer's input [N, D] and the context of one micro-batch."""
        context = self.model.context(batch, self.step.objective.max_segments)
        return self.model.embed(tree, batch["tokens"], context), context

    def eval_layer(self, tree: Tree, x_ND: jax.Array, context: Any) -> tuple[jax.Array, jax.Array]:
        """Returns a layer's output, and a scalar that is there when it is."""
        y_ND = self.model.one_layer(tree, x_ND, context)
        return y_ND, y_ND[0, 0]

    def eval_head(self, tree: Tree, table: Tree, x_ND: jax.Array, batch: Batch, weight: jax.Array) -> Metrics:
        """Returns the sums for the record of one micro-batch. table: as of `head`."""
        params = {"head": tree, "embedding": table}
        hidden_ND = self.model.head.apply(tree, x_ND)
        return self.step.objective.of_hidden(params, hidden_ND, batch, weight)[1]

    @property
    def held(self) -> bool:
        """Says whether all gradients wait for their norm."""
        return self.step.optimizer.config.clip_rule == "exact"

    def _layer(self, tree: Tree, x_ND: jax.Array, context: Any) -> tuple[jax.Array, Callable]:
        """Returns a layer's output and the function from its gradient to (gradients, dx)."""

        def layer(stand_ins, x_ND):
            return self.model.one_layer(jax.tree.map(Substituted, tree, stand_ins), x_ND, context)

        return jax.vjp(layer, self.model.layer_stand_ins(tree), x_ND)


def compiler_with(options: dict[str, Any]) -> Callable:
    """Returns the function that LayeredStep compiles its programs with: (name, function, arguments, donate,
    out_shardings, statics) -> (compiled, what it returns: shapes, dtypes and shardings). Of a layered step
    copies are nearly always under way, so the first run of each program waits for them."""

    def compile_(name, function, arguments, donate=(), out_shardings=None, **statics):
        lowered = lower(name, function, arguments, donate, out_shardings, **statics)
        compiled = lowered.compile(compiler_options=options)
        return FirstAlone(compiled), placed(lowered.out_info, compiled.output_shardings)

    return compile_


def lower(name, function, arguments, donate, out_shardings, platform: str | None = None, **statics):
    """Returns one of the programs, traced for abstract arguments. name: what traces call it."""
    function = functools.partial(function, **statics)
    function.__name__ = name
    traced = jax.jit(function, donate_argnums=donate, out_shardings=out_shardings).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,) if platform else None)


def placed(tree: Tree, shardings: Tree) -> Tree:
    """Returns abstract arrays with these shardings."""
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # noqa: E731
    return jax.tree.map(place, tree, shardings)


def _residuals(pullback: Callable, given: Tree) -> list[jax.Array]:
    """Returns what a function of `jax.vjp` holds beside what it was made from."""
    known = {id(leaf) for leaf in jax.tree.leaves(given)}
    return [leaf for leaf in jax.tree.leaves(pullback) if id(leaf) not in known]


def _with_residuals(pullback: Callable, kept: list[jax.Array], given: Tree) -> Callable:
    """Returns a function of `jax.vjp` with its residuals replaced by those that `_residuals` found."""
    leaves, structure = jax.tree.flatten(pullback)
    known, rest = {id(leaf) for leaf in jax.tree.leaves(given)}, iter(kept)
    return jax.tree.unflatten(structure, [leaf if id(leaf) in known else next(rest) for leaf in leaves])


def _accumulated(function: Callable, pieces: Tree) -> tuple[Tree, Tree]:
    """Returns the first result of `function` summed over the micro-batches [M, ...] of `pieces`, in float32
    where there are several, and its second for each."""
    count = len(jax.tree.leaves(pieces)[0])
    if count == 1:
        total, each = function(jax.tree.map(lambda piece: piece[0], pieces))
        return total, jax.tree.map(lambda leaf: leaf[None], each)
    shapes = jax.eval_shape(function, jax.tree.map(lambda piece: piece[0], pieces))[0]

    def add(total, piece):
        term, each = function(piece)
        return jax.tree.map(lambda sum_, term: sum_ + term.astype(jnp.float32), total, term), each

    return jax.lax.scan(add, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes), pieces)


def _squares(gradients: Tree) -> jax.Array:
    """Returns the sum of the squares of all gradients, float32."""
    return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(gradients))
