"""The plain update slab by slab, in place: only one slab exists in float32.

The reference leaves it to XLA what to hold of its float32 intermediates, each as large as the parameter, and
for how many parameters at once: for a layer of 485 M parameters 1.0 GiB when compiled without a GPU, 12.6 on
an H200. A loop's body has memory of its own, which each turn uses again; and much of a slab's intermediates
stays in the GPU's cache between kernels.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.adamw_8bit import reference

SLAB = 1 << 22
"""Most entries of a slab: 16 MiB in float32. Three such are written and read again, about as much as an
H200's cache holds (50 MB). In smaller ones the kernels, eight a slab, would wait for being launched."""


def update(gradient, weight, remainder, mu, nu, key, scalars, adam, slab: int = SLAB):
    """Returns (weight, remainder, mu, nu); see `update` of the package. slab: most entries of one."""
    if gradient.size <= slab:
        return reference.update(gradient, weight, remainder, mu, nu, key, scalars, adam)
    in_rows = lambda array: array.reshape(-1, array.shape[-1])  # noqa: E731
    gradient_RD, state = in_rows(gradient), jax.tree.map(in_rows, (weight, remainder, mu, nu))
    rows = gradient_RD.shape[0]
    height = max(rows // -(-gradient.size // slab), 1)

    def one(state, start, height):
        part = lambda array: jax.lax.dynamic_slice_in_dim(array, start, height)  # noqa: E731
        by = None if key is None else jax.random.fold_in(key, start)
        new = reference.update(part(gradient_RD), *jax.tree.map(part, state), by, scalars, adam)
        put = lambda array, part: jax.lax.dynamic_update_slice_in_dim(array, part, start, 0)  # noqa: E731
        return jax.tree.map(put, state, new)

    turns, left = divmod(rows, height)
    state = jax.lax.fori_loop(0, turns, lambda turn, state: one(state, turn * height, height), state)
    if left:
        state = one(state, jnp.int32(rows - left), left)
    return jax.tree.map(lambda array, like: array.reshape(like.shape), state, (weight, remainder, mu, nu))
