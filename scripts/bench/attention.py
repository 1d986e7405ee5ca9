"""Times attention's GPU implementations, forward and backward, on causal rows and on packed documents.

    python scripts/bench/attention.py [--shape llama3_8b] [--seconds 1] [--sweep] [--output FILE]

Implementations take turns, three rounds; the median counts. A shape with a window is timed without it too.
--sweep times other tiles of the Triton kernels.

Why there is a Triton implementation: cuDNN's packed backward pass first clears a workspace of (segments of
all rows) × T × heads × head_dim × 8 bytes, 17.2 GB at 2 rows × 32 segments × 8,192 tokens × 32 heads × 128.
Measured on an H200 in the training step (per layer, 12 documents a row): clearing 4.06 ms, gradient kernels
2.6 ms; the plain causal backward pass takes 6.2 ms, so that packed rows saved nothing. Predicted for kernels
without a workspace, at 13.4 % of the causal products (7 products in place of cuDNN's 5, two thirds of its
rate): about 2 ms backward, 0.6 ms forward.
"""

import argparse
import functools
import itertools
import statistics
import sys
import time
from pathlib import Path

import harness
import jax
import jax.numpy as jnp
import numpy as np

from jaxthru.runtime import xla
from pallas_kernels.attention import attention, cudnn_packed, find_segments, triton
from pallas_kernels.attention.shapes import GPU
from pallas_kernels.testing import normal, segment_ids

TILES = {
    "forward": [(128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3)],
    "backward_q": [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2)],
    "backward_kv": [(64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 1)],
}  # fmt: skip
"""Kernel -> what to try."""
NAMES = ("BQ", "BK", "num_warps", "num_stages")


def seconds_of(run, arguments, seconds: float) -> float:
    """Returns the mean time of a call, calls following each other for so long."""
    jax.block_until_ready(run(*arguments))
    began, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        for _ in range(10):
            out = run(*arguments)
        jax.block_until_ready(out)
        calls += 10
    return spent / calls


def inputs(shape, layout: str, segments: int, window: int | None = None):
    """Returns the arguments, and which share of a causal row's products their documents and window need."""
    rng = np.random.default_rng(0)
    B, T, H, K, C = shape.rows, shape.sequence, shape.heads, shape.kv_heads, shape.head_dim
    q, do = (normal(rng, (B, T, H, C), jnp.bfloat16) for _ in range(2))
    k, v = (normal(rng, (B, T, K, C), jnp.bfloat16) for _ in range(2))
    ids = segment_ids(rng, B, T, layout)
    lengths = [np.bincount(row) for row in ids]
    seen = [np.minimum(x, window or T) * (2.0 * x - np.minimum(x, window or T)) for x in lengths]
    share = sum(float(x.sum()) for x in seen) / (B * T * T)
    return (q, k, v, do, jax.jit(find_segments, static_argnums=1)(jnp.asarray(ids), segments)), share


def passes(implementation: str, window: int | None):
    """Returns the jitted forward pass, and forward and backward."""
    function = functools.partial(attention, implementation=implementation, window=window)

    def both(q, k, v, do, segments):
        o, pullback = jax.vjp(lambda q, k, v: function(q, k, v, segments), q, k, v)
        return o, pullback(do)

    return {"forward": jax.jit(lambda q, k, v, do, s: function(q, k, v, s)), "both": jax.jit(both)}


def compare(shape, seconds: float) -> list[dict]:
    layouts = {"causal": ("one_document", 1), "documents": ("documents", 32)}
    rows, contenders = [], []
    packed = shape.head_dim <= cudnn_packed.MAX_HEAD_DIM
    implementations = ("cudnn_packed", "triton") if packed else ("triton",)
    windows = dict.fromkeys((None, shape.window))
    for (name, (layout, segments)), window in itertools.product(layouts.items(), windows):
        arguments, share = inputs(shape, layout, segments, window)
        for implementation in implementations:
            row = {"rows": name, "implementation": implementation, "share_of_causal": round(share, 4)}
            row |= {} if window is None else {"window": window}
            rows.append(row)
            contenders += [
                (row, part, run, arguments) for part, run in passes(implementation, window).items()
            ]
    taken = {}
    for _, (i, (_, _, run, arguments)) in itertools.product(range(3), enumerate(contenders)):
        taken.setdefault(i, []).append(seconds_of(run, arguments, seconds))
    for i, (row, part, _, _) in enumerate(contenders):
        row[f"{part}_ms"] = round(statistics.median(taken[i]) * 1e3, 3)
    return rows


def sweep(shape, seconds: float) -> list[dict]:
    chosen, best = triton.tiles, triton.tiles(shape.head_dim)
    rows = []
    for layout, (kernel, tiles) in itertools.product(("one_document", "documents"), TILES.items()):
        (q, k, v, do, segments), _ = inputs(shape, layout, 32)
        for tile in tiles:
            tried = best | {kernel: dict(zip(NAMES, tile, strict=True))}
            triton.tiles = lambda head_dim, tried=tried: tried
            try:
                if kernel == "forward":
                    run = jax.jit(lambda *x: triton._forward(*x, shape.window)[0])
                    spent = seconds_of(run, (q, k, v, segments), seconds)
                else:
                    residuals = jax.jit(lambda *x: triton._forward(*x, shape.window)[1])(q, k, v, segments)
                    part = 0 if kernel == "backward_q" else slice(1, 3)
                    run = jax.jit(lambda r, do, part=part: triton._backward(shape.window, r, do)[part])
                    spent = seconds_of(run, (residuals, do), seconds)
            except Exception as error:  # a tile that needs more than the GPU has
                print(layout, kernel, tile, "failed:", str(error).splitlines()[0][:120], flush=True)
                continue
            rows.append({"rows": layout, "kernel": kernel, "tile": tile, "ms": round(spent * 1e3, 3)})
            print(rows[-1], flush=True)
    triton.tiles = chosen
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama3_8b", choices=GPU)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    xla.configure()
    result = {
        "benchmark": "attention",
        "shape": arguments.shape,
        "results": (sweep if arguments.sweep else compare)(GPU[arguments.shape], arguments.seconds),
        **harness.provenance(),
    }
    harness.emit(result, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
