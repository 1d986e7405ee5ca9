"""Routing by Triton kernels: the choice, the sort and the rows there and back in a pass over memory each.

The choice and the weights of a block of tokens, and their gradient, are made in registers, where XLA reads
the scores once for each expert of a token. The scores are XLA's, where a loss asks for them. The sort is a
counting sort: how many assignments of each expert a block has, what blocks before it have, each one's rank in
its block. Rows go there and back token by token: a token is read once and written to all of its rows. Rows
without an expert are neither read nor written.

On an H200 at 4.1 TB/s, at 16,384 tokens of Qwen3-30B (128 experts, 8 of them, 2,048 wide) in bfloat16: the
choice reads 8.4 MB and writes 1, its gradient reads and writes as much; the sort a few MB, with three
kernels' starts; rows there read 67 MB and write 537, rows back the reverse: 0.15 ms each. Log, 32,768 tokens,
router, sort and rows of a layer with their gradients: 2.23 ms when rows there took their tokens in the rows'
order, 1.88 by token (predicted 1.7); 1.86 with the weights' gradient in a kernel of 25 us in place of 22 of
XLA's (predicted 1.79). By a trace the choice took 73 us when each weight was a sum over all scores, and 39
since it is loaded.
Rows of 2,048 at half as many entries at once, written as the first to leave the L2 cache, into which these do
not fit: there 335 us for 343, back 287 for 296, the best of some 40 settings of each, none tried
on AMD's; router, sort and rows of a layer 1.73 ms for 1.75 (predicted 1.71).
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.dispatch import Unsupported, require_float, require_gpu
from pallas_kernels.routing import xla
from pallas_kernels.triton_loading import load_triton
from pallas_kernels.varying import vary_alike

MIN_CAPABILITY = (8, 0)
AT_ONCE = {"route": 4096, "route_back": 2048}  # scores of a program; more would not stay in registers
MOST_EXPERTS = 2048
RANKED = 128  # assignments that are ranked against each other
SUMMED = 4096  # counts that a program of the sums has at once
ENTRIES = 2048  # of rows that a program moves at once, or of one row's part
WARPS = {"dispatch": 8, "combine": 4}  # of such a program
WIDEST = 4096  # of a row at once


def route(logits_NE, valid_N, bias_E, *, rule, platform: str):
    """Returns (ids, weights, counts, scores); see `route` of the package.

    Raises Unsupported: no GPU, or NVIDIA's before compute capability 8.0; jax-triton is not installed; or
    more than 2,048 experts.
    """
    require_gpu(platform, MIN_CAPABILITY)
    if rule.experts > MOST_EXPERTS:
        raise Unsupported(f"needs at most {MOST_EXPERTS} experts, got {rule.experts}")
    load_triton(__package__)
    if rule.balanced:  # nothing is left to choose
        return xla.route(logits_NE, valid_N, bias_E, rule=rule)
    if bias_E is None:
        bias_E = vary_alike(jnp.zeros(rule.experts, jnp.float32), logits_NE)[0]
    ids_NK, weights_NK = _routed(logits_NE, valid_N, bias_E, rule)
    _, scores_NE = xla.weigh(logits_NE, valid_N, ids_NK, rule)
    return ids_NK, weights_NK, xla.count(ids_NK.reshape(-1), rule.experts), scores_NE


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _routed(logits_NE, valid_N, bias_E, rule):
    (N, _), K = logits_NE.shape, rule.top_k
    made = _by_token(
        "route",
        rule,
        logits_NE,
        valid_N,
        bias_E,
        out_shape=tuple(jax.ShapeDtypeStruct((N, K), dtype) for dtype in (jnp.int32, jnp.float32)),
        GROUPS=rule.groups,
        TOP_GROUPS=rule.top_groups,
        BK=1 << (K - 1).bit_length(),
    )
    # Both are kept by a policy that saves what is chosen: the kernel does not run again.
    return tuple(checkpoint_name(array, "routing") for array in vary_alike(*made, logits_NE)[:2])


def _routed_forward(logits_NE, valid_N, bias_E, rule):
    made = _routed(logits_NE, valid_N, bias_E, rule)
    return made, (logits_NE, valid_N, made[0])


def _routed_backward(rule, kept, gradients):
    logits_NE, valid_N, ids_NK = kept
    out_shape = jax.ShapeDtypeStruct(logits_NE.shape, jnp.float32)
    d_logits_NE = _by_token("route_back", rule, logits_NE, valid_N, ids_NK, gradients[1], out_shape=out_shape)
    return vary_alike(d_logits_NE, logits_NE)[0], None, None


_routed.defvjp(_routed_forward, _routed_backward)


def _by_token(kernel: str, rule, logits_NE, valid_N, *given, out_shape, **constants):
    """Returns what a kernel makes of blocks of tokens, each with the scores of all experts in registers."""
    jax_triton, kernels = load_triton(__package__)
    N, E = logits_NE.shape
    width = 1 << (E - 1).bit_length()
    tokens = max(AT_ONCE[kernel] // width, 1)
    return jax_triton.triton_call(
        logits_NE,
        valid_N.astype(jnp.int8),
        *given,
        N,
        kernel=getattr(kernels, kernel),
        out_shape=out_shape,
        grid=-(-N // tokens),
        E=E,
        K=rule.top_k,
        SIGMOID=rule.score == "sigmoid",
        OF_CHOSEN=rule.score == "softmax_of_chosen",
        NORMALISE=rule.normalise,
        SCALE=rule.scale,
        BN=tokens,
        BE=width,
        num_warps=4,
        **constants,
    )


def sort_assignments(ids_NK, *, experts: int, platform: str):
    """Returns (order, inverse, sizes); see `sort_assignments` of the package. Raises Unsupported as
    `route`."""
    require_gpu(platform, MIN_CAPABILITY)
    if experts > MOST_EXPERTS:
        raise Unsupported(f"needs at most {MOST_EXPERTS} experts, got {experts}")
    load_triton(__package__)
    return _sorted(ids_NK, experts)


# Integers have no gradient, but those that depend on the logits have a place for one, and JAX would ask a
# kernel's call for its derivative.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sorted(ids_NK, experts):
    jax_triton, kernels = load_triton(__package__)
    R, X = ids_NK.size, experts + 1  # what is no expert's has a place too
    P, width = -(-R // RANKED), 1 << experts.bit_length()
    int32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    counts_XP = jax_triton.triton_call(
        ids_NK,
        R,
        kernel=kernels.count_blocks,
        out_shape=int32(X, P),
        grid=P,
        P=P,
        X=X,
        B=RANKED,
        BX=width,
        num_warps=4,
    )
    before_XP, sizes_X = jax_triton.triton_call(
        counts_XP,
        kernel=kernels.sum_blocks,
        out_shape=(int32(X, P), int32(X)),
        grid=X,
        P=P,
        BP=min(1 << (P - 1).bit_length(), SUMMED),
        num_warps=4,
    )
    order_R, inverse_R = jax_triton.triton_call(
        ids_NK,
        before_XP,
        jnp.cumsum(sizes_X) - sizes_X,
        R,
        kernel=kernels.place,
        out_shape=(int32(R), int32(R)),
        grid=P,
        P=P,
        B=RANKED,
        num_warps=4,
    )
    made = order_R, inverse_R.reshape(ids_NK.shape), sizes_X[:experts]
    return vary_alike(*made, ids_NK)[:3]


_sorted.defvjp(lambda ids_NK, experts: (_sorted(ids_NK, experts), None), lambda *given: (None,))


def dispatch(x_ND, order, *, top_k: int, platform: str) -> jax.Array:
    """Returns [R, D]; see `dispatch` of the package. Raises Unsupported: no GPU, or NVIDIA's before compute
    capability 8.0; jax-triton is not installed; or none of bfloat16, float16 and float32."""
    return _move("dispatch", x_ND, order, len(order.order_R), platform)


def combine(y_RD, order, *, platform: str) -> jax.Array:
    """Returns [N, D]; see `combine` of the package. Raises Unsupported as `dispatch`."""
    return _move("combine", y_RD, order, len(order.inverse_NK), platform)


def _move(kernel: str, x, order, results: int, platform: str) -> jax.Array:
    """Returns [results, D] of a kernel that takes a block of tokens at a time, with where their rows are."""
    require_gpu(platform, MIN_CAPABILITY)
    require_float(x)
    jax_triton, kernels = load_triton(__package__)
    (N, K), D = order.inverse_NK.shape, x.shape[1]
    width = min(1 << (D - 1).bit_length(), WIDEST)
    block = max(ENTRIES // width, 1)
    moved = jax_triton.triton_call(
        x,
        order.inverse_NK,
        jnp.sum(order.sizes_E, keepdims=True),
        N,
        kernel=getattr(kernels, kernel),
        out_shape=jax.ShapeDtypeStruct((results, D), x.dtype),
        grid=(-(-N // block), -(-D // width)),
        K=K,
        D=D,
        B=block,
        BD=width,
        num_warps=WARPS[kernel],
    )
    return vary_alike(moved, x)[0]
