"""AdamW on 8-bit moments over several devices, each of which updates what it has of a parameter.

So kernels, which XLA's partitioner cannot split, are for several devices too.
"""

import functools

import jax
from jax.sharding import PartitionSpec

from jaxthru.runtime.sharding import Axes, Layout
from pallas_kernels import adamw_8bit
from pallas_kernels.adamw_8bit import PARTITIONED, Adam, Quantised, Scalars, block_length


def update(
    layout: Layout | None,
    axes: Axes,
    implementation: str | None,
    gradient: jax.Array,
    weight: jax.Array,
    remainder: jax.Array | None,
    mu: Quantised,
    nu: Quantised,
    key: jax.Array | None,
    scalars: Scalars,
    adam: Adam,
) -> tuple[jax.Array, jax.Array | None, Quantised, Quantised]:
    """Returns what `adamw_8bit.update` does of a parameter whose dims carry these logical axes.

    layout: of several devices; None for one, and where the partitioner is to split the update, as it does
    where a block lies on more than one device. Each device's part is rounded by bits of its own.
    """
    if layout is not None and not _has_whole_blocks(layout, axes, weight.shape[-1]):
        layout, implementation = None, PARTITIONED
    made = functools.partial(adamw_8bit.update, adam=adam, implementation=implementation)
    state = gradient, weight, remainder, mu, nu
    if layout is None:
        return made(*state, key, scalars)
    spec = layout.spec(axes)

    def local(state, key, scalars):
        for axis in () if key is None else jax.tree.leaves(tuple(spec)):
            key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        return made(*state, key, scalars)

    # A kernel is a custom call, which carries no varying-axes types to check; nothing is differentiated.
    sharded = layout.shard_map(local, (spec, PartitionSpec(), PartitionSpec()), spec, check_vma=False)
    return sharded(state, key, scalars)


def _has_whole_blocks(layout: Layout, axes: Axes, last: int) -> bool:
    """Says whether each device has whole blocks of a parameter whose last dim is so long."""
    along = layout.spec(axes)[-1]
    devices = layout.size(axes[-1]) if along else 1
    return last % devices == 0 and block_length(last // devices) == block_length(last)
