"""Stand-ins for the kernels of grouped matmuls, compiled but never run, to plan memory without their GPU.

A call of the same operands and result stands in a kernel's place, which works in no memory of its own.
"""

import jax
import jax.numpy as jnp


def grouped_matmul(x_RI, w, sizes_E, *, transposed: bool) -> jax.Array:
    """Returns [R, O] in a kernel's place; a program that runs it fails."""
    return _product((x_RI, w, sizes_E), w.shape[1 if transposed else 2], x_RI.dtype)


def grouped_matmul_float8(x8_RI, w8_EOI, scales_E, sizes_E, *, dtype) -> jax.Array:
    """Returns [R, O], see `grouped_matmul`."""
    return _product((x8_RI, w8_EOI, scales_E, sizes_E), w8_EOI.shape[1], dtype)


def _product(operands: tuple[jax.Array, ...], columns: int, dtype) -> jax.Array:
    y_RO = jax.ShapeDtypeStruct((len(operands[0]), columns), jnp.dtype(dtype))
    call = jax.ffi.ffi_call("jaxthru_stand_in_grouped_matmul", y_RO, vmap_method="sequential")
    return call(*operands)


def grouped_outer(x_RI, y_RO, sizes_E, into, *, dtype) -> jax.Array:
    """Returns [E, I, O], see `grouped_matmul`; in the memory of `into`, if there is one."""
    sums_EIO = jax.ShapeDtypeStruct((len(sizes_E), x_RI.shape[1], y_RO.shape[1]), jnp.dtype(dtype))
    arrays, aliases = (x_RI, y_RO, sizes_E), {}
    if into is not None:
        arrays, aliases = (*arrays, into), {3: 0}
    call = jax.ffi.ffi_call(
        "jaxthru_stand_in_grouped_outer", sums_EIO, vmap_method="sequential", input_output_aliases=aliases
    )
    return call(*arrays)
