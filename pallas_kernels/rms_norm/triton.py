"""The norm in one pass over memory, forward and backward.

XLA makes two of each: one for the sums of a row, or of a column, and one that uses them. A program here has
whole rows in its registers. The scale's gradient is a sum over all rows, of operands of which the input's
gradient is made: each program sums its own, and XLA adds these few sums up, in one order.

Shapes: N rows, D width, P programs, B rows of a batch, T tokens, H heads, C head_dim.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Unsupported, require_float, require_gpu
from pallas_kernels.triton_loading import load_triton
from pallas_kernels.varying import vary_alike

MIN_CAPABILITY = (8, 0)
WIDEST, WIDEST_HEAD = 8192, 256  # a row has to fit the registers of one program

FORWARD = {"entries": 4096, "of_thread": 32}
"""At least so many entries are one program's, whole rows of them, and at most so many a thread's."""
BACKWARD = {"entries": 2048, "of_thread": 16}
"""Each needs three times the registers of one forward."""
PROGRAMS = 528
"""Of a backward pass, where a block is the least: four for each core of an H200, which it has room for. Of
larger blocks there are fewer programs, so that the sums for the scale stay about as many."""
STAGES, STAGED_BYTES = 3, 96 << 10
"""Blocks that a program of the backward pass works on or loads at once, and what those that it loads may take
of shared memory, of which each GPU from 8.0 on has 99 KiB."""


def rms_norm(x: jax.Array, scale_D: jax.Array, *, epsilon: float, offset: float, platform: str) -> jax.Array:
    """Returns the norm of x; see `rms_norm` of the package.

    Raises:
      Unsupported: no GPU, or NVIDIA's before compute capability 8.0; jax-triton is not installed; rows too
        wide; or none of bfloat16, float16 and float32.
    """
    _require(platform, x, WIDEST)
    return norm(*vary_alike(x, scale_D), epsilon, offset, launch)


def rms_norm_residual(
    x: jax.Array, scale_D: jax.Array, *, epsilon: float, offset: float, platform: str
) -> tuple[jax.Array, jax.Array]:
    """Returns x and its norm; see `rms_norm_residual` of the package. Raises Unsupported as `rms_norm`."""
    _require(platform, x, WIDEST)
    return norm_residual(*vary_alike(x, scale_D), epsilon, offset, launch)


def rms_norm_rotary(
    x_BTHC: jax.Array,
    scale_C: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    epsilon: float,
    offset: float,
    platform: str,
) -> jax.Array:
    """Returns the rotated norm of each head; see `rms_norm_rotary` of the package. Raises Unsupported as
    `rms_norm`."""
    _require(platform, x_BTHC, WIDEST_HEAD)
    return norm_rotary(*vary_alike(x_BTHC, scale_C, cos, sin), epsilon, offset, launch)


def _require(platform: str, x: jax.Array, widest: int) -> None:
    require_gpu(platform, MIN_CAPABILITY)
    require_fit(x, widest)
    load_triton(__package__)


def require_fit(x: jax.Array, widest: int) -> None:
    """Raises Unsupported for what the kernels do not take, on any device."""
    if x.shape[-1] > widest:
        raise Unsupported(f"needs rows of at most {widest:,} entries, got {x.shape[-1]:,}")
    require_float(x)


def tile(width: int, entries: int, of_thread: int) -> dict[str, int]:
    """Returns the rows R of a block, the power of two BD that holds one, and the warps that share them."""
    BD = 1 << (width - 1).bit_length()
    R = max(entries // BD, 1)
    return {"R": R, "BD": BD, "num_warps": min(max(R * BD // (32 * of_thread), 4), 16)}


def programs(rows: int, R: int, BD: int) -> int:
    """Returns how many programs share the blocks of a backward pass."""
    return min(PROGRAMS * BACKWARD["entries"] // (R * BD), -(-rows // R))


def stages(bytes_of_block: int) -> int:
    """Returns how many blocks a program works on or loads at once."""
    return min(STAGES, 1 + STAGED_BYTES // bytes_of_block)


def launch(
    kernel: str, arrays, numbers: tuple[int, ...], outputs, *, grid: int, block: dict, **constants
) -> tuple[jax.Array, ...]:
    """Calls a kernel on arrays and the numbers of rows and of heads. Its outputs, (shape, dtype) each, vary
    over mesh axes as the first array does: a custom call's own carry none."""
    jax_triton, kernels = load_triton(__package__)
    found = jax_triton.triton_call(
        *arrays,
        *numbers,
        kernel=getattr(kernels, kernel),
        out_shape=[jax.ShapeDtypeStruct(*output) for output in outputs],
        grid=grid,
        **block,
        **constants,
    )
    return vary_alike(*found, arrays[0])[: len(outputs)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def norm(x, scale_D, epsilon, offset, launch):
    """Returns the norm. launch: calls the kernels, as the function of this name does."""
    return _forward(x, scale_D, epsilon, offset, launch)[0]


def _forward(x, scale_D, epsilon, offset, launch):
    """Returns the norm, and what the backward pass takes."""
    D = x.shape[-1]
    N, block = x.size // D, tile(D, **FORWARD)
    y, inverse_N = launch(
        "norm_forward",
        (x, scale_D),
        (N,),
        ((x.shape, x.dtype), ((N,), jnp.float32)),
        grid=-(-N // block["R"]),
        block=block,
        epsilon=epsilon,
        offset=offset,
        D=D,
    )
    return y, (x, scale_D, inverse_N)


def _backward(kept, dy, d_residual, offset, launch):
    """Returns the gradients of x, to which d_residual is added if there is one, and of the scale."""
    x, scale_D, inverse_N = kept
    D = x.shape[-1]
    N, block = x.size // D, tile(D, **BACKWARD)
    P = programs(N, block["R"], block["BD"])
    streams = 2 if d_residual is None else 3
    dx, d_scale_PD = launch(
        "norm_backward",
        # Where there is no d_residual nothing reads it.
        (x, scale_D, inverse_N, dy, dy if d_residual is None else d_residual),
        (N,),
        ((x.shape, x.dtype), ((P, D), jnp.float32)),
        grid=P,
        block=block,
        residual=d_residual is not None,
        programs=P,
        stages=stages(streams * block["R"] * block["BD"] * x.dtype.itemsize),
        offset=offset,
        D=D,
    )
    return dx, jnp.sum(d_scale_PD, axis=0).astype(scale_D.dtype)


norm.defvjp(_forward, lambda epsilon, offset, launch, kept, dy: _backward(kept, dy, None, offset, launch))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def norm_residual(x, scale_D, epsilon, offset, launch):
    """Returns x and its norm. launch: see `norm`."""
    return x, _forward(x, scale_D, epsilon, offset, launch)[0]


def _residual_forward(x, scale_D, epsilon, offset, launch):
    y, kept = _forward(x, scale_D, epsilon, offset, launch)
    return (x, y), kept


def _residual_backward(epsilon, offset, launch, kept, gradients):
    d_residual, dy = gradients
    return _backward(kept, dy, d_residual, offset, launch)


norm_residual.defvjp(_residual_forward, _residual_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def norm_rotary(x_BTHC, scale_C, cos, sin, epsilon, offset, launch):
    """Returns the rotated norm. launch: see `norm`."""
    return _rotary_forward(x_BTHC, scale_C, cos, sin, epsilon, offset, launch)[0]


def _head_tile(C: int, how: dict[str, int]) -> dict[str, int]:
    """Returns the tile of blocks of half heads: each thread has two such."""
    block = tile(C // 2, how["entries"] // 2, how["of_thread"] // 2)
    return {"R": block["R"], "BC": block["BD"], "num_warps": block["num_warps"]}


def _rotary_forward(x_BTHC, scale_C, cos, sin, epsilon, offset, launch):
    H, C = x_BTHC.shape[2:]
    N, block = x_BTHC.size // C, _head_tile(C, FORWARD)
    arrays = x_BTHC, scale_C, cos, sin
    y_BTHC, inverse_N = launch(
        "norm_rotary_forward",
        arrays,
        (N, H),
        ((x_BTHC.shape, x_BTHC.dtype), ((N,), jnp.float32)),
        grid=-(-N // block["R"]),
        block=block,
        epsilon=epsilon,
        offset=offset,
        C=C,
    )
    return y_BTHC, (*arrays, inverse_N)


def _rotary_backward(epsilon, offset, launch, kept, dy_BTHC):
    x_BTHC, scale_C, *_ = kept
    H, C = x_BTHC.shape[2:]
    N, block = x_BTHC.size // C, _head_tile(C, BACKWARD)
    P = programs(N, block["R"], 2 * block["BC"])
    dx_BTHC, d_scale_PC = launch(
        "norm_rotary_backward",
        (*kept, dy_BTHC),
        (N, H),
        ((x_BTHC.shape, x_BTHC.dtype), ((P, C), jnp.float32)),
        grid=P,
        block=block,
        programs=P,
        # Two arrays in halves, and cosines and sines in float32.
        stages=stages(block["R"] * block["BC"] * (4 * x_BTHC.dtype.itemsize + 8)),
        offset=offset,
        C=C,
    )
    return dx_BTHC, jnp.sum(d_scale_PC, axis=0).astype(scale_C.dtype), None, None


norm_rotary.defvjp(_rotary_forward, _rotary_backward)
