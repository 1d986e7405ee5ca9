"""AdamW on 8-bit moments over several devices, each of which updates a part of a parameter.

So kernels, which XLA's partitioner cannot split, are for several devices too.
"""

import functools
import math

import jax
from jax.sharding import PartitionSpec

from jaxthru.runtime.sharding import Axes, Layout
from pallas_kernels import adamw_8bit
from pallas_kernels.adamw_8bit import PARTITIONED, Adam, Quantised, Scalars, block_length
from pallas_kernels.dispatch import Unsupported

State = tuple[jax.Array, jax.Array, jax.Array | None, Quantised, Quantised]
"""Gradient, weight, remainder, and the first and second moment of one parameter."""


def update(
    layout: Layout | None,
    axes: Axes,
    state: State,
    key: jax.Array | None,
    scalars: Scalars,
    adam: Adam,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array | None, Quantised, Quantised]:
    """Returns what `adamw_8bit.update` does of a parameter whose dims carry these logical axes.

    layout: of several devices; None for one, and where the partitioner is to split the update. It also does
    where no dim can be split into parts of whole blocks. Each part is rounded by bits of its own.

    Raises dispatch.Unsupported there for an implementation that is named.
    """
    spec = layout and parts_of_whole_blocks(layout, axes, state[1].shape)
    if layout and spec is None:
        if implementation is not None:
            needs = f"needs a dim of {state[1].shape} that the mesh can split with whole blocks"
            refusal = Unsupported(f"adamw_8bit: {implementation}: {needs}")
            refusal.operation = "adamw_8bit"
            raise refusal
        implementation = PARTITIONED
    made = functools.partial(adamw_8bit.update, adam=adam, implementation=implementation)
    if spec is None:
        return made(*state, key, scalars)

    def local(state, key, scalars):
        for axis in () if key is None else jax.tree.leaves(tuple(spec)):
            key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        return made(*state, key, scalars)

    # A kernel is a custom call, which carries no varying-axes types to check; nothing is differentiated.
    sharded = layout.shard_map(local, (spec, PartitionSpec(), PartitionSpec()), spec, check_vma=False)
    return sharded(state, key, scalars)


def parts_of_whole_blocks(layout: Layout, axes: Axes, shape: tuple[int, ...]) -> PartitionSpec | None:
    """Returns how a parameter lies on devices of which each has whole blocks: as it is stored or, where that
    cuts blocks along the last dim, split along another dim in place of that. None if none can be."""
    *others, last = (tuple(jax.tree.leaves(entry)) for entry in layout.spec(axes))

    def devices(*names: str) -> int:
        return math.prod(layout.mesh.shape[name] for name in names)

    size = shape[-1]
    if size % devices(*last) == 0 and block_length(size // devices(*last)) == block_length(size):
        return layout.spec(axes)
    for dim, names in enumerate(others):
        if shape[dim] % devices(*names, *last) == 0:
            return PartitionSpec(*others[:dim], names + last, *others[dim + 1 :], None)
    return None
