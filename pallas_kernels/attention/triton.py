"""Attention within documents by Triton kernels, whose workspace does not grow with their number.

Blocks outside a query's document or window are neither read nor computed, no workspace grows with the number
of documents, and each gradient is summed in one order, so that results repeat bit for bit.

Source: the loops are FlashAttention-2's (Dao 2023, arXiv:2307.08691).

Shapes: B rows, T tokens, H query heads, K key heads, C width of a head.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention.segments import Segments
from pallas_kernels.dispatch import Unsupported, nvidia_compute_capability, require_nvidia
from pallas_kernels.triton_loading import load_triton
from pallas_kernels.varying import vary_alike

MIN_CAPABILITY = (8, 0)
HEAD_DIMS = (16, 32, 64, 128, 256)

# Blocks of queries and keys, warps, and stages of loads in flight: by sweeps on an H200, at head dims 64 and
# 128, in the mean within 4 % of the best over packed rows of 32,768 tokens of text, and within 10 % over rows
# of 2,048 (docs/lab/kernels.md).
TILES = {
    "forward": {"BQ": 64, "BK": 64, "num_warps": 4, "num_stages": 3},
    "backward_q": {"BQ": 64, "BK": 64, "num_warps": 4, "num_stages": 2},
    "backward_kv": {"BQ": 32, "BK": 64, "num_warps": 4, "num_stages": 3},
}
NARROW_TILES_FROM_HOPPER = {name: {"BQ": 64, "BK": 64, "num_warps": 4, "num_stages": 3} for name in TILES}
"""For a head dim of 64 or less, timed at 64 on an H200. Before Hopper `backward_kv` would spill registers."""

# The same for a head dim above 128: so small that they fit into the 99 KiB of shared memory that every GPU
# from 8.0 on has, without spilled registers; and for the 227 KiB of Hopper and of data-centre
# Blackwell, whose matrix units want 64 rows. Chosen by what the compiler reports; not measured.
WIDE_TILES = {
    "forward": {"BQ": 64, "BK": 32, "num_warps": 8, "num_stages": 2},
    "backward_q": {"BQ": 32, "BK": 32, "num_warps": 4, "num_stages": 2},
    "backward_kv": {"BQ": 32, "BK": 32, "num_warps": 4, "num_stages": 1},
}
WIDE_TILES_FROM_HOPPER = {
    "forward": {"BQ": 64, "BK": 64, "num_warps": 8, "num_stages": 2},
    "backward_q": {"BQ": 64, "BK": 32, "num_warps": 8, "num_stages": 2},
    "backward_kv": {"BQ": 32, "BK": 64, "num_warps": 8, "num_stages": 2},
}


def tiles(head_dim: int) -> dict[str, dict[str, int]]:
    """Returns each kernel's tile, for the GPU of this process."""
    from_hopper = (9, 0) <= (nvidia_compute_capability() or (0, 0)) < (12, 0)
    if head_dim <= 64:
        return NARROW_TILES_FROM_HOPPER if from_hopper else TILES
    if head_dim <= 128:
        return TILES
    return WIDE_TILES_FROM_HOPPER if from_hopper else WIDE_TILES


def attention(
    q_BTHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKC: jax.Array,
    segments: Segments,
    *,
    window: int | None = None,
    platform: str,
) -> jax.Array:
    """Returns [B, T, H, C] of q's dtype; see `pallas_kernels.attention.attention`.

    Raises:
      Unsupported: not an NVIDIA GPU of compute capability 8.0 or later; jax-triton is not installed; neither
        bfloat16 nor float16; a head that is not 16, 32, 64, 128 or 256 wide; or a row of 2**31 elements
        or more.
    """
    require_nvidia(platform, MIN_CAPABILITY)
    if q_BTHC.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(f"needs bfloat16 or float16, got {q_BTHC.dtype}")
    if math.prod(q_BTHC.shape[1:]) >= 2**31:
        raise Unsupported(
            f"needs fewer than 2**31 elements of q in a row (offsets in it are int32), got {q_BTHC.shape}"
        )
    if q_BTHC.shape[3] not in HEAD_DIMS:
        raise Unsupported(f"needs a head dim of {', '.join(map(str, HEAD_DIMS))}, got {q_BTHC.shape[3]}")
    load_triton(__package__)
    return _attention(*vary_alike(q_BTHC, k_BTKC, v_BTKC), segments, window)


def _call(name: str, arrays: tuple, outputs: tuple, blocks_of: str, heads: int, q_BTHC, k_BTKC, **constants):
    """Runs a kernel over (blocks of queries or keys, heads, rows) and returns its outputs."""
    jax_triton, kernels = load_triton(__package__)
    B, T, H, C = q_BTHC.shape
    tile = tiles(C)[name]
    root = C**-0.5
    return jax_triton.triton_call(
        *arrays,
        kernel=getattr(kernels, name),
        out_shape=outputs,
        grid=(-(-T // tile[blocks_of]), heads, B),
        scale=root * math.log2(math.e),
        T=T,
        H=H,
        K=k_BTKC.shape[2],
        C=C,
        **constants,
        **tile,
    )


def _bounds(segments: Segments, window: int | None) -> tuple[jax.Array, jax.Array]:
    """Returns [B, T] int32, twice: the first key that each token sees, and the last query that sees it.

    These are all that the kernels know of documents, and both grow with the position: a window narrows them,
    and the kernels then skip its outside as they skip other documents.
    """
    if window is None:
        return segments.first, segments.last
    position_1T = jnp.arange(segments.ids.shape[1], dtype=jnp.int32)[None, :]
    return (
        jnp.maximum(segments.first, position_1T - (window - 1)),
        jnp.minimum(segments.last, position_1T + (window - 1)),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q_BTHC, k_BTKC, v_BTKC, segments: Segments, window):
    return _forward(q_BTHC, k_BTKC, v_BTKC, segments, window)[0]


def _forward(q_BTHC, k_BTKC, v_BTKC, segments: Segments, window):
    B, T, H, _ = q_BTHC.shape
    outputs = (
        jax.ShapeDtypeStruct(q_BTHC.shape, q_BTHC.dtype),
        jax.ShapeDtypeStruct((B, H, T), jnp.float32),
    )
    arrays = (q_BTHC, k_BTKC, v_BTKC, _bounds(segments, window)[0])
    o_BTHC, statistics_BHT = _call("forward", arrays, outputs, "BQ", H, q_BTHC, k_BTKC)
    # The named arrays are the residuals: a policy that saves the names saves what the backward pass reads.
    o_BTHC = checkpoint_name(o_BTHC, "attention")
    statistics_BHT = checkpoint_name(statistics_BHT, "attention_statistics")
    return o_BTHC, (q_BTHC, k_BTKC, v_BTKC, segments, o_BTHC, statistics_BHT)


def _backward(window, residuals, do_BTHC):
    q_BTHC, k_BTKC, v_BTKC, segments, o_BTHC, statistics_BHT = residuals
    H, K = q_BTHC.shape[2], k_BTKC.shape[2]
    root = q_BTHC.shape[3] ** -0.5
    products = o_BTHC.astype(jnp.float32) * do_BTHC.astype(jnp.float32)
    delta_BHT = jnp.sum(products, axis=-1).transpose(0, 2, 1)
    first_BT, last_BT = _bounds(segments, window)
    arrays = (q_BTHC, k_BTKC, v_BTKC, do_BTHC, statistics_BHT, delta_BHT, first_BT)
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    dq_BTHC = _call("backward_q", arrays, like(q_BTHC), "BQ", H, q_BTHC, k_BTKC, root=root)
    dk_BTKC, dv_BTKC = _call(
        "backward_kv",
        (*arrays, last_BT),
        (like(k_BTKC), like(v_BTKC)),
        "BK",
        K,
        q_BTHC,
        k_BTKC,
        root=root,
    )
    return dq_BTHC, dk_BTKC, dv_BTKC, None


_attention.defvjp(_forward, _backward)
