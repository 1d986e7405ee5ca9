"""Written out, forward and backward, for XLA to fuse into a pass or two and to partition."""

import jax
import jax.numpy as jnp


def weighted_swiglu(gate_up_R2M, weights_R, sized=None) -> jax.Array:
    """Returns [R, M]; see `weighted_swiglu` of the package. sized: not asked for, all rows are made."""
    gate_RM, up_RM = jnp.unstack(gate_up_R2M.astype(jnp.float32), axis=1)
    return (gate_RM * jax.nn.sigmoid(gate_RM) * up_RM * weights_R[:, None]).astype(gate_up_R2M.dtype)


def weighted_swiglu_backward(gate_up_R2M, weights_R, dy_RM, sized=None) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of both, in their dtypes, of that of the result."""
    gate_RM, up_RM = jnp.unstack(gate_up_R2M.astype(jnp.float32), axis=1)
    dy_RM = dy_RM.astype(jnp.float32)
    open_RM = jax.nn.sigmoid(gate_RM)
    silu_RM = gate_RM * open_RM
    d_weights_R = jnp.sum(dy_RM * silu_RM * up_RM, axis=1)
    d_hidden_RM = dy_RM * weights_R[:, None]
    d_gate_RM = d_hidden_RM * up_RM * (open_RM + silu_RM * (1 - open_RM))
    d_gate_up_R2M = jnp.stack([d_gate_RM, d_hidden_RM * silu_RM], axis=1)
    return d_gate_up_R2M.astype(gate_up_R2M.dtype), d_weights_R
