"""Linear cross-entropy as in xla.py, but a chunk's logits are read once and become their gradient in place.

XLA reads them for their largest, for their sum and for their gradient, and keeps both: it never writes one
over the other, whatever barriers are set. A custom call whose output aliases its operand it does give one
buffer. Here a kernel makes a token's loss and the gradient in one visit, during which its logits, 0.26 MB of
a vocabulary of 128,256, stay in the GPU's cache: of four passes over memory two are left. Where the
vocabulary is split over devices, these have to add up in between: the losses are XLA's there.

Shapes: C tokens of a chunk, V vocabulary (this device's part).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import on_nvidia, require_float, require_gpu
from pallas_kernels.linear_cross_entropy import xla
from pallas_kernels.triton_loading import load_triton
from pallas_kernels.varying import vary_alike

MIN_CAPABILITY = (8, 0)

# A chunk's logits take at most this much, and their gradient no more: 6 chunks for 16,384 tokens and a
# vocabulary of 128,256 in bfloat16, with 0.9 GiB beyond the matrix and its gradient.
LOGITS_BYTES = 768 << 20
LOGITS_BYTES_OF_MANY = 2 * xla.LOGITS_BYTES
"""The same where LOGITS_BYTES are under an eighth of all: what xla.py has for logits and gradient."""

TILE = {"BV": 4096, "num_warps": 8}  # 16 columns a thread, in two loads of 16 bytes in bfloat16

ROW_TILE = {"LANES": 2048, "EACH": 8}
ROW_WARPS = {True: 32, False: 16}
"""1,024 threads: the most that a program may have, in NVIDIA's warps of 32 or another maker's of 64."""
PROGRAMS = 132
"""So many tokens are visited at a time: one on each multiprocessor of a Hopper, whose cache of 50 MB then
holds their logits from the first pass to the second."""


def linear_cross_entropy(hidden_BTD, *arguments, platform: str, **options):
    """Returns (objective, losses [B, T], log(Z) [B, T]); see `linear_cross_entropy` of the package.

    Raises:
      Unsupported: no GPU, or NVIDIA's before compute capability 8.0; jax-triton is not installed; or none
        of bfloat16, float16 and float32.
    """
    require_gpu(platform, MIN_CAPABILITY)
    require_float(hidden_BTD)
    load_triton(__package__)
    return xla.linear_cross_entropy(
        hidden_BTD,
        *arguments,
        **options,
        losses_and_gradient=losses_and_gradient,
        logits_bytes=logits_bytes,
    )


def logits_bytes(of_all: int, chunk_bytes: int | None) -> int:
    """Returns what a chunk's logits take at most, see `xla.logits_bytes`; their gradient takes no more."""
    if chunk_bytes is not None:
        return chunk_bytes
    return LOGITS_BYTES if of_all <= 8 * LOGITS_BYTES else LOGITS_BYTES_OF_MANY


def losses_and_gradient(logits_CV, targets_C, weights_C, z_loss: float, axis_name):
    """Returns losses and log(Z) [C] float32, and [C, V] of the logits' dtype, in their memory; see
    `xla.losses_and_gradient`."""
    if axis_name is not None:
        return xla.losses_and_gradient(
            logits_CV, targets_C, weights_C, z_loss, axis_name, logits_gradient=logits_gradient
        )
    jax_triton, kernels = load_triton(__package__)
    C, V = logits_CV.shape
    of_token = jax.ShapeDtypeStruct((C,), jnp.float32)
    made = jax_triton.triton_call(
        logits_CV,
        targets_C,
        weights_C,
        kernel=kernels.losses_and_gradient,
        out_shape=(of_token, of_token, jax.ShapeDtypeStruct(logits_CV.shape, logits_CV.dtype)),
        input_output_aliases={0: 2},
        grid=(min(C, PROGRAMS),),
        z_loss=float(z_loss),
        C=C,
        V=V,
        num_warps=ROW_WARPS[on_nvidia()],
        **ROW_TILE,
    )
    # A custom call's outputs carry no varying axes: they have the logits'.
    return tuple(vary_alike(one, logits_CV)[0] for one in made)


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
