"""Casts to float8, as they are and transposed: Triton's kernel and XLA's fusion, in bytes a second.

Predicted on an H200 at the 4.1 TB/s that it sustains, of bfloat16: each number is read in 2 bytes and written
in 2. llama_1b_mlp, 32,768 x 8,192: 0.26 ms by Triton. XLA's fusion stores single bytes, 32 of a warp at once:
at the 1.6 TB/s that fit what whole steps saved by float8, 0.67 ms. Found: 0.30 and 0.53, at a clock of 1,950
MHz, where steps have 1,500.
"""

import math

import jax.numpy as jnp
import numpy as np
from measure.workload import Pace, Workload, on

from pallas_kernels.cast_transpose import cast_transpose
from pallas_kernels.cast_transpose.shapes import CPU, GPU, draw

SHAPES, SHAPE = CPU | GPU, "llama_1b_mlp"
GROUPS = {"all": ("llama_1b_stream", "llama_1b_mlp", "qwen3_4b_mlp", "llama3_8b_mlp", "llama3_8b_down")}
PACE = Pace(warmup=0.3, timed=0.3, turn=0.05, calls=20)


def casts(implementation: str) -> dict:
    """Returns the cast of inputs, and that of gradients."""

    def to(dtype):
        return lambda x, up: cast_transpose(x, up, dtype, implementation=implementation)

    return {"inputs": to(jnp.float8_e4m3fn), "gradients": to(jnp.float8_e5m2)}


def workload(shape: tuple[int, int]) -> Workload:
    moved = 4 * math.prod(shape)
    return Workload(
        draw(np.random.default_rng(0), shape, jnp.bfloat16),
        {name: casts(name) for name in on(gpu=("triton", "xla"), cpu=("xla", "reference"))},
        base="xla",
        rates=lambda what, seconds, _: {"tb_per_second": round(moved / seconds / 1e12, 3)},
        about={"sizes": list(shape)},
    )
