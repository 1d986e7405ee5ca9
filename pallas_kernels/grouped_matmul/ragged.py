"""XLA's ragged dot, for TPUs alone: elsewhere XLA makes of it one dense product of all groups."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import require_tpu

TURNED = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
OUTER = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def grouped_matmul(x_RI, w, sizes_E, *, transposed: bool, platform: str) -> jax.Array:
    """Returns [R, O]; see `grouped_matmul` of the package. Raises Unsupported off a TPU."""
    require_tpu(platform)
    return product(x_RI, w, sizes_E, transposed)


def grouped_outer(x_RI, y_RO, sizes_E, into, *, dtype, platform: str) -> jax.Array:
    """Returns [E, I, O]; see `grouped_outer` of the package. Raises Unsupported off a TPU."""
    require_tpu(platform)
    return outer(x_RI, y_RO, sizes_E, into, dtype)


def product(x_RI, w, sizes_E, transposed: bool) -> jax.Array:
    """Returns [R, O], wherever it runs."""
    of = {"preferred_element_type": jnp.float32}
    if transposed:
        return jax.lax.ragged_dot_general(x_RI, w, sizes_E, TURNED, **of).astype(x_RI.dtype)
    return jax.lax.ragged_dot(x_RI, w, sizes_E, **of).astype(x_RI.dtype)


def outer(x_RI, y_RO, sizes_E, into, dtype) -> jax.Array:
    """Returns [E, I, O], wherever it runs. Rows behind the last group are made zeros: 0 × NaN is NaN."""
    own_R1 = (jnp.arange(len(x_RI), dtype=jnp.int32) < jnp.sum(sizes_E))[:, None]
    x_RI, y_RO = (jnp.where(own_R1, a, 0) for a in (x_RI, y_RO))
    sums = jax.lax.ragged_dot_general(x_RI, y_RO, sizes_E, OUTER, preferred_element_type=jnp.float32)
    return (sums if into is None else into + sums).astype(dtype)
