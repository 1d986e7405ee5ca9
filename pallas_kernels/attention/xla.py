"""Portable attention: XLA operations over chunks of queries, so that no [B, H, T, T] exists for long rows.

It computes the masked scores too, so a row costs T² whatever its documents: a way to run, not to be fast.
With a window a row costs T × (window + CHUNK): a chunk is given only the keys that its queries can see.

Shapes: B rows, T queries, S keys (as many), N chunks of Q queries, H query heads, K key heads, G = H / K
query heads to a key head, C width of a head; P = G·Q: the queries of a chunk that share a key head.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention.segments import Segments

# Rows up to this many tokens are one chunk: their scores are small, and a loop around one only costs time.
CHUNK = 512
# Slices of keys are a multiple of this long, because odd widths are slow on GPUs and TPUs.
ROUND = 128


def attention(
    q_BTHC: jax.Array,
    k_BSKC: jax.Array,
    v_BSKC: jax.Array,
    segments: Segments,
    *,
    window: int | None = None,
) -> jax.Array:
    """Returns [B, T, H, C] of q's dtype; see `pallas_kernels.attention.attention`.

    Matmuls take the inputs' dtype and accumulate in float32; the softmax is in float32.
    """
    B, T, H, C = q_BTHC.shape
    K = k_BSKC.shape[2]
    # Heads before tokens, because a CPU's matmul wants each head's rows beside each other.
    q_BKGTC = q_BTHC.reshape(B, T, K, H // K, C).transpose(0, 2, 3, 1, 4)
    k_BKSC, v_BKSC = k_BSKC.transpose(0, 2, 1, 3), v_BSKC.transpose(0, 2, 1, 3)
    position_T = jnp.arange(T, dtype=jnp.int32)
    if T <= CHUNK:
        o_BKGTC = _attend(q_BKGTC, segments.ids, position_T, k_BKSC, v_BKSC, segments.ids, window)
    else:
        N = -(-T // CHUNK)
        seen = T if window is None else min(-(-(CHUNK + window - 1) // ROUND) * ROUND, T)  # keys by a chunk
        # k and v enter the loop in float32 and go back to their dtype in each chunk, because a loop sums its
        # constants' gradients in their own dtype, and 16 bits are too few for a sum over chunks.
        k32, v32 = k_BKSC.astype(jnp.float32), v_BKSC.astype(jnp.float32)

        @jax.checkpoint  # the loop saves its inputs, not the scores of every chunk
        def attend(chunk):
            k, v, ids, start = k32, v32, segments.ids, None
            if seen < T:  # up to the end of the chunk, or of the row
                *chunk, end = chunk
                start = jnp.clip(end - seen, 0, T - seen)
                k, v, ids = (
                    jax.lax.dynamic_slice_in_dim(x, start, seen, dim) for x, dim in ((k, 2), (v, 2), (ids, 1))
                )
            return _attend(*chunk, k.astype(k_BSKC.dtype), v.astype(v_BSKC.dtype), ids, window, start)

        chunks = _split(q_BKGTC, 3, N), _split(segments.ids, 1, N), _split(position_T, 0, N)
        if seen < T:
            chunks = *chunks, (jnp.arange(N, dtype=jnp.int32) + 1) * CHUNK
        o_NBKGQC = jax.lax.map(attend, chunks)
        o_BKGTC = jnp.moveaxis(o_NBKGQC, 0, 3).reshape(B, K, H // K, N * CHUNK, C)[:, :, :, :T]
    return checkpoint_name(o_BKGTC.transpose(0, 3, 1, 2, 4).reshape(B, T, H, C), "attention")


def _split(x: jax.Array, dim: int, N: int) -> jax.Array:
    """Splits `dim` into N chunks, which become the first dim; the last is filled up with zeros."""
    x = jnp.pad(x, [(0, N * CHUNK - size if d == dim else 0) for d, size in enumerate(x.shape)])
    return jnp.moveaxis(x.reshape(*x.shape[:dim], N, CHUNK, *x.shape[dim + 1 :]), dim, 0)


def _attend(q_BKGQC, ids_BQ, position_Q, k_BKSC, v_BKSC, ids_BS, window, start=None):
    """Returns [B, K, G, Q, C]: the attention of one chunk of queries to the whole row, or, where it has a
    `start`, to a slice of it from there on."""
    B, K, G, Q, C = q_BKGQC.shape
    S = k_BKSC.shape[2]
    q_BKPC = q_BKGQC.reshape(B, K, G * Q, C)
    scores_BKPS = jnp.einsum("bkpc,bksc->bkps", q_BKPC, k_BKSC, preferred_element_type=jnp.float32)
    position_S = jnp.arange(S, dtype=jnp.int32)
    if start is not None:
        position_S += start
    allowed_BQS = (ids_BQ[:, :, None] == ids_BS[:, None, :]) & (
        position_Q[None, :, None] >= position_S[None, None, :]
    )
    if window is not None:
        allowed_BQS &= position_Q[None, :, None] - position_S[None, None, :] < window
    # Finite, because a chunk's fill may see no key at all, and the softmax of nothing but -inf is NaN.
    mask_BQS = jnp.where(allowed_BQS, 0.0, -1e30).astype(jnp.float32)
    scores_BKGQS = scores_BKPS.reshape(B, K, G, Q, S) * C**-0.5 + mask_BQS[:, None, None]
    weights_BKGQS = jax.nn.softmax(scores_BKGQS, axis=-1).astype(v_BKSC.dtype)
    weights_BKPS = weights_BKGQS.reshape(B, K, G * Q, S)
    o_BKPC = jnp.einsum("bkps,bksc->bkpc", weights_BKPS, v_BKSC, preferred_element_type=jnp.float32)
    return o_BKPC.reshape(B, K, G, Q, C).astype(q_BKGQC.dtype)
