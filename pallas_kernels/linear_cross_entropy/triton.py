"""Linear cross-entropy as in xla.py, but a chunk's logits become their gradient in place.

XLA keeps both and never writes one over the other, whatever barriers are set. A custom call whose output
aliases its operand it does give one buffer: half the memory, for the same passes over it.

Shapes: C tokens of a chunk, V vocabulary (this device's part).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Unsupported, load_triton, require_gpu
from pallas_kernels.linear_cross_entropy import xla
from pallas_kernels.varying import vary_alike

MIN_CAPABILITY = (8, 0)

TILE = {"BV": 4096, "num_warps": 8}  # 16 columns a thread, in two loads of 16 bytes in bfloat16


def linear_cross_entropy(hidden_BTD, *arguments, platform: str, **options):
    """Returns (objective, losses [B, T], log(Z) [B, T]); see `linear_cross_entropy` of the package.

    Raises:
      Unsupported: no GPU, or NVIDIA's before compute capability 8.0; jax-triton is not installed; or none
        of bfloat16, float16 and float32.
    """
    require_gpu(platform, MIN_CAPABILITY)
    if hidden_BTD.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise Unsupported(f"needs bfloat16, float16 or float32, got {hidden_BTD.dtype}")
    load_triton(__package__)
    return xla.linear_cross_entropy(hidden_BTD, *arguments, **options, logits_gradient=logits_gradient)


def logits_gradient(logits_CV, log_z_C, targets_C, weights_C, z_loss: float) -> jax.Array:
    """Returns [C, V] of the logits' dtype, in their memory; see `xla.logits_gradient`."""
    jax_triton, kernels = load_triton(__package__)
    C, V = logits_CV.shape
    d_logits_CV = jax_triton.triton_call(
        logits_CV,
        log_z_C,
        targets_C,
        weights_C,
        kernel=kernels.logits_gradient,
        out_shape=jax.ShapeDtypeStruct(logits_CV.shape, logits_CV.dtype),
        input_output_aliases={0: 0},
        grid=(C, -(-V // TILE["BV"])),
        z_loss=float(z_loss),
        V=V,
        **TILE,
    )
    # A custom call's output carries no varying axes: it has the logits'.
    return vary_alike(d_logits_CV, logits_CV)[0]
