"""The LM head with its loss, forward and backward: `linear_cross_entropy` and other ways to compute it.

Each takes a float32 matrix and gives its float32 gradient. `fused` is the kernel as it runs by default,
`fused_xla` its form without Triton, `recomputed` computes the logits again in the backward pass, `tokamax` is
its chunked_xla where tokamax can be imported.

--tiles has `fused` contend in chunks of other sizes.

Predicted for llama3_8b (N = 16,384, D = 4,096, V = 128,256, bf16) on an H200, at the 655 TFLOP/s that it
sustains in large products and 4.2 TB/s:
  fused: 3 products × 2·N·D·V = 51.6 TFLOP, 79 ms. Passes over the logits (N·V·2 = 4.2 GB): a read and a
    write, 2 ms. Casting the matrix: 3.2 GB, 0.8 ms. The first of 6 chunks writes the gradient (2.1 GB), the
    others read and write it: up to 5.5 ms, less what hides behind its product. In all 82 to 87 ms.
  chunks of other sizes, as timed when `fused` had 512 MiB: 85.9 ms with these, 83.9 with 768, 84.3 with 832,
    82.6 with 1 GiB. The more logits, the fewer passes over the gradient; but 1 GiB is all that the operation
    may take beside the gradients, and with 832 MiB the tiles of hidden's gradient fill 132 multiprocessors
    to 79% only, with 768 to 97%. qwen3_0_6b: 61.9, 57.5, 57.4 and 57.9. llama3_2_1b, where they fill them to
    97, 73, 79 and 97%: 88.7, 88.7, 88.3 and 85.1.
  fused_xla: the same products, and four passes over the logits: 2 ms more. At llama3_2_1b the two passes are
    16.8 GB, 4 ms of a step of 440; at qwen3_0_6b 20 GB, 4.8 ms.
  recomputed: 4 products, 105 ms, and the same passes and one more: 112 to 122 ms.
  tokamax: 4 products in 1,024 blocks of 2,048 columns, and slices of the matrix copied: above 130 ms.
Memory beyond the matrix, its copy in bf16 and its gradient: a chunk's logits (0.73 GiB), which their gradient
overwrites, hidden's gradient (0.13 GiB) and cuBLAS's workspace (0.03 GiB): 0.89 GiB, as compiled for an H200
without one. fused_xla has the logits' gradient beside the logits, 0.49 GiB each: 1.10 GiB.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from measure.tokamax_beside_jax import import_tokamax
from measure.workload import Pace, Workload

from pallas_kernels.linear_cross_entropy import linear_cross_entropy, triton
from pallas_kernels.linear_cross_entropy.shapes import CPU, GPU, Shape
from pallas_kernels.testing import normal

SHAPES, GROUPS, SHAPE = GPU | {"benchmark": CPU["benchmark"]}, {}, "llama3_8b"
PACE = Pace(warmup=20.0, timed=40.0, turn=1.0, calls=1)
CHUNKS = {
    f"chunks of {size} MiB": {"LOGITS_BYTES": size << 20, "LOGITS_BYTES_OF_MANY": size << 20}
    for size in (512, 640, 768, 832, 896, 1024, 2048)
}


def fused(*arguments, implementation: str | None = None):
    return linear_cross_entropy(*arguments, implementation=implementation)[0]


def recomputed(hidden_BTD, matrix_DV, targets_BT, weights_BT, chunks: int = 8):
    """Chunks under `jax.checkpoint`; the gradient of the matrix is summed over them in float32."""

    @jax.checkpoint
    def one_chunk(hidden_BCD, targets_BC, weights_BC):
        logits_BCV = jnp.einsum("bcd,dv->bcv", hidden_BCD, matrix_DV.astype(hidden_BCD.dtype))
        logits_BCV = logits_BCV.astype(jnp.float32)
        chosen_BCV = jax.lax.broadcasted_iota(jnp.int32, logits_BCV.shape, 2) == targets_BC[..., None]
        chosen_BC = jnp.sum(jnp.where(chosen_BCV, logits_BCV, 0.0), axis=-1)
        return jnp.sum(weights_BC * (jax.nn.logsumexp(logits_BCV, axis=-1) - chosen_BC))

    B, T = targets_BT.shape
    parts = tuple(
        jnp.moveaxis(x.reshape(B, chunks, T // chunks, *x.shape[2:]), 1, 0)
        for x in (hidden_BTD, targets_BT, weights_BT)
    )
    return jax.lax.scan(lambda total, part: (total + one_chunk(*part), None), jnp.float32(0), parts)[0]


def of_tokamax():
    """Returns tokamax's function, or the reason why there is none."""
    package, missing = import_tokamax()
    if package is None:
        return None, missing

    def tokamax(hidden_BTD, matrix_DV, targets_BT, weights_BT):
        del weights_BT  # all equal here, to the mean's
        hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
        matrix_DV = matrix_DV.astype(hidden_ND.dtype)
        how = {"reduction": "mean", "implementation": "chunked_xla"}
        return package.linear_softmax_cross_entropy_loss(hidden_ND, targets_BT.reshape(-1), matrix_DV, **how)

    return tokamax, None


def workload(shape: Shape) -> Workload:
    on_cpu, draw = jax.default_backend() == "cpu", np.random.default_rng(0)
    B, T, D, V = shape.rows, shape.sequence, shape.embed, shape.vocabulary
    hidden = normal(draw, (B, T, D), jnp.float32 if on_cpu else jnp.bfloat16)
    matrix = normal(draw, (D, V), jnp.float32) * D**-0.5
    targets = jnp.asarray(draw.integers(0, V, (B, T)), jnp.int32)
    tokamax, missing = of_tokamax()
    losses = {"fused": fused, "fused_xla": functools.partial(fused, implementation="xla")}
    losses |= {"recomputed": recomputed} | ({"tokamax": tokamax} if tokamax else {})
    # The gradient, and beside it the matrix as it is cast.
    matrix_bytes = (4 + (0 if on_cpu else hidden.dtype.itemsize)) * D * V

    def rates(_, seconds: float, memory) -> dict:
        beyond = memory.temp_size_in_bytes + memory.output_size_in_bytes - matrix_bytes
        tflops = round(6 * B * T * D * V / seconds / 1e12, 1)
        return {"tflops_of_3_products": tflops, "bytes_beyond_matrix_and_gradient": beyond}

    return Workload(
        (hidden, matrix, targets, jnp.full((B, T), 1 / (B * T), jnp.float32)),
        {name: {"both": jax.value_and_grad(loss, (0, 1))} for name, loss in losses.items()},
        base="fused",
        rates=rates,
        about={"dtype": str(hidden.dtype)} | ({"tokamax_missing": missing} if missing else {}),
        tiles=CHUNKS,
        tuned=triton,
        tuned_passes={"both": jax.value_and_grad(fused, (0, 1))},
    )
