"""Routing as its definition reads: by XLA's top-k and a stable sort, and one row of a token after another."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.routing.rule import Rule


def route(logits_NE, valid_N, bias_E, *, rule: Rule) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (ids, weights, counts, scores); see `route` of the package."""
    E = rule.experts
    # An invalid token's logits may be anything: they are not to reach a gradient.
    logits_NE = jnp.where(valid_N[:, None], logits_NE, 0.0)
    scores_NE = jax.nn.sigmoid(logits_NE) if rule.score == "sigmoid" else jax.nn.softmax(logits_NE, axis=-1)
    choice_NE = jax.lax.stop_gradient(logits_NE if rule.score == "softmax_of_chosen" else scores_NE)
    if bias_E is not None:
        choice_NE += jax.lax.stop_gradient(bias_E)[None, :]
    choice_NE = jnp.where(jnp.isnan(choice_NE), jnp.inf, choice_NE)  # chosen first: its weight says so
    if rule.limited:
        best_two_NG2, _ = jax.lax.top_k(choice_NE.reshape(-1, rule.groups, rule.of_group), 2)
        _, groups_N = jax.lax.top_k(jnp.sum(best_two_NG2, axis=-1), rule.top_groups)
        among_NG = jnp.any(groups_N[:, :, None] == jnp.arange(rule.groups)[None, None, :], axis=1)
        choice_NE = jnp.where(jnp.repeat(among_NG, rule.of_group, axis=1), choice_NE, -jnp.inf)
    _, ids_NK = jax.lax.top_k(choice_NE, rule.top_k)  # of equal ones the lowest id first
    if rule.balanced:
        ids_NK = jnp.arange(ids_NK.size, dtype=jnp.int32).reshape(ids_NK.shape) % E
    ids_NK = checkpoint_name(ids_NK, "routing")
    of_what = logits_NE if rule.score == "softmax_of_chosen" else scores_NE
    weights_NK = jnp.take_along_axis(of_what, ids_NK, axis=-1)
    if rule.score == "softmax_of_chosen":
        weights_NK = jax.nn.softmax(weights_NK, axis=-1)
    if rule.normalise:
        weights_NK /= jnp.sum(weights_NK, axis=-1, keepdims=True)
    valid_N1 = valid_N[:, None]
    ids_NK = jnp.where(valid_N1, ids_NK, E)
    counts_E = jnp.zeros(E, jnp.int32).at[ids_NK.reshape(-1)].add(1, mode="drop")
    zero = lambda x: jnp.where(valid_N1, x, 0.0)  # noqa: E731
    return ids_NK, zero(weights_NK * rule.scale), counts_E, zero(scores_NE)


def sort_assignments(ids_NK, *, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (order, inverse, sizes); see `sort_assignments` of the package."""
    ids_R = ids_NK.reshape(-1)
    order_R = jnp.argsort(ids_R, stable=True).astype(jnp.int32)
    inverse_R = jnp.argsort(order_R).astype(jnp.int32)
    sizes_E = jnp.zeros(experts, jnp.int32).at[ids_R].add(1, mode="drop")
    return order_R, inverse_R.reshape(ids_NK.shape), sizes_E


def dispatch(x_ND, order, *, top_k: int) -> jax.Array:
    """Returns [R, D]; see `dispatch` of the package."""
    return x_ND[order.order_R // top_k]


def combine(y_RD, order) -> jax.Array:
    """Returns [N, D]; see `combine` of the package."""
    exists_NK = order.inverse_NK < jnp.sum(order.sizes_E)
    rows_NKD = y_RD.at[order.inverse_NK].get(mode="clip").astype(jnp.float32)
    return jnp.sum(jnp.where(exists_NK[:, :, None], rows_NKD, 0.0), axis=1).astype(y_RD.dtype)
