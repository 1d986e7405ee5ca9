"""Placement of a batch: which rows of it a process builds, and how they become one sharded global batch."""

import numpy as np

from jaxthru.runtime.errors import require


def local_rows(sharding, rows: int, sequence: int) -> slice:
    """Returns the rows of a [rows, sequence] batch that this process's devices need: one range.

    sharding: a jax.sharding.Sharding. Raises InputError when the rows are not contiguous.
    """
    indices = sharding.addressable_devices_indices_map((rows, sequence)).values()
    ranges = sorted({index[0].indices(rows)[:2] for index in indices})
    reached = ranges[0][0]
    for first, stop in ranges:
        require(first <= reached, f"the mesh gives this process rows up to {reached} and again from {first}")
        reached = max(reached, stop)
    return slice(ranges[0][0], reached)


def to_global(batch: dict[str, np.ndarray], sharding, rows: int) -> dict:
    """Returns the batch as jax.Arrays of [rows, sequence], from the rows that this process has built."""
    import jax

    from jaxthru.runtime.first_run import COPIES

    shapes = {name: (rows, array.shape[1]) for name, array in batch.items()}
    with COPIES:  # batches ahead are placed by a thread of their own
        # All at once, which in one process costs a third of one by one.
        return jax.make_array_from_process_local_data(sharding, batch, shapes)
