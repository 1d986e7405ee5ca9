"""The experts' SwiGLU with the router's weight, forward and backward: Triton's kernels and XLA's fusions.

Predicted on an H200 at the 4.1 TB/s that it sustains, in bfloat16: forward reads gates and ups and writes
half as much, 6 bytes an entry of the result; both passes 16. qwen3_30b, 131,072 rows of 768: 0.15 ms forward
and 0.39 ms both by Triton. XLA makes one fusion forward, so the same, and backward two, one of which reads
for the sum of a row what the other has read: 22 bytes, 0.54 ms.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from measure.workload import Pace, Workload, on

from pallas_kernels.weighted_swiglu import weighted_swiglu
from pallas_kernels.weighted_swiglu.shapes import CPU, GPU, draw

SHAPES, SHAPE = CPU | GPU, "qwen3_30b"
GROUPS = {"all": ("mixtral", "olmoe", "qwen3_30b")}
PACE = Pace(warmup=0.3, timed=0.3, turn=0.05, calls=20)


def passes(implementation: str) -> dict:
    """Returns the forward pass, and both."""

    def forward(gate_up, weights, _):
        return weighted_swiglu(gate_up, weights, implementation=implementation)

    def both(gate_up, weights, dy):
        y, pullback = jax.vjp(lambda *a: forward(*a, None), gate_up, weights)
        # As in a model, where the down map and what follows lie between the passes.
        y, dy = jax.lax.optimization_barrier((y, dy))
        return y, *pullback(dy)

    return {"forward": forward, "both": both}


def workload(shape: tuple[int, int]) -> Workload:
    needed = {"forward": 6 * math.prod(shape), "both": 16 * math.prod(shape)}
    return Workload(
        draw(np.random.default_rng(0), shape, jnp.bfloat16),
        {name: passes(name) for name in on(gpu=("triton", "xla"), cpu=("xla", "reference"))},
        base="xla",
        rates=lambda what, seconds, _: {"needed_tb_per_second": round(needed[what] / seconds / 1e12, 3)},
        about={"sizes": list(shape)},
    )
