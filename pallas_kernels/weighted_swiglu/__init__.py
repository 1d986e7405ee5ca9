"""SwiGLU of experts with the router's weight in it, before the down map: silu(gate) · up · weight.

Shapes: R rows, M width of an expert. Scaling a row here is scaling what the down map makes of it, and one
pass less over wider rows; its gradient of the weights needs nothing that the down map has made.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Operation, triton_before_xla
from pallas_kernels.varying import vary_alike
from pallas_kernels.weighted_swiglu import stand_in

__all__ = ["OPERATION", "STAND_IN", "weighted_swiglu"]

OPERATION = Operation(
    __name__,
    {
        "triton": Implementation(takes=("platform",)),
        "xla": Implementation(),
        "reference": Implementation(),
    },
    triton_before_xla,
)

STAND_IN = "stand_in"
"""What takes the place of kernels in a plan without their GPU."""


def weighted_swiglu(
    gate_up_R2M: jax.Array,
    weights_R: jax.Array,
    sizes_E: jax.Array | None = None,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Returns silu(gate) · up · weight of each row, [R, M] of the rows' dtype; the arithmetic is float32.

    Arrays are taken as they lie on one device: on a mesh, call it within `jax.shard_map`. Each row depends on
    itself alone, so that rows which belong to no expert may hold anything. Differentiable in both; the
    weights' gradient is float32.

    Args:
      gate_up_R2M: [R, 2, M], gates and then ups, of a float dtype.
      weights_R: [R] float32; see `routing.dispatch_weights`.
      sizes_E: [E] int32, rows of each group, as for `grouped_matmul`: rows behind the last group may be left
        out, and then are anything in the result and in both gradients. None: all rows count.
      implementation: one of `OPERATION.names`; None takes the first that can run.
      platform: "cpu", "gpu" or "tpu", where it will run; None is JAX's default backend.

    Raises:
      ValueError: shapes or dtypes do not fit, or no implementation has the name.
      dispatch.Unsupported: the named implementation refuses.

    Source: Shazeer 2020 (arXiv:2002.05202).
    """
    if gate_up_R2M.ndim != 3 or gate_up_R2M.shape[1] != 2 or weights_R.shape != gate_up_R2M.shape[:1]:
        raise ValueError(
            f"weighted_swiglu: shapes do not fit: gate and up [R, 2, M] {gate_up_R2M.shape}, weights [R] "
            f"{weights_R.shape}"
        )
    if not jnp.issubdtype(gate_up_R2M.dtype, jnp.floating) or weights_R.dtype != jnp.float32:
        raise ValueError(
            f"weighted_swiglu: gate and up are of a float dtype and weights float32, got "
            f"{gate_up_R2M.dtype} and {weights_R.dtype}"
        )
    sized = None if sizes_E is None else jnp.sum(sizes_E, keepdims=True)
    arrays = vary_alike(*(x for x in (gate_up_R2M, weights_R, sized) if x is not None))
    return _swiglu(*arrays[:2], arrays[2] if sizes_E is not None else None, implementation, platform)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _swiglu(gate_up_R2M, weights_R, sized, implementation, platform):
    if implementation == STAND_IN:
        return stand_in.weighted_swiglu(gate_up_R2M, weights_R)
    how = {"implementation": implementation, "platform": platform}
    return OPERATION.run(gate_up_R2M, weights_R, sized, **how)


def _forward(gate_up_R2M, weights_R, sized, implementation, platform):
    y_RM = _swiglu(gate_up_R2M, weights_R, sized, implementation, platform)
    return y_RM, (gate_up_R2M, weights_R, sized)


def _backward(implementation, platform, kept, dy_RM):
    gate_up_R2M, weights_R, sized = kept
    if implementation == STAND_IN:
        return *stand_in.weighted_swiglu_backward(gate_up_R2M, weights_R, dy_RM), None
    how = {"implementation": implementation, "platform": platform, "function": "weighted_swiglu_backward"}
    return *OPERATION.run(gate_up_R2M, weights_R, dy_RM, sized, **how), None


_swiglu.defvjp(_forward, _backward)
