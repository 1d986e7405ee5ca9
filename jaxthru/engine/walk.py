"""The forward pass of each stage as every executor applies it: functions of parameters, to be linearised.

Each returns ((what goes on, {name: auxiliary loss}), terms for the record).

Shapes: B rows, T tokens, N = B·T, D embed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.engine.gradients import Linearised, linearise
from jaxthru.engine.model import Batch, Model
from jaxthru.engine.objectives.objective import Objective
from jaxthru.engine.terms import merged, of_stage
from jaxthru.models import scopes
from jaxthru.models.remat import remat
from jaxthru.models.stage import Context, Stage

Tree = Any


def embedding(model: Model, tokens_BT: jax.Array, context: Context) -> Callable:
    """Returns params of the embedding -> the first block's input."""

    def apply(params: Tree) -> tuple:
        x_ND, extras = model.embed(params, tokens_BT, context)
        return (x_ND, dict(extras.losses)), of_stage(
            model.chain, model.chain.embedding, extras, context.share
        )

    return apply


def block(model: Model, stage: Stage, in_loop: bool = False) -> Callable:
    """Returns (params, input [N, D], context) of a block -> its output, rematerialised as the policy says.
    in_loop: see `remat`."""

    def apply(params: Tree, x_ND: jax.Array, context: Context) -> tuple:
        y_ND, extras = stage.apply(params, x_ND, context)
        return (y_ND, dict(extras.losses)), of_stage(model.chain, stage, extras, context.share)

    return jax.named_scope(scopes.MODEL)(remat(apply, model.policy, in_loop))


def head(objective: Objective, batch: Batch, weight: jax.Array, context: Context) -> Callable:
    """Returns (`head_params`, the last block's output [N, D]) -> the loss to minimise."""
    model, stage = objective.model, objective.model.chain.head

    def apply(params: Tree, x_ND: jax.Array) -> tuple:
        with jax.named_scope(scopes.MODEL):
            hidden_ND, extras = stage.apply(params["head"], x_ND, context)
        minimised, sums = objective(params, hidden_ND, batch, weight)
        terms = of_stage(model.chain, stage, extras, context.share)
        return (minimised, dict(extras.losses)), merged(model.chain, sums, terms)

    return apply


def head_params(model: Model, embedding: Tree, head: Tree) -> Tree:
    """Returns what the head reads: its own, and the embedding's where that makes the logits."""
    return {"head": head} | ({"embedding": embedding} if model.chain.tied else {})


def cotangents(link: Linearised, dy: jax.Array, context: Context) -> tuple:
    """Returns the gradients of what a link gave. dy: of what goes on; auxiliary losses are means over the
    micro-batch, which adds its share of them."""
    _, losses = link.result
    return dy, {name: context.share.astype(loss.dtype) for name, loss in losses.items()}


def linearised_block(
    model: Model,
    stage: Stage,
    params: Tree,
    x_ND: jax.Array,
    context: Context,
    kept: list | None = None,
    apply: Callable | None = None,
) -> Linearised:
    """Returns a block's output and its pullback. kept: see `linearise`. apply: of `block`."""
    apply = apply or block(model, stage)
    of_block = lambda params, x_ND: apply(params, x_ND, context)  # noqa: E731
    return linearise(of_block, params, stage.weights, model.ops.compute, x_ND, given=context, kept=kept)


def linearised_head(
    objective: Objective, params: Tree, x_ND: jax.Array, batch: Batch, weight: jax.Array, context: Context
) -> tuple[Tree, Tree, jax.Array]:
    """Returns the terms for the record, the gradients of `head_params`, and that of x_ND."""
    model = objective.model
    infos = head_params(model, model.chain.embedding.weights, model.chain.head.weights)
    link = linearise(head(objective, batch, weight, context), params, infos, model.ops.compute, x_ND)
    minimised, _ = link.result
    gradients, dx_ND = link.pullback(cotangents(link, jnp.ones_like(minimised), context))
    return link.aux, gradients, dx_ND
