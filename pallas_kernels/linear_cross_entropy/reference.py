"""Linear cross-entropy as its definition reads: all logits, in float32.

Shapes: B rows, T tokens, D embed, V vocabulary.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Unsupported


def linear_cross_entropy(
    hidden_BTD, matrix, targets_BT, weights_BT, *, z_loss, layout, axis_name, weighted_only, chunk_bytes
):
    """Returns (objective, losses [B, T], log(Z) [B, T]); see `linear_cross_entropy` of the package. All
    tokens are one chunk.

    Raises:
      Unsupported: the vocabulary is split over devices.
    """
    if axis_name is not None:
        raise Unsupported("needs the whole vocabulary on one device")
    hidden_BTD, matrix = hidden_BTD.astype(jnp.float32), matrix.astype(jnp.float32)
    # The highest precision, because GPUs and TPUs by default multiply float32 matrices in fewer bits.
    equation = f"btd,{layout.lower()}->btv"
    logits_BTV = jnp.einsum(equation, hidden_BTD, matrix, precision="highest")
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    chosen_BTV = jax.nn.one_hot(targets_BT, logits_BTV.shape[-1], dtype=jnp.float32)
    losses_BT = log_z_BT - jnp.sum(jnp.where(chosen_BTV > 0, logits_BTV, 0.0), axis=-1)
    if weighted_only:
        losses_BT, log_z_BT = (jnp.where(weights_BT != 0, x, 0.0) for x in (losses_BT, log_z_BT))
    objective = jnp.sum(weights_BT * (losses_BT + z_loss * jnp.square(log_z_BT)))
    return objective, losses_BT, log_z_BT
