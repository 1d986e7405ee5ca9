"""An all-gather and its reduce-scatter made of permutes, which GPUs of one process carry out by copying.

NCCL's kernels hold streaming multiprocessors, 24 of an H200's 132, while they move data and while they wait
for another device, and the matmuls that they run beside have so much less. A permute in XLA's peer mode
(`runtime.xla.COPIED_PERMUTES`) is a copy from one device's memory to another's, put in order by events: copy
engines do it, and nothing else waits. What it costs is a pass over memory, where parts are put together and
where they are added up.

Source: `RunPeerAccessPermute` in XLA (xla/backends/gpu/runtime/collective_permute_thunk.cc).
"""

import functools

import jax
import jax.numpy as jnp

AxisName = str | tuple[str, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather(shard: jax.Array, axis_name: AxisName, dim: int) -> jax.Array:
    """Returns the shards of all devices along a mesh axis, one behind the other along `dim`.

    As `jax.lax.all_gather(..., tiled=True)`, within a `jax.shard_map`. The gradient is scattered as
    `jax.lax.psum_scatter` would, but added up in float32 and rounded once.
    """
    shards, index = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    # The k-th is of the k-th device after this one. In two rounds of them is one from the first device on.
    from_here = [shard, *(moved(shard, axis_name, -k) for k in range(1, shards))]
    rounds = jnp.concatenate(from_here + from_here[:-1], axis=dim)
    size = shard.shape[dim]
    return jax.lax.dynamic_slice_in_dim(rounds, (shards - index) % shards * size, shards * size, dim)


def _scattered(axis_name: AxisName, dim: int, _, gradient: jax.Array) -> tuple[jax.Array]:
    shards, index = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    size = gradient.shape[dim] // shards

    def of_device_after(k: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(gradient, (index + k) % shards * size, size, dim)

    parts = [of_device_after(0), *(moved(of_device_after(k), axis_name, k) for k in range(1, shards))]
    return (sum(part.astype(jnp.float32) for part in parts).astype(gradient.dtype),)


def moved(x: jax.Array, axis_name: AxisName, by: int) -> jax.Array:
    """Returns what the device so many places before this one along a mesh axis, or several, has as `x`,
    within a `jax.shard_map`."""
    shards = jax.lax.axis_size(axis_name)
    return jax.lax.ppermute(x, axis_name, [(device, (device + by) % shards) for device in range(shards)])


all_gather.defvjp(lambda shard, axis_name, dim: (all_gather(shard, axis_name, dim), None), _scattered)
