"""Stand-ins for the kernels of the experts' SwiGLU, compiled but never run, to plan memory without a GPU."""

import jax
import jax.numpy as jnp


def weighted_swiglu(gate_up_R2M, weights_R) -> jax.Array:
    """Returns [R, M] in a kernel's place; a program that runs it fails."""
    R, _, M = gate_up_R2M.shape
    return _call("forward", jax.ShapeDtypeStruct((R, M), gate_up_R2M.dtype), gate_up_R2M, weights_R)


def weighted_swiglu_backward(gate_up_R2M, weights_R, dy_RM) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of both, see `weighted_swiglu`."""
    of_gate_up = jax.ShapeDtypeStruct(gate_up_R2M.shape, gate_up_R2M.dtype)
    of_weights = jax.ShapeDtypeStruct(weights_R.shape, jnp.float32)
    return tuple(_call("backward", (of_gate_up, of_weights), gate_up_R2M, weights_R, dy_RM))


def _call(name: str, outputs, *arrays):
    call = jax.ffi.ffi_call(f"jaxthru_stand_in_weighted_swiglu_{name}", outputs, vmap_method="sequential")
    return call(*arrays)
