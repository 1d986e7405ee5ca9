"""A matmul that sums over any one dim of each of its two matrices, without a transpose."""

import jax


def dot(a, b, a_dim: int, b_dim: int, dtype=None) -> jax.Array:
    """Returns the product of two matrices over one dim of each, of the given dtype or else of theirs."""
    return jax.lax.dot_general(a, b, (((a_dim,), (b_dim,)), ((), ())), preferred_element_type=dtype)
