"""Times the output matrix with its loss, forward and backward, against other ways and prints one JSON line.

    python scripts/bench/linear_cross_entropy.py [--shape llama3_2_1b] [--output FILE]

Contenders take turns, A-B-C-A-B-C, and medians count; each takes a float32 matrix and gives its float32
gradient. `fused` is the kernel here as it runs by default, `fused_xla` its form without Triton, `recomputed`
computes the logits again in the backward pass, `tokamax` is its chunked_xla where tokamax can be imported.

Predicted for llama3_8b (N = 16,384, D = 4,096, V = 128,256, bf16) on an H200, at the 655 TFLOP/s that it
sustains in large products and 4.2 TB/s:
  fused: 3 products × 2·N·D·V = 51.6 TFLOP, 79 ms. Passes over the logits (N·V·2 = 4.2 GB): a read and a
    write, 2 ms. Casting the matrix and clearing its gradient: 5.3 GB, 1.3 ms. Each of 8 chunks reads and
    writes the gradient (4.2 GB): up to 8 ms, less what hides behind its product. In all 82 to 90 ms.
  fused_xla: the same products, and four passes over the logits: 2 ms more. At llama3_2_1b the two passes are
    16.8 GB, 4 ms of a step of 440; at qwen3_0_6b 20 GB, 4.8 ms.
  recomputed: 4 products, 105 ms, and the same passes and one more: 112 to 122 ms.
  tokamax: 4 products in 1,024 blocks of 2,048 columns, and slices of the matrix copied: above 130 ms.
Memory beyond the matrix, its copy in bf16 and its gradient: a chunk's logits (0.49 GiB), which their gradient
overwrites, hidden's gradient (0.13 GiB) and cuBLAS's workspace (0.03 GiB): 0.65 GiB, as compiled for an H200
without one. fused_xla has the logits' gradient beside the logits: 1.10 GiB.
"""

import importlib.util
import statistics
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import turns

from jaxthru.runtime import xla
from pallas_kernels.linear_cross_entropy import linear_cross_entropy
from pallas_kernels.linear_cross_entropy.shapes import CPU, GPU
from pallas_kernels.testing import normal, relative_error


def fused(hidden_BTD, matrix_DV, targets_BT, weights_BT):
    return linear_cross_entropy(hidden_BTD, matrix_DV, targets_BT, weights_BT)[0]


def fused_xla(hidden_BTD, matrix_DV, targets_BT, weights_BT):
    return linear_cross_entropy(hidden_BTD, matrix_DV, targets_BT, weights_BT, implementation="xla")[0]


def recomputed(hidden_BTD, matrix_DV, targets_BT, weights_BT, chunks: int = 8):
    """Chunks under `jax.checkpoint`; the gradient of the matrix is summed over them in float32."""

    @jax.checkpoint
    def one_chunk(hidden_BCD, targets_BC, weights_BC):
        logits_BCV = jnp.einsum("bcd,dv->bcv", hidden_BCD, matrix_DV.astype(hidden_BCD.dtype))
        logits_BCV = logits_BCV.astype(jnp.float32)
        chosen_BCV = jax.lax.broadcasted_iota(jnp.int32, logits_BCV.shape, 2) == targets_BC[..., None]
        losses_BC = jax.nn.logsumexp(logits_BCV, axis=-1) - jnp.sum(
            jnp.where(chosen_BCV, logits_BCV, 0.0), axis=-1
        )
        return jnp.sum(weights_BC * losses_BC)

    B, T = targets_BT.shape
    parts = tuple(
        jnp.moveaxis(x.reshape(B, chunks, T // chunks, *x.shape[2:]), 1, 0)
        for x in (hidden_BTD, targets_BT, weights_BT)
    )
    return jax.lax.scan(lambda total, part: (total + one_chunk(*part), None), jnp.float32(0), parts)[0]


def import_tokamax():
    """Returns tokamax's function, or the reason why there is none."""
    if importlib.util.find_spec("xprof") is None:  # its own benchmarks want that, nothing here does
        for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["xprof.cli.tools"].get_kernel_stats_tool = None
    try:
        from tokamax import linear_softmax_cross_entropy_loss
    except ImportError as error:
        return None, str(error)

    def tokamax(hidden_BTD, matrix_DV, targets_BT, weights_BT):
        del weights_BT  # all equal here, to the mean's
        hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
        return linear_softmax_cross_entropy_loss(
            hidden_ND,
            targets_BT.reshape(-1),
            matrix_DV.astype(hidden_ND.dtype),
            reduction="mean",
            implementation="chunked_xla",
        )

    return tokamax, None


def inputs(shape, dtype):
    draw = np.random.default_rng(0)
    B, T, D, V = shape.rows, shape.sequence, shape.embed, shape.vocabulary
    hidden = normal(draw, (B, T, D), dtype)
    matrix = normal(draw, (D, V), jnp.float32) * D**-0.5
    targets = jnp.asarray(draw.integers(0, V, (B, T)), jnp.int32)
    return hidden, matrix, targets, jnp.full((B, T), 1 / (B * T), jnp.float32)


def main() -> int:
    shapes = GPU | {"benchmark": CPU["benchmark"]}
    options = turns.parser(__doc__.splitlines()[0], shapes, "llama3_8b", 20.0, 40.0).parse_args()
    xla.configure()
    shape, on_cpu = shapes[options.shape], jax.default_backend() == "cpu"
    arguments = inputs(shape, jnp.float32 if on_cpu else jnp.bfloat16)
    tokamax, missing = import_tokamax()
    contenders = [fused, fused_xla, recomputed, *([tokamax] if tokamax else [])]
    runs = {
        function.__name__: jax.jit(jax.value_and_grad(function, (0, 1))).lower(*arguments).compile()
        for function in contenders
    }
    results = {name: run(*arguments) for name, run in runs.items()}
    apart = {
        name: [float(f"{relative_error(*pair):.2g}") for pair in zip(grads, results["fused"][1], strict=True)]
        for name, (_, grads) in results.items()
    }
    losses = {name: float(value) for name, (value, _) in results.items()}
    del results
    times, clocks = turns.compare(runs, arguments, options)
    flops = 6 * shape.rows * shape.sequence * shape.embed * shape.vocabulary
    copy = 0 if on_cpu else arguments[0].dtype.itemsize
    matrix_bytes = (4 + copy) * shape.embed * shape.vocabulary  # of the gradient and the cast matrix
    contended = {}
    for name, run in runs.items():
        median, memory = statistics.median(times[name]), run.memory_analysis()
        contended[name] = turns.told(times[name], memory) | {
            "tflops_of_3_products": round(flops / median / 1e12, 1),
            "bytes_beyond_matrix_and_gradient": memory.temp_size_in_bytes
            + memory.output_size_in_bytes
            - matrix_bytes,
            "gradients_apart_from_fused": apart[name],
            "loss": losses[name],
        }
    more = {"dtype": str(arguments[0].dtype)} | ({"tokamax_missing": missing} if missing else {})
    turns.emit("linear_cross_entropy", options, contended, clocks, **more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
