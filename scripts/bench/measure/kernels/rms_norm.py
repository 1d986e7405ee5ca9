"""The norm at the start of a branch, and that of queries and keys with their rotation: Triton's and XLA's.

What comes back along the residual stream is added in the norm's backward pass. A barrier keeps the passes
apart, as all that lies between them does in a model. All shapes take about 25 s on a GPU; --tiles about 10 s
more a shape.

Counted in steps of Llama-3.2-1B and Qwen3-0.6B that are compiled for an H200, 16 rows of 2,048 tokens, in MB:
                                               forward            backward
                                           XLA   one pass      XLA   one pass
  norm, 32,768 × 2,048                     403        268      806        537
  queries, 32,768 × 16 heads of 128        423        287    1,234        422
  keys, 8 heads                            220        152      625        219
What the gradient before attention is summed from, cuBLAS adds up for either (jaxthru/models/fan_out.py).

Forward alone, with nothing to keep for a backward pass, XLA makes one pass as well: 268 and 285 MB.

Predicted at the 4.1 TB/s that an H200 sustains: norms forward alone 0.065 ms by either, both passes 0.196 ms
by Triton and 0.295 by XLA; queries 0.070 by either, and 0.173 against 0.404. An array of qwen3_4b, 42 MB, may
stay in the cache of 50 MB, whatever a pass asks for: there XLA loses less. In a step of Llama-3.2-1B that is
3.7 ms of 440 (0.8 %), with what cuBLAS adds up; in one of Qwen3-0.6B, 1.7 GB a layer, 12 ms.
"""

import jax
import jax.numpy as jnp
from measure.workload import Pace, Passes, Workload, on

from pallas_kernels.rms_norm import rms_norm_residual, rms_norm_rotary, triton
from pallas_kernels.rms_norm.shapes import CPU, CPU_HEADS, GPU, GPU_HEADS

MODELS = ("llama3_2_1b", "qwen3_0_6b", "qwen3_4b", "llama3_8b")
SHAPES = {name: GPU[name] for name in MODELS}
SHAPES |= {name: shape for name, shape in GPU_HEADS.items() if name.startswith(MODELS)}
GROUPS, SHAPE = {"all": tuple(SHAPES)}, "all"
SHAPES |= {"cpu": CPU["even"], "cpu_heads": CPU_HEADS["even"]}
PACE = Pace(warmup=0.3, timed=0.15, turn=0.05, calls=20)
TILES = {
    "stages_1": {"STAGES": 1},
    "stages_2": {"STAGES": 2},
    "half_the_programs": {"PROGRAMS": triton.PROGRAMS // 2},
    "twice_the_programs": {"PROGRAMS": 2 * triton.PROGRAMS},
    "larger_blocks": {"BACKWARD": {"entries": 4096, "of_thread": 16}, "PROGRAMS": triton.PROGRAMS // 2},
    "more_of_a_thread": {"BACKWARD": {"entries": 2048, "of_thread": 32}},
    "less_of_a_thread": {"FORWARD": {"entries": 4096, "of_thread": 16}},
}
"""Constants of the kernels' launch that differ from their own."""


def inputs(shape: tuple[int, ...]) -> tuple:
    """Returns x, the scale, cosines and sines if the shape is of heads, and the gradients of the results."""
    rotated, keys = len(shape) == 4, jax.random.split(jax.random.key(0), 5)
    x, *gradients = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[: 2 if rotated else 3])
    scale = 1 + 0.1 * jax.random.normal(keys[3], shape[-1:])
    if not rotated:
        return x, scale, (), tuple(gradients)
    angle = jax.random.normal(keys[4], (*shape[:2], shape[-1] // 2))
    return x, scale, (jnp.cos(angle), jnp.sin(angle)), tuple(gradients)


def passes(implementation: str) -> Passes:
    """Returns the norm, and the norm with both gradients."""
    how = {"epsilon": 1e-5, "implementation": implementation}

    def forward(x, scale, angles, _):
        return rms_norm_rotary(x, scale, *angles, **how) if angles else rms_norm_residual(x, scale, **how)[1]

    def both(x, scale, angles, gradients):
        norm = rms_norm_rotary if angles else rms_norm_residual
        values, pullback = jax.vjp(lambda x, scale: norm(x, scale, *angles, **how), x, scale)
        y, gradients = jax.lax.optimization_barrier((values if angles else values[1], gradients))
        return y, *pullback(*gradients if angles else (gradients,))

    return {"forward": forward, "both": both}


def workload(shape: tuple[int, ...]) -> Workload:
    x, _, angles, gradients = arguments = inputs(shape)
    of_angles = sum(angle.nbytes for angle in angles)
    needed = {"forward": 2 * x.nbytes + of_angles}  # at the least, of arrays with a row for each token
    needed["both"] = needed["forward"] + (2 + len(gradients)) * x.nbytes + of_angles

    def rates(what: str, seconds: float, memory) -> dict:
        rate = round(needed[what] / seconds / 1e12, 3)
        return {"needed_mb": round(needed[what] / 1e6, 1), "needed_tb_per_second": rate}

    names = on(gpu=("triton", "xla"), cpu=("xla", "reference"))
    more = {"tiles": TILES, "tuned": triton, "tuned_passes": passes("triton")} if "triton" in names else {}
    contenders = {name: passes(name) for name in names}
    return Workload(arguments, contenders, "xla", rates, about={"sizes": list(shape)}, **more)
