"""`mosaic_gpu` with the sums of a scatter made in the result's memory, where TMA adds each shard's tiles.

Tiles are added in whatever order they come.

The owner has no buffer for what peers send, and does not read it again; its result begins as zeros instead.
Tiles that leave still wait in a buffer of the shard that computed them. With two shards `mosaic_gpu` adds up
alike, but needs no zeros. With more this is less exact, for each addition rounds to bfloat16, and results may
differ from run to run in their last bits, as the order of additions does.

What gathers sums up nothing, and is that of `mosaic_gpu`.
"""

import functools

from pallas_kernels.collective_matmul import mosaic_gpu
from pallas_kernels.collective_matmul.mosaic_gpu import all_gather_matmul, matmul_reduce_scatter_backward

__all__ = [
    "all_gather_matmul",
    "all_gather_matmul_backward",
    "matmul_reduce_scatter",
    "matmul_reduce_scatter_backward",
]

all_gather_matmul_backward = functools.partial(mosaic_gpu.all_gather_matmul_backward, adds=True)
matmul_reduce_scatter = functools.partial(mosaic_gpu.matmul_reduce_scatter, adds=True)
