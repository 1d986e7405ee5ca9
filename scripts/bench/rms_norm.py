"""Times the norm, forward and with its backward pass, Triton's against XLA's, and prints one JSON line.

    python scripts/bench/rms_norm.py [--shape all|llama3_2_1b|...] [--tiles] [--output FILE]

Contenders take turns, A-B-C-D-A-B-C-D, and medians count. The norm is that at the start of a branch: what
comes back along the residual stream is added in its backward pass. Queries and keys are rotated too. A
barrier keeps the passes apart, as all that lies between them does in a model. All shapes take about 25 s on a
GPU. --tiles has Triton's kernels contend in other tiles too: about 10 s a shape.

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

import concurrent.futures
import contextlib
import statistics
import sys
import unittest.mock

import jax
import jax.numpy as jnp
import turns

from jaxthru.runtime import xla
from pallas_kernels.rms_norm import rms_norm_residual, rms_norm_rotary, triton
from pallas_kernels.rms_norm.shapes import CPU, CPU_HEADS, GPU, GPU_HEADS

CALLS = 20
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
MODELS = ("llama3_2_1b", "qwen3_0_6b", "qwen3_4b", "llama3_8b")
SHAPES = {name: GPU[name] for name in MODELS}
SHAPES |= {name: shape for name, shape in GPU_HEADS.items() if name.startswith(MODELS)}
SMALL = {"cpu": CPU["even"], "cpu_heads": CPU_HEADS["even"]}


def inputs(shape: tuple[int, ...]) -> tuple:
    """Returns x, the scale, cosines and sines if the shape is of heads, and the gradients of the results."""
    rotated, keys = len(shape) == 4, jax.random.split(jax.random.key(0), 5)
    x, *gradients = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[: 2 if rotated else 3])
    scale = 1 + 0.1 * jax.random.normal(keys[3], shape[-1:])
    if not rotated:
        return x, scale, (), tuple(gradients)
    angle = jax.random.normal(keys[4], (*shape[:2], shape[-1] // 2))
    return x, scale, (jnp.cos(angle), jnp.sin(angle)), tuple(gradients)


def contenders(implementation: str):
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


def needed_bytes(arguments: tuple) -> dict[str, int]:
    """Returns what has to be read and written at the least, of arrays with a row for each token."""
    x, _, angles, gradients = arguments
    of_angles = sum(angle.nbytes for angle in angles)
    forward = 2 * x.nbytes + of_angles
    return {"forward": forward, "both": forward + (2 + len(gradients)) * x.nbytes + of_angles}


@jax.jit
def apart(found, expected) -> jax.Array:
    """Returns the largest relative difference of several arrays from several others."""

    def norm(x):
        return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))

    pairs = zip(found, expected, strict=True)
    return jnp.stack([norm(a.astype(jnp.float32) - b.astype(jnp.float32)) / norm(b) for a, b in pairs]).max()


def compared(shape: tuple[int, ...], names: tuple[str, ...], options) -> tuple[dict, dict]:
    """Returns what a record says of each implementation at a shape, and of the clocks."""
    arguments = inputs(shape)
    functions = {(name, what): f for name in names for what, f in contenders(name).items()}
    lowered = [jax.jit(function).lower(*arguments) for function in functions.values()]
    for name, constants in (TILES if options.tiles and "triton" in names else {}).items():
        with contextlib.ExitStack() as stack:
            for key, value in constants.items():
                stack.enter_context(unittest.mock.patch.object(triton, key, value))
            jax.clear_caches()
            for what, function in contenders("triton").items():
                functions[name, what] = function
                lowered.append(jax.jit(function).lower(*arguments))
    names = tuple(dict.fromkeys(name for name, _ in functions))
    with concurrent.futures.ThreadPoolExecutor() as threads:
        runs = dict(zip(functions, threads.map(jax.stages.Lowered.compile, lowered), strict=True))
    results = {name: runs[name, "both"](*arguments) for name in names}
    differ = {name: float(f"{apart(result, results['xla']):.2g}") for name, result in results.items()}
    del results
    times, clocks = turns.compare(runs, arguments, options, turn_seconds=0.05, calls=CALLS)
    needed = needed_bytes(arguments)
    told = {name: {"apart_from_xla": differ[name]} for name in names}
    for (name, what), run in runs.items():
        rate = needed[what] / statistics.median(times[name, what]) / 1e12
        told[name][what] = turns.told(times[name, what], run.memory_analysis(), CALLS) | {
            "needed_mb": round(needed[what] / 1e6, 1),
            "needed_tb_per_second": round(rate, 3),
        }
    return told, clocks


def main() -> int:
    shapes = SHAPES | SMALL
    parser = turns.parser(__doc__.splitlines()[0], ("all", *shapes), "all", 0.3, 0.15)
    parser.add_argument("--tiles", action="store_true", help="time Triton's kernels in other tiles too")
    options = parser.parse_args()
    xla.configure()
    chosen = SHAPES if options.shape == "all" else {options.shape: shapes[options.shape]}
    names = ("triton", "xla") if jax.default_backend() == "gpu" else ("xla", "reference")
    found = {name: compared(shape, names, options) for name, shape in chosen.items()}
    told = {name: told | {"shape": list(chosen[name])} for name, (told, _) in found.items()}
    clocks = {"clocks": {name: clocks for name, (_, clocks) in found.items()}}
    turns.emit("rms_norm", options, told, clocks, dtype="bfloat16")
    return 0


if __name__ == "__main__":
    sys.exit(main())
