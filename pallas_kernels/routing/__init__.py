"""Routing of tokens to experts: the choice, the sort by expert, and the rows there and back.

Shapes: N tokens, K experts of each (top_k), E experts, R = N·K assignments of a token to an expert, D width.
Assignment n·K + k is the k-th of token n. A token that goes nowhere, as padding does, has the id E, which is
no expert's: such assignments come last, and what lies there nobody reads.

    routing = route(logits_NE, valid_N, top_k=8, score="softmax", normalise=True)
    order = sort_assignments(routing.ids_NK, E)
    x_RD = dispatch(x_ND, order, 8)
    ... grouped_matmul(x_RD, w, order.sizes_E), weighted by dispatch_weights(routing.weights_NK, order) ...
    y_ND = combine(y_RD, order, N)

`dispatch` and `combine` are each other's gradient. Each row is written once and nothing is added up by
atomics, so results repeat to the bit. Every function takes arrays as they lie on one device; within
`jax.shard_map` each device routes and sorts its own.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Operation, triton_before_xla
from pallas_kernels.routing.rule import SCORES, Rule
from pallas_kernels.varying import vary_alike

__all__ = [
    "OPERATION",
    "SCORES",
    "Order",
    "Routing",
    "Rule",
    "combine",
    "dispatch",
    "dispatch_weights",
    "route",
    "sort_assignments",
]

OPERATION = Operation(
    __name__,
    {
        "triton": Implementation(takes=("platform",)),
        "xla": Implementation(),
        "reference": Implementation(),
    },
    triton_before_xla,
)


class Routing(NamedTuple):
    """ids_NK: [N, K] int32, the chosen experts of each token, the best first; E for an invalid one.
    weights_NK: [N, K] float32, 0 for an invalid one. counts_E: [E] int32, assignments of each expert.
    scores_NE: [N, E] float32, of all experts, for losses that balance them; 0 for an invalid token."""

    ids_NK: jax.Array
    weights_NK: jax.Array
    counts_E: jax.Array
    scores_NE: jax.Array


class Order(NamedTuple):
    """Assignments by expert, and within one in their own order, all int32. order_R: [R], which assignment
    row r is; it may be cut short behind the last row that can have an expert, and so are rows then.
    inverse_NK: [N, K], which row each assignment is. sizes_E: [E], rows of each expert."""

    order_R: jax.Array
    inverse_NK: jax.Array
    sizes_E: jax.Array


def route(
    logits_NE: jax.Array,
    valid_N: jax.Array,
    bias_E: jax.Array | None = None,
    *,
    top_k: int,
    score: Literal["softmax", "sigmoid", "softmax_of_chosen"],
    normalise: bool,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    balanced: bool = False,
    implementation: str | None = None,
    platform: str | None = None,
) -> Routing:
    """Returns which experts each token goes to, and with what weights.

    The experts with the largest score + bias are chosen, of equal ones those of the lowest id; weights are
    scores without the bias. Differentiable in the logits, by the weights and the scores, with the choice
    held. A token with logits that are not finite gets top_k different experts, too; which ones is not said,
    but that one of no number is among them, so that a weight is none either.
    The ids are named "routing" by `jax.ad_checkpoint.checkpoint_name`: a policy that saves them chooses no
    expert twice.

    Args:
      logits_NE: [N, E] float32.
      valid_N: [N] bool; others go nowhere and have no gradient, their logits may be anything.
      bias_E: [E] float32 or None; without a gradient.
      top_k: experts of a token.
      score: of logits: "softmax" over all experts, "sigmoid" of each, or "softmax_of_chosen", over those
        chosen, which are those of the largest logits; `scores_NE` then is the softmax over all.
      normalise: whether a token's weights are divided by their sum.
      scale: what weights are multiplied by, last.
      groups, top_groups: experts lie in so many groups of equal size, and are chosen from these of them whose
        best two have the largest sum of score + bias.
      balanced: whatever the logits, bias and groups are, experts are chosen in turn: the k-th of token n is
        n·K + k modulo E, so that all have equally many tokens; for benchmarks.
      implementation: one of `OPERATION.names`; None takes the first that can run.
      platform: "cpu", "gpu" or "tpu", where it will run; None is JAX's default backend.

    Raises:
      ValueError: arrays do not fit, there is no such choice, or no implementation has the name.
      dispatch.Unsupported: the named implementation refuses.

    Source: Shazeer et al. 2017 (arXiv:1701.06538); bias and groups: DeepSeek-V3, 2024 (arXiv:2412.19437).
    """
    if logits_NE.ndim != 2 or valid_N.shape != logits_NE.shape[:1]:
        raise ValueError(
            f"route: shapes do not fit: logits [N, E] {logits_NE.shape} and valid [N] {valid_N.shape}"
        )
    E = logits_NE.shape[1]
    if bias_E is not None and (bias_E.shape, bias_E.dtype) != ((E,), jnp.float32):
        raise ValueError(f"route: the bias is float32[{E}], got {bias_E.dtype}{list(bias_E.shape)}")
    if (logits_NE.dtype, valid_N.dtype) != (jnp.float32, jnp.bool_):
        raise ValueError(
            f"route: logits are float32 and valid is bool, got {logits_NE.dtype} and {valid_N.dtype}"
        )
    rule = Rule(E, top_k, score, normalise, scale, groups, top_groups, balanced)
    arrays = vary_alike(*(x for x in (logits_NE, valid_N, bias_E) if x is not None))
    arrays = arrays if bias_E is not None else (*arrays, None)
    return Routing(*_run("route", implementation, platform, *arrays, rule=rule))


def sort_assignments(
    ids_NK: jax.Array, experts: int, implementation: str | None = None, *, platform: str | None = None
) -> Order:
    """Returns the assignments sorted by expert, stably; those of the id `experts` come last, in their order.

    Args:
      ids_NK: [N, K] int32, from 0 to `experts`.
      experts: E.
      implementation, platform: as for `route`.

    Raises:
      ValueError: the ids are not int32 [N, K], or no implementation has the name.
      dispatch.Unsupported: the named implementation refuses.
    """
    if ids_NK.ndim != 2 or ids_NK.dtype != jnp.int32:
        raise ValueError(f"sort_assignments: ids are int32 [N, K], got {ids_NK.dtype}{list(ids_NK.shape)}")
    return Order(*_run("sort_assignments", implementation, platform, ids_NK, experts=experts))


def dispatch(
    x_ND: jax.Array,
    order: Order,
    top_k: int,
    implementation: str | None = None,
    *,
    platform: str | None = None,
) -> jax.Array:
    """Returns each row's token, [R, D]; rows behind the last expert's hold anything.

    Differentiable in x: by `combine`, which reads no gradient of those rows.

    Args:
      x_ND: [N, D], the tokens that `order` was made of.
      top_k: K.
      implementation, platform: as for `route`.

    Raises:
      ValueError: tokens do not fit the order, or no implementation has the name.
      dispatch.Unsupported: the named implementation refuses.
    """
    N, K = order.inverse_NK.shape
    if x_ND.ndim != 2 or len(x_ND) != N or top_k != K:
        raise ValueError(
            f"dispatch: the order is of {N} tokens with {K} experts each, got x {x_ND.shape} and top_k "
            f"{top_k}"
        )
    x_ND, *order = vary_alike(x_ND, *order)
    return _dispatch(x_ND, Order(*order), implementation, platform)


def combine(
    y_RD: jax.Array,
    order: Order,
    tokens: int,
    implementation: str | None = None,
    *,
    platform: str | None = None,
) -> jax.Array:
    """Returns the sum of each token's rows, [N, D] of y's dtype, in float32 and in the order of k.

    Rows behind the last expert's are not read, be they NaN. Differentiable in y: by `dispatch`.

    Args:
      y_RD: [R, D], the rows of `order`.
      tokens: N.
      implementation, platform: as for `route`.

    Raises:
      ValueError: rows do not fit the order, or no implementation has the name.
      dispatch.Unsupported: the named implementation refuses.
    """
    N, K = order.inverse_NK.shape
    if y_RD.ndim != 2 or len(y_RD) != len(order.order_R) or tokens != N:
        raise ValueError(
            f"combine: the order is of {N} tokens with {K} experts each, got y {y_RD.shape} and {tokens} "
            "tokens"
        )
    y_RD, *order = vary_alike(y_RD, *order)
    return _combine(y_RD, Order(*order), implementation, platform)


def dispatch_weights(weights_NK: jax.Array, order: Order) -> jax.Array:
    """Returns each row's weight, [R]; differentiable, and with a gradient of 0 where there is no expert.

    weights_NK: [N, K]. Raises ValueError where they do not fit the order.
    """
    if weights_NK.shape != order.inverse_NK.shape:
        raise ValueError(
            f"dispatch_weights: the order is of {order.inverse_NK.shape}, got weights {weights_NK.shape}"
        )
    weights_NK, *order = vary_alike(weights_NK, *order)
    return _dispatch_weights(weights_NK, Order(*order))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _dispatch(x_ND, order: Order, implementation, platform):
    K = order.inverse_NK.shape[1]
    return _run("dispatch", implementation, platform, x_ND, order, top_k=K)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _combine(y_RD, order: Order, implementation, platform):
    return _run("combine", implementation, platform, y_RD, order)


def _with_order(function):
    return lambda x, order, *how: (function(x, order, *how), order)


_dispatch.defvjp(_with_order(_dispatch), lambda *given: (_combine(given[3], given[2], *given[:2]), None))
_combine.defvjp(_with_order(_combine), lambda *given: (_dispatch(given[3], given[2], *given[:2]), None))


@jax.custom_vjp
def _dispatch_weights(weights_NK, order: Order):
    return weights_NK.reshape(-1).at[order.order_R].get(mode="promise_in_bounds")


def _weights_back(order: Order, d_R):
    d_NK = d_R.at[order.inverse_NK].get(mode="clip")
    return jnp.where(order.inverse_NK < jnp.sum(order.sizes_E), d_NK, jnp.zeros((), d_R.dtype)), None


_dispatch_weights.defvjp(_with_order(_dispatch_weights), _weights_back)


def _run(function: str, implementation: str | None, platform: str | None, *arrays, **options):
    how = {"implementation": implementation, "platform": platform, "function": function}
    return OPERATION.run(*arrays, **how, **options)
