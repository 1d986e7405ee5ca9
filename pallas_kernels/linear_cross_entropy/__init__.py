"""Linear cross-entropy: the LM head and the loss in one operation, so that whole logits never exist."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Operation, triton_before_xla

__all__ = ["OPERATION", "linear_cross_entropy"]

OPERATION = Operation(
    __name__,
    {
        "triton": Implementation(takes=("platform",)),
        "xla": Implementation(),
        "reference": Implementation(),
    },
    triton_before_xla,
)


def linear_cross_entropy(
    hidden_BTD: jax.Array,
    matrix: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    z_loss: float = 0.0,
    layout: Literal["DV", "VD"] = "DV",
    axis_name: str | None = None,
    weighted_only: bool = False,
    chunk_bytes: int | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns Σ weights × (cross-entropy + z_loss × log(Z)²), and each token's cross-entropy and log(Z).

    Z is the sum of the softmax. Matmuls take and give hidden's dtype, to which logits and their gradients
    are thus rounded, and accumulate in float32; everything between them is in float32. Only the sum has a
    gradient, and only for hidden and matrix; the weights are constants. Nothing is left out where a weight
    is 0, unless `weighted_only` says so: what is not finite there makes the sum NaN.

    The arrays are taken as they lie on one device. With `axis_name` the vocabulary is split over that mesh
    axis: each device holds the columns that follow those of the device before. The call then has to be
    within a `jax.shard_map` with check_vma=True, because what is summed over which axis in the backward pass
    follows from the arrays' varying axes. The results are equal on all devices of the axis. They are of this
    device's tokens: a sum over the axes that split B or T is the caller's.

    Args:
      hidden_BTD: [B, T, D], of the dtype to compute in.
      matrix: [D, V], or [V, D] as an embedding table lies; it is cast to hidden's dtype. Its gradient, summed
        in float32, comes in its own dtype.
      targets_BT: [B, T] int32, in the whole vocabulary. One outside it counts as a logit of 0.
      weights_BT: [B, T] float32, usually the loss mask over the number of tokens.
      z_loss: the weight of log(Z)² (arXiv:2204.02311), static.
      layout: of the matrix.
      axis_name: the mesh axis over which the vocabulary is split, if any.
      weighted_only: compute nothing for tokens whose weight is 0; static. The time goes with how many others
        there are, in chunks, whatever the shapes say. Cross-entropy and log(Z) are 0 there. It costs a sort
        of N and two gathers, so ask for it only where many weights are 0.
      chunk_bytes: what a chunk's logits may take, with their gradient where that has memory of its own. Each
        chunk but the first reads and writes the matrix's whole gradient. None is what keeps the operation
        within 1 GiB beyond the matrix and its gradient at 16,384 tokens × 4,096 × 128,256.
      implementation: one of `OPERATION.names`; None takes "triton" on an NVIDIA GPU where it can run, and
        else "xla".
      platform: "cpu", "gpu" or "tpu", where the computation will run; None is JAX's default backend.

    Returns:
      The objective, a float32 scalar; cross-entropy and log(Z), each [B, T] float32, in nats.

    Raises:
      ValueError: shapes, dtypes or the split do not fit together, or no implementation has the name.
      dispatch.Unsupported: the named implementation refuses: "triton" off an NVIDIA GPU, the reference for a
        split vocabulary.

    Source: gradients formed along with the loss: Hsu et al. 2024 (arXiv:2410.10989); vocabulary in parts:
    Shoeybi et al. 2019 (arXiv:1909.08053).
    """
    _check(hidden_BTD, matrix, targets_BT, weights_BT, layout, axis_name)
    objective, losses_BT, log_z_BT = OPERATION.run(
        *(hidden_BTD, matrix, targets_BT, jax.lax.stop_gradient(weights_BT)),
        implementation=implementation,
        platform=platform,
        z_loss=z_loss,
        layout=layout,
        axis_name=axis_name,
        weighted_only=weighted_only,
        chunk_bytes=chunk_bytes,
    )
    return objective, jax.lax.stop_gradient(losses_BT), jax.lax.stop_gradient(log_z_BT)


def _check(hidden_BTD, matrix, targets_BT, weights_BT, layout, axis_name) -> None:
    if layout not in ("DV", "VD"):
        raise ValueError(f"linear_cross_entropy: layout {layout!r} is neither DV nor VD")
    B, T, D = hidden_BTD.shape
    fits = matrix.ndim == 2 and matrix.shape[layout.index("D")] == D
    if not fits or targets_BT.shape != (B, T) or weights_BT.shape != (B, T):
        raise ValueError(
            f"linear_cross_entropy: shapes do not fit: hidden {hidden_BTD.shape}, matrix {matrix.shape} as "
            f"{layout}, targets {targets_BT.shape}, weights {weights_BT.shape}"
        )
    if targets_BT.dtype != jnp.int32 or weights_BT.dtype != jnp.float32:
        raise ValueError(
            f"linear_cross_entropy: targets are int32 and weights float32, got {targets_BT.dtype} and "
            f"{weights_BT.dtype}"
        )
    if axis_name is not None and axis_name not in jax.typeof(matrix).manual_axis_type.varying:
        raise ValueError(
            f"linear_cross_entropy: the matrix is not split over {axis_name!r}, or this is not within a "
            "jax.shard_map with check_vma=True"
        )
