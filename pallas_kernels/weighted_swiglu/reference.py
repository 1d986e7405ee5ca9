"""The definition, which JAX differentiates."""

import jax
import jax.numpy as jnp


def weighted_swiglu(gate_up_R2M, weights_R, sized=None) -> jax.Array:
    """Returns [R, M]; see `weighted_swiglu` of the package. sized: not asked for, all rows are made."""
    gate_RM, up_RM = jnp.unstack(gate_up_R2M.astype(jnp.float32), axis=1)
    return (jax.nn.silu(gate_RM) * up_RM * weights_R[:, None]).astype(gate_up_R2M.dtype)


def weighted_swiglu_backward(gate_up_R2M, weights_R, dy_RM, sized=None) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of both, in their dtypes, of that of the result."""
    wide = gate_up_R2M.astype(jnp.float32), weights_R
    d_gate_up_R2M, d_weights_R = jax.vjp(weighted_swiglu, *wide)[1](dy_RM.astype(jnp.float32))
    return d_gate_up_R2M.astype(gate_up_R2M.dtype), d_weights_R
