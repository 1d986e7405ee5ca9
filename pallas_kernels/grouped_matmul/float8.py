"""Grouped matmul in float8: rows and matrices of 8 bits, on Hopper at twice the rate of bfloat16.

The tensor cores take operands of 8 bits only where what is contracted lies together. So a matrix lies as
[E, O, I]: forward that is a transposed copy of [E, I, O], for the gradient of the rows it is the matrix as it
is stored. The gradient of the matrices contracts the rows, which would have to be quantised into transposed
copies too; it stays in bfloat16.

Predicted on an H200, for Mixtral's experts at 32,768 tokens (65,536 rows of 8 groups, 4,096 → 28,672 and
14,336 → 4,096; 23 TFLOP a pass), milliseconds a layer:

                              bfloat16   float8 but for the matrices' gradients
    forward                         39        21   of 1,100 TFLOP/s
    gradient of the rows            39        23   of 1,000: sums are added up outside of the tensor cores
    gradient of the matrices        39        39
    quantising                       -         6   of 3.4 G numbers of rows, 1.4 G of matrices
    all                            117        89   1.31 times as fast

At Qwen3-30B's shape (131,072 rows of 128 groups, 2,048 → 1,536 and 768 → 2,048; 1.24 TFLOP a pass) bfloat16
takes 6.6 ms, and float8 1.2 + 1.3 + 2.2 + 1.6 = 6.3: 1.05 times as fast, which SwiGLU and routing thin out to
less. So its experts should stay in bfloat16.

Log: 1.24 times as fast at Mixtral's shape; at Qwen3-30B's each product in float8 is slower (docs/results.md).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Operation, on_nvidia
from pallas_kernels.grouped_matmul import STAND_IN, stand_in
from pallas_kernels.varying import vary_alike

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


def automatic(platform: str | None = None) -> tuple[str, ...]:
    """Returns the implementations that are tried where none is named, the first first. On an NVIDIA GPU there
    is one, for others would be slower than bfloat16: what it cannot multiply is refused, with the reason."""
    return ("mosaic_gpu",) if on_nvidia(platform) else ("xla",)


OPERATION = Operation(
    "pallas_kernels.grouped_matmul",
    {
        "mosaic_gpu": Implementation(takes=("platform",)),
        "xla": Implementation(),
        "reference": Implementation(),
    },
    automatic,
)


def grouped_matmul_float8(
    x8_RI: jax.Array,
    w8_EOI: jax.Array,
    scales_E: jax.Array,
    sizes_E: jax.Array,
    dtype=jnp.bfloat16,
    exact: bool = True,
    implementation: str | None = None,
    *,
    platform: str | None = None,
) -> jax.Array:
    """Returns each row times the matrix of its group and the group's scale, [R, O] of `dtype`.

    Arrays are taken as they lie on one device. Not differentiable: what is quantised says what its gradient
    is.

    Args:
      x8_RI, w8_EOI: e4m3 or e5m2 each. Rows behind the last group may hold anything.
      scales_E: [E] float32, of x's scale and the matrix's.
      sizes_E: [E] int32, rows of each group, at most R in all.
      dtype: of the result, bfloat16 or float32.
      exact: sum in float32. Otherwise Hopper's tensor cores do with about 14 bits, which is enough forward,
        and twice as many columns are multiplied at once.
      implementation: one of `OPERATION.names`; None tries those of `automatic`; `STAND_IN` is for plans.
      platform: "cpu", "gpu" or "tpu", where it will run; None is JAX's default backend.

    Raises:
      ValueError: shapes or dtypes do not fit together, or no implementation has the name.
      dispatch.Unsupported: the named implementation, or every one, refuses; with the reasons.

    Source: float8 with a scale a tensor: Micikevicius et al. 2022 (arXiv:2209.05433).
    """
    (R, *_), (E, O, I) = x8_RI.shape, w8_EOI.shape if w8_EOI.ndim == 3 else (0, 0, 0)  # noqa: E741
    if not O or (x8_RI.shape, scales_E.shape, sizes_E.shape) != ((R, I), (E,), (E,)):
        raise ValueError(
            f"grouped_matmul_float8: shapes do not fit: x [R, I] {x8_RI.shape}, w [E, O, I] {w8_EOI.shape}, "
            f"scales [E] {scales_E.shape}, sizes [E] {sizes_E.shape}"
        )
    dtypes = [array.dtype for array in (x8_RI, w8_EOI, scales_E, sizes_E)]
    if not set(dtypes[:2]) <= set(FLOAT8) or dtypes[2:] != [jnp.float32, jnp.int32]:
        raise ValueError(
            f"grouped_matmul_float8: x and w are float8, scales float32 and sizes int32, got {dtypes}"
        )
    operands = vary_alike(x8_RI, w8_EOI, scales_E, sizes_E)
    if implementation == STAND_IN:
        return stand_in.grouped_matmul_float8(*operands, dtype=dtype)
    how = {"implementation": implementation, "platform": platform, "function": "grouped_matmul_float8"}
    return OPERATION.run(*operands, dtype=dtype, exact=exact, **how)
