"""Routing without a sort: the best expert K times over, and a counting sort in blocks.

XLA's top-k is a sort of [tokens, experts] on most devices, and the gradient of what a token takes of its
scores a scatter-add. Here both are comparisons, which fuse into passes over the scores.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.routing.rule import Rule

BLOCK = 128  # assignments that are ranked against each other
LOWEST = float(jnp.finfo(jnp.float32).min) / 2  # of a choice: what was chosen is lower, and two are a number


def route(logits_NE, valid_N, bias_E, *, rule: Rule):
    """Returns (ids, weights, counts, scores); see `route` of the package."""
    ids_NK = checkpoint_name(choose(logits_NE, valid_N, bias_E, rule), "routing")
    weights_NK, scores_NE = weigh(logits_NE, valid_N, ids_NK, rule)
    return ids_NK, weights_NK, count(ids_NK.reshape(-1), rule.experts), scores_NE


def choose(logits_NE, valid_N, bias_E, rule: Rule) -> jax.Array:
    """Returns [N, K] int32 ids of the chosen experts, E for an invalid token. No gradient passes."""
    logits_NE = jax.lax.stop_gradient(logits_NE)
    if rule.balanced:
        places_NK = jax.lax.broadcasted_iota(jnp.int32, (len(logits_NE), rule.top_k), 0) * rule.top_k
        places_NK += jax.lax.broadcasted_iota(jnp.int32, places_NK.shape, 1)
        return jnp.where(valid_N[:, None], places_NK % rule.experts, rule.experts)
    choice_NE = logits_NE if rule.score == "softmax_of_chosen" else _scores(logits_NE, rule)
    if bias_E is not None:
        choice_NE += jax.lax.stop_gradient(bias_E)[None, :]
    choice_NE = jnp.maximum(choice_NE, LOWEST)
    if rule.limited:
        choice_NGX = choice_NE.reshape(-1, rule.groups, rule.of_group)
        first_NG, second_NG = (_taken(choice_NGX, id_NG) for id_NG in _largest(choice_NGX, 2))
        groups = _largest(first_NG + second_NG, rule.top_groups)
        among_NG = functools.reduce(jnp.logical_or, (_is(id_N, rule.groups) for id_N in groups))
        choice_NE = jnp.where(among_NG[:, :, None], choice_NGX, -jnp.inf).reshape(choice_NE.shape)
    ids_NK = jnp.stack(_largest(choice_NE, rule.top_k), axis=-1)
    return jnp.where(valid_N[:, None], ids_NK, rule.experts)


def weigh(logits_NE, valid_N, ids_NK, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """Returns the weights [N, K] of the chosen experts and the scores [N, E], differentiable in the logits.
    Both are zeros for an invalid token, whose logits may be anything."""
    valid_N1 = valid_N[:, None]
    logits_NE = jnp.where(valid_N1, logits_NE, 0.0)
    scores_NE = _scores(logits_NE, rule)
    of_what = logits_NE if rule.score == "softmax_of_chosen" else scores_NE
    weights_NK = jnp.stack([_taken(of_what, id_N) for id_N in jnp.unstack(ids_NK, axis=1)], axis=-1)
    if rule.score == "softmax_of_chosen":
        weights_NK = jax.nn.softmax(weights_NK, axis=-1)
    if rule.normalise:
        sum_N1 = jnp.sum(weights_NK, axis=-1, keepdims=True)
        weights_NK /= jnp.where(valid_N1, sum_N1, 1.0)  # an invalid token's ids take nothing: 0 / 0
    zero = lambda x: jnp.where(valid_N1, x, 0.0)  # noqa: E731
    return zero(weights_NK * rule.scale), zero(scores_NE)


def count(ids_R, experts: int) -> jax.Array:
    """Returns how many of the ids are each expert's, [E] int32."""
    return jnp.sum(_is(ids_R, experts), axis=0, dtype=jnp.int32)


def sort_assignments(ids_NK, *, experts: int):
    """Returns (order, inverse, sizes); see `sort_assignments` of the package.

    An assignment's place is its expert's first one, and as many behind it as earlier blocks, and earlier
    assignments of its own block, have of that expert.
    """
    R = ids_NK.size
    ids_PB = jnp.pad(ids_NK.reshape(-1), (0, -R % BLOCK), constant_values=experts + 1).reshape(-1, BLOCK)
    counts_PX = jnp.sum(_is(ids_PB, experts + 1), axis=1, dtype=jnp.int32)
    sizes_X = jnp.sum(counts_PX, axis=0)
    first_PX = jnp.cumsum(counts_PX, axis=0) - counts_PX + (jnp.cumsum(sizes_X) - sizes_X)[None, :]
    earlier_BB = jnp.tril(jnp.ones((BLOCK, BLOCK), bool), -1)
    alike_PBB = (ids_PB[:, :, None] == ids_PB[:, None, :]) & earlier_BB[None]
    rank_PB = jnp.sum(alike_PBB, axis=2, dtype=jnp.int32)
    inverse_R = (jnp.take_along_axis(first_PX, ids_PB, axis=1, mode="clip") + rank_PB).reshape(-1)[:R]
    # Each place once: nothing is added up, in whatever order they are written.
    order_R = (
        jnp.zeros_like(inverse_R)
        .at[inverse_R]
        .set(jnp.arange(R, dtype=jnp.int32), unique_indices=True, mode="promise_in_bounds")
    )
    return order_R, inverse_R.reshape(ids_NK.shape), sizes_X[:experts]


def dispatch(x_ND, order, *, top_k: int) -> jax.Array:
    """Returns [R, D]; see `dispatch` of the package."""
    return x_ND.at[order.order_R // top_k].get(mode="promise_in_bounds")


def combine(y_RD, order) -> jax.Array:
    """Returns [N, D]; see `combine` of the package. A row at a time, so that [N, K, D] is never there."""
    rows = jnp.sum(order.sizes_E)
    sum_ND = jnp.zeros((), jnp.float32)
    for row_N in jnp.unstack(order.inverse_NK, axis=1):
        taken_ND = y_RD.at[row_N].get(mode="clip").astype(jnp.float32)
        sum_ND += jnp.where((row_N < rows)[:, None], taken_ND, 0.0)
    return sum_ND.astype(y_RD.dtype)


def _scores(logits_NE, rule: Rule) -> jax.Array:
    return jax.nn.sigmoid(logits_NE) if rule.score == "sigmoid" else jax.nn.softmax(logits_NE, axis=-1)


def _is(id_, size: int) -> jax.Array:
    """Returns which place along a new last dim each id is; none for ids beyond it."""
    places = jax.lax.broadcasted_iota(jnp.int32, (*id_.shape, size), id_.ndim)
    return id_[..., None] == places


def _taken(x, id_) -> jax.Array:
    """Returns the entry of x's last dim that each id names; 0 where there is none."""
    return jnp.sum(jnp.where(_is(id_, x.shape[-1]), x, 0.0), axis=-1)


def _largest(x, k: int) -> list[jax.Array]:
    """Returns the places of the k largest along the last dim, of equal ones the first first."""
    places = []
    for _ in range(k):
        place = jax.lax.argmax(x, x.ndim - 1, jnp.int32)
        places.append(place)
        x = jnp.where(_is(place, x.shape[-1]), -jnp.inf, x)
    return places
