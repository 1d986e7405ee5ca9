"""The update that is compiled and never run: what the Triton kernel takes and leaves, for a machine without
the GPU that the kernel is lowered for."""

import jax

STAND_IN = "triton_stand_in"


def update(gradient, weight, remainder, mu, nu, key, scalars, adam):
    """Returns (weight, remainder, mu, nu) in the memory of the old ones; a program that runs it fails."""
    updated, structure = jax.tree.flatten((weight, remainder, mu, nu))
    results = jax.ffi.ffi_call(
        "jaxthru_stand_in_adamw_8bit",
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in updated],
        input_output_aliases={index: index for index in range(len(updated))},
        vmap_method="sequential",
    )(*updated, gradient, *scalars)
    return jax.tree.unflatten(structure, results)
