"""Attention as its definition reads: one dense mask, a float32 softmax, [B, H, T, T] scores in memory.

Shapes: B rows, T queries, S keys (as many), H query heads, K key heads, G = H / K query heads to a key head,
C width of a head.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention.segments import Segments


def attention(
    q_BTHC: jax.Array,
    k_BSKC: jax.Array,
    v_BSKC: jax.Array,
    segments: Segments,
    *,
    window: int | None = None,
) -> jax.Array:
    """Returns [B, T, H, C] of q's dtype, computed in float32; see `pallas_kernels.attention.attention`."""
    B, T, H, C = q_BTHC.shape
    K = k_BSKC.shape[2]
    q_BTKGC = q_BTHC.reshape(B, T, K, H // K, C).astype(jnp.float32)
    k_BSKC, v_BSKC = k_BSKC.astype(jnp.float32), v_BSKC.astype(jnp.float32)
    # The highest precision, because GPUs and TPUs by default multiply float32 matrices in fewer bits.
    scores_BKGTS = jnp.einsum("btkgc,bskc->bkgts", q_BTKGC, k_BSKC, precision="highest") * C**-0.5
    position_T = jnp.arange(T, dtype=jnp.int32)
    causal_TS = position_T[:, None] >= position_T[None, :]
    allowed_BTS = (segments.ids[:, :, None] == segments.ids[:, None, :]) & causal_TS[None]
    if window is not None:
        allowed_BTS &= (position_T[:, None] - position_T[None, :] < window)[None]
    weights_BKGTS = jax.nn.softmax(jnp.where(allowed_BTS[:, None, None], scores_BKGTS, -jnp.inf), axis=-1)
    o_BTKGC = jnp.einsum("bkgts,bskc->btkgc", weights_BKGTS, v_BSKC, precision="highest")
    return checkpoint_name(o_BTKGC.reshape(B, T, H, C).astype(q_BTHC.dtype), "attention")
