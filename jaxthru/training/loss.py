"""Next-token cross-entropy, without ever holding the logits of a whole batch.

Shapes: B rows, T tokens, D embed, V vocabulary.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

CHUNK_BYTES = 1 << 30


def chunk_count(rows: int, sequence: int, vocabulary: int) -> int:
    """Returns in how many chunks along the sequence the float32 logits of `rows` rows fit CHUNK_BYTES each.

    A power of two, so that it divides the usual sequences, and at least 2.
    """
    needed = rows * sequence * vocabulary * 4 / CHUNK_BYTES
    return min(max(2, 1 << math.ceil(math.log2(needed))) if needed > 1 else 2, sequence)


def token_losses(
    hidden_BTD: jax.Array,
    matrix_DV: jax.Array,
    targets_BT: jax.Array,
    *,
    chunks: int,
    constrain: Callable[..., jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Returns each token's cross-entropy and log(Z), where Z is the softmax's sum: two float32 [B, T].

    Tokens go through in chunks along T; a chunk's logits are made again in the backward pass. The matrix's
    gradient is summed over chunks in float32, whatever the compute dtype.
    chunks: how many; the last is filled up. constrain: lays out an array by its logical axes.
    """
    rows, sequence = targets_BT.shape
    length = -(-sequence // chunks)

    def split(x_BT):
        filled = jnp.pad(x_BT, [(0, 0), (0, chunks * length - sequence)] + [(0, 0)] * (x_BT.ndim - 2))
        return jnp.moveaxis(filled.reshape(rows, chunks, length, *x_BT.shape[2:]), 1, 0)

    hidden_PBCD, targets_PBC = split(hidden_BTD), split(targets_BT)
    matrix32_DV = matrix_DV.astype(jnp.float32)

    @jax.checkpoint
    def one_chunk(hidden_BCD, targets_BC):
        logits_BCV = jnp.einsum("bcd,dv->bcv", hidden_BCD, matrix32_DV.astype(matrix_DV.dtype))
        logits_BCV = constrain(logits_BCV, "batch", "sequence", "vocab").astype(jnp.float32)
        log_z_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
        # A masked sum rather than a gather: it stays local when the vocabulary is sharded.
        chosen = jax.lax.broadcasted_iota(jnp.int32, logits_BCV.shape, 2) == targets_BC[..., None]
        target_BC = jnp.sum(jnp.where(chosen, logits_BCV, 0.0), axis=-1)
        return log_z_BC - target_BC, log_z_BC

    _, by_part = jax.lax.scan(lambda _, part: (None, one_chunk(*part)), None, (hidden_PBCD, targets_PBC))
    return jax.tree.map(
        lambda x_PBC: constrain(
            jnp.moveaxis(x_PBC, 0, 1).reshape(rows, -1)[:, :sequence], "batch", "sequence"
        ),
        by_part,
    )
