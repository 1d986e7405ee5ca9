"""Gradients: their dtypes, gradient accumulation over micro-batches, and the backward pass through a stage.

A block's matrices have their gradients formed in the compute dtype, as the matmuls give them. Those
of tables (embedding, LM head), norms and biases are float32: they are few, and sums over all tokens.
A weight that is kept narrower than that is widened before it is used, so that no gradient is rounded on its
way to it. Micro-batches add up in float32, one after the other; each token's loss is divided by the tokens of
the whole batch, so that micro-batches with unequal loss masks add up to exactly the full batch's mean. The
norm is made of float32 squares, whatever the gradients' dtypes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint

from jaxthru.models import scopes
from jaxthru.runtime.weights import WeightInfo

Tree = Any


def gradient_dtype(info: WeightInfo, compute: jnp.dtype) -> jnp.dtype:
    """Returns the dtype that a weight's gradient is formed in. compute: that of activations."""
    return jnp.dtype(compute if info.role == "matrix" else jnp.float32)


class Linearised(NamedTuple):
    """What a function gave, and how to go back. result: its differentiable result. aux: the rest. pullback:
    cotangents of result -> (gradients, *those of the inputs). kept: what the way back needs beside what the
    function was given."""

    result: Any
    aux: Any
    pullback: Callable[[Any], tuple]
    kept: list[jax.Array]


def linearise(
    function: Callable,
    params: Tree,
    infos: Tree,
    compute: jnp.dtype,
    *inputs: Any,
    given: Tree = (),
    kept: list[jax.Array] | None = None,
) -> Linearised:
    """Returns a function's result and its pullback.

    function: (params, *inputs) -> (result, aux). infos: a WeightInfo for each parameter. given: what else the
    function reads. kept: of the same call elsewhere; it takes the place of what computing the function again
    would give, which is then dead code.
    """
    leaves, tree = jax.tree.flatten(params)
    infos = tree.flatten_up_to(infos)
    dtypes = [gradient_dtype(info, compute) for info in infos]
    used = [
        leaf.astype(dtype) if info.trains and leaf.dtype.itemsize < dtype.itemsize else leaf
        for leaf, info, dtype in zip(leaves, infos, dtypes, strict=True)
    ]
    trained = [index for index, info in enumerate(infos) if info.trains]

    def of_trained(some: list[jax.Array], *inputs: Any) -> tuple:
        replaced = dict(zip(trained, some, strict=True))
        return function(tree.unflatten([replaced.get(i, leaf) for i, leaf in enumerate(used)]), *inputs)

    result, back, aux = jax.vjp(of_trained, [used[index] for index in trained], *inputs, has_aux=True)
    known = {id(leaf) for leaf in jax.tree.leaves((used, inputs, given))}
    residuals, structure = jax.tree.flatten(back)
    if kept is None:
        kept = [leaf for leaf in residuals if id(leaf) not in known]
    else:
        rest = iter(kept)
        back = structure.unflatten([leaf if id(leaf) in known else next(rest) for leaf in residuals])

    def pullback(cotangents: Any) -> tuple:
        some, *d_inputs = back(cotangents)
        gradients: list[jax.Array | None] = [None] * len(leaves)
        for index, gradient in zip(trained, some, strict=True):
            gradients[index] = gradient.astype(dtypes[index])
        return tree.unflatten(gradients), *d_inputs

    return Linearised(result, aux, pullback, kept)


@jax.named_scope(scopes.GRADIENTS)
def added(sums: Tree, gradients: Tree) -> Tree:
    """Returns the sums over micro-batches, float32, with one more added."""
    return jax.tree.map(lambda sum_, term: sum_ + term.astype(sum_.dtype), sums, gradients)


def token_weight(batch: dict[str, jax.Array]) -> jax.Array:
    """Returns one over the tokens of a whole batch that count."""
    return 1.0 / jnp.maximum(jnp.sum(batch["loss_mask"]), 1.0)


def squares(gradients: Tree) -> jax.Array:
    """Returns the sum of the squares of all gradients, float32."""
    terms = (jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(gradients))
    return sum(terms, start=jnp.zeros((), jnp.float32))  # of what does not train there are none


def stored_order(gradients: Tree) -> Tree:
    """Returns the gradients with their elements in memory in the order of the parameters'.

    A reduce-scatter along another dim than the first gives them with that dim first. XLA would put them in
    order within the update, whose results could then not take the place of its inputs: each of the state's
    arrays would be copied, at a third of the speed. The barrier keeps it from that; the norm waits for all
    gradients anyway.
    """
    ordered = jax.tree.map(
        lambda leaf: with_layout_constraint(leaf, MemoryLayout(tuple(range(leaf.ndim)))), gradients
    )
    return jax.lax.optimization_barrier(ordered)
