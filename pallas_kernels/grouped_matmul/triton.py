"""Grouped matmuls by Triton kernels: for NVIDIA's GPUs from compute capability 8.0, and for AMD's.

A table of tiles, made on the device from the sizes, says which rows of which group a program takes; there are
as many programs as there can be tiles, and those without one end at once. So nothing waits for the host.
A weight's gradient is summed by one program a tile of it, over the group's rows in order: no atomics, and
results repeat to the bit.

What to expect on an H200 of Qwen3-30B's up map, 131,072 rows of 2,048 to 1,536 over 128 experts: 825 GFLOP,
1.2 ms at the 690 TFLOP/s that cuBLAS sustains there; x, w and y are 1.74 GB, 0.42 ms. So matrix units bind
from about 200 rows a group on. Loads by pointers have reached about 470 of those 690 in kernels of this kind,
1.75 ms; the outer product, of equal FLOPs, writes 0.8 GB in bfloat16 and the like takes as long.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import nvidia_compute_capability, on_nvidia, require_gpu
from pallas_kernels.grouped_matmul.tiles import most, tiles_of
from pallas_kernels.grouped_matmul.triton_tiles import Problem, Tile, choose
from pallas_kernels.triton_loading import load_triton
from pallas_kernels.varying import vary_alike

MIN_CAPABILITY = (8, 0)


def grouped_matmul(x_RI, w, sizes_E, *, transposed: bool, platform: str, tile: Tile | None = None):
    """Returns [R, O]; see `grouped_matmul` of the package.

    tile: to measure one; by default what `triton_tiles` chooses.

    Raises Unsupported: no GPU, or NVIDIA's before compute capability 8.0; or jax-triton is not installed.
    """
    require_gpu(platform, MIN_CAPABILITY)
    jax_triton, kernels = load_triton(__package__)
    (R, I), E, O = x_RI.shape, len(w), w.shape[1 if transposed else 2]  # noqa: E741
    operation = "transposed" if transposed else "matmul"
    tile = tile or tile_of(Problem(operation, R, E, I, O, str(x_RI.dtype)))
    tiles, P = tiles_of(sizes_E, R, tile.m), most(R, E, tile.m)
    y_RO = jax_triton.triton_call(
        x_RI,
        w,
        tiles.group_P,
        tiles.first_P,
        tiles.end_P,
        kernel=kernels.grouped_matmul,
        out_shape=jax.ShapeDtypeStruct((R, O), x_RI.dtype),
        grid=P * -(-O // tile.n),
        I=I,
        O=O,
        E=E,
        P=P,
        TRANSPOSED=transposed,
        BR=tile.m,
        BO=tile.n,
        BI=tile.k,
        BAND=tile.band,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    # A custom call's output carries no varying axes: it has the rows'.
    return vary_alike(y_RO, x_RI)[0]


def grouped_outer(x_RI, y_RO, sizes_E, into, *, dtype, platform: str, tile: Tile | None = None) -> jax.Array:
    """Returns [E, I, O]; see `grouped_outer` of the package. `into` is added to in its own memory. Raises
    Unsupported as `grouped_matmul`."""
    require_gpu(platform, MIN_CAPABILITY)
    jax_triton, kernels = load_triton(__package__)
    (R, I), O, E = x_RI.shape, y_RO.shape[1], len(sizes_E)  # noqa: E741
    tile = tile or tile_of(Problem("outer", R, E, I, O, str(x_RI.dtype)))
    sums_EIO = jax_triton.triton_call(
        x_RI,
        y_RO,
        jnp.cumsum(sizes_E) - sizes_E,
        sizes_E,
        x_RI if into is None else into,  # where there is none nothing reads it
        kernel=kernels.grouped_outer,
        out_shape=jax.ShapeDtypeStruct((E, I, O), dtype),
        grid=E * -(-I // tile.m) * -(-O // tile.n),
        **({} if into is None else {"input_output_aliases": {4: 0}}),
        ADDED=into is not None,
        I=I,
        O=O,
        BI=tile.m,
        BO=tile.n,
        BR=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return vary_alike(sums_EIO, x_RI)[0]


def tile_of(problem: Problem) -> Tile:
    """Returns the tile for the GPU of this process; where there is none, for an H200's kind."""
    if jax.default_backend() != "gpu":
        return choose(problem, None, (9, 0))
    capability = nvidia_compute_capability() if on_nvidia() else None
    return choose(problem, jax.local_devices()[0].device_kind, capability)
