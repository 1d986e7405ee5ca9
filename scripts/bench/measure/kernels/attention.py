"""Attention's implementations, forward and backward, on causal rows and on packed documents.

"all" is Llama 3 8B's shape in both kinds of rows, "llama3_2_1b" that model's in rows of 2,048 and of 32,768;
a shape with a window is timed without it too.

Why there is a Triton implementation: cuDNN's packed backward pass first clears a workspace of (segments of
all rows) × T × heads × head_dim × 8 bytes, 17.2 GB at 2 rows × 32 segments × 8,192 tokens × 32 heads × 128.
Measured on an H200 in the training step (per layer, 12 documents a row): clearing 4.06 ms, gradient kernels
2.6 ms; the plain causal backward pass takes 6.2 ms, so that packed rows saved nothing. Predicted for kernels
without a workspace, at 13.4 % of the causal products (7 products in place of cuDNN's 5, two thirds of its
rate): about 2 ms backward, 0.6 ms forward.

Predicted since gradients of keys and values are made in one loop, from kernels timed alone
(docs/lab/kernels.md): for both passes 9 to 12 % less than at commit 11ecf7cf at llama3_2_1b, and 5 to 12 % at
llama3_8b.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from measure.workload import Pace, Passes, Workload, on

from pallas_kernels.attention import attention, cudnn_packed, find_segments, triton
from pallas_kernels.attention.shapes import CPU, GPU, Shape
from pallas_kernels.testing import segment_ids

WITHOUT = "_without_window"
PLAIN = {name + WITHOUT: dataclasses.replace(of, window=None) for name, of in GPU.items() if of.window}
LLAMA_1B = {
    "llama3_2_1b_2k": Shape(16, 2048, 32, 8, 64, "documents", 16),
    "llama3_2_1b_2k_causal": Shape(16, 2048, 32, 8, 64, "one_document", 1),
    "llama3_2_1b_32k": Shape(1, 32_768, 32, 8, 64, "documents", 32),
    "llama3_2_1b_32k_causal": Shape(1, 32_768, 32, 8, 64, "one_document", 1),
}
SHAPES, SHAPE = {f"cpu_{name}": shape for name, shape in CPU.items()} | GPU | LLAMA_1B | PLAIN, "all"
GROUPS = {"all": ("llama3_8b_causal", "llama3_8b"), "llama3_2_1b": tuple(LLAMA_1B)}
GROUPS |= {name.removesuffix(WITHOUT): (name.removesuffix(WITHOUT), name) for name in PLAIN}
PACE = Pace(warmup=3.0, timed=3.0, turn=1.0, calls=10)
LAUNCH = ("BQ", "BK", "num_warps", "num_stages")
TILES = {
    "forward": [(128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3)],
    "backward_q": [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2)],
    "backward_kv": [(32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 3)],
}  # fmt: skip
"""Kernel -> what of `LAUNCH` to try, the other kernels as they are."""


def passes(implementation: str, window: int | None = None) -> Passes:
    """Returns the forward pass, and both: the output and the gradients of q, k and v."""
    run = functools.partial(attention, implementation=implementation, window=window)

    def both(q, k, v, do, segments):
        o, pullback = jax.vjp(lambda q, k, v: run(q, k, v, segments), q, k, v)
        return o, *pullback(do)

    return {"forward": lambda q, k, v, do, segments: run(q, k, v, segments), "both": both}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def arrays(rows: int, sequence: int, heads: tuple[int, int], head_dim: int):
    """Returns q, k, v and the output's cotangent, made on the device. heads: of queries and of keys."""
    keys, counts = jax.random.split(jax.random.key(0), 4), (heads[0], heads[1], heads[1], heads[0])
    return tuple(
        jax.random.normal(key, (rows, sequence, count, head_dim), jnp.bfloat16)
        for key, count in zip(keys, counts, strict=True)
    )


def tiles(head_dim: int) -> dict[str, dict]:
    """Returns {name: the tiles of all kernels}, of which one kernel's are tried."""
    best = triton.tiles(head_dim)
    tried = {
        f"{kernel}_{'x'.join(map(str, tile))}": best | {kernel: dict(zip(LAUNCH, tile, strict=True))}
        for kernel, every in TILES.items()
        for tile in every
    }
    return {name: {"tiles": lambda head_dim, of=of: of} for name, of in tried.items()}


def workload(shape: Shape) -> Workload:
    ids = segment_ids(np.random.default_rng(0), shape.rows, shape.sequence, shape.layout)
    segments = jax.jit(find_segments, static_argnums=1)(jnp.asarray(ids), shape.max_segments)
    heads = shape.heads, shape.kv_heads
    packed = shape.head_dim <= cudnn_packed.MAX_HEAD_DIM
    names = on(gpu=("cudnn_packed", "triton") if packed else ("triton",), cpu=("xla", "reference"))
    lengths = np.concatenate([np.bincount(row)[1:] for row in ids])
    seen = np.minimum(lengths, shape.window or shape.sequence)
    share = float((seen * (2.0 * lengths - seen)).sum()) / (shape.rows * shape.sequence**2)
    return Workload(
        (*arrays(shape.rows, shape.sequence, heads, shape.head_dim), segments),
        {name: passes(name, shape.window) for name in names},
        base=names[-1],
        about={"sizes": dataclasses.asdict(shape), "share_of_causal": round(share, 4)},
        tiles=tiles(shape.head_dim) if "triton" in names else {},
        tuned=triton,
        tuned_passes=passes("triton", shape.window),
    )
