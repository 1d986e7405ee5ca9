"""The norm's backward pass in one pass over memory; its forward pass is XLA's, which is one already.

The scale's gradient is a sum over all rows, of the same operands that the input's gradient is made of: each
program keeps a sum over its rows, where XLA reads both operands a second time.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Unsupported, load_triton, require_gpu
from pallas_kernels.rms_norm import reference
from pallas_kernels.varying import vary_alike

MIN_CAPABILITY = (8, 0)
WIDEST = 16_384  # a row has to fit the registers of one program
PROGRAMS = 528  # four for each core of an H100


def rms_norm(x, scale_D, *, epsilon: float, platform: str) -> tuple[jax.Array, jax.Array]:
    """Returns x and its norm; see `rms_norm` of the package.

    Raises:
      Unsupported: no GPU, or NVIDIA's before compute capability 8.0; jax-triton is not installed; or rows
        of more than 16,384.
    """
    require_gpu(platform, MIN_CAPABILITY)
    if x.shape[-1] > WIDEST:
        raise Unsupported(f"needs rows of at most {WIDEST}, got {x.shape[-1]}")
    load_triton(__package__)
    return _rms_norm(*vary_alike(x, scale_D), epsilon)


def warps(D: int) -> int:
    """Returns how many warps share a row: a power of two, as Triton asks, about 16 entries a thread."""
    return 1 << (max(4, min(16, D // 512)).bit_length() - 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x, scale_D, epsilon):
    return reference.rms_norm(x, scale_D, epsilon=epsilon)


def _forward(x, scale_D, epsilon):
    return _rms_norm(x, scale_D, epsilon), (x, scale_D)


def _backward(epsilon, residuals, gradients):
    x, scale_D = residuals
    d_residual, dy = gradients
    D = x.shape[-1]
    rows = x.size // D
    programs = min(PROGRAMS, rows)
    jax_triton, kernels = load_triton(__package__)
    dx, d_scale_PD = jax_triton.triton_call(
        x,
        scale_D,
        dy,
        d_residual,
        rows,
        kernel=kernels.backward,
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((programs, D), jnp.float32),
        ],
        grid=programs,
        num_warps=warps(D),
        epsilon=epsilon,
        programs=programs,
        D=D,
        BD=1 << (D - 1).bit_length(),
    )
    # A custom call's outputs carry no varying axes: they have the gradient's.
    dx, d_scale_PD, _ = vary_alike(dx, d_scale_PD, dy)
    return dx, jnp.sum(d_scale_PD, axis=0)


_rms_norm.defvjp(_forward, _backward)
