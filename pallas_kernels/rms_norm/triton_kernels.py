"""The device side of rms_norm/triton.py. Importing it needs Triton.

Letters: D width of a row, BD the power of two that holds it.
"""

import triton
import triton.language as tl


@triton.jit
def backward(
    x,
    scale,
    dy,
    d_residual,
    rows,
    dx,
    d_scale,
    epsilon: tl.constexpr,
    programs: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """Every `programs`th row from this program's number on. Grid: (programs,).

    x, dy, d_residual and dx [rows, D]; scale [D]. d_scale [programs, D], this program's rows summed.
    """
    first = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BD)
    scale_D = tl.load(scale + columns, mask=columns < D, other=0.0)
    d_scale_D = tl.zeros((BD,), tl.float32)
    for turn in range(0, tl.cdiv(rows, programs)):
        row = first + turn * programs
        at_D = row * D + columns
        exists = (columns < D) & (row < rows)
        x_D = tl.load(x + at_D, mask=exists, other=0.0).to(tl.float32)
        dy_D = tl.load(dy + at_D, mask=exists, other=0.0).to(tl.float32)
        d_residual_D = tl.load(d_residual + at_D, mask=exists, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x_D * x_D) / D + epsilon)
        normed_D = x_D * inverse
        d_normed_D = dy_D * scale_D
        along = tl.sum(d_normed_D * normed_D) / D
        dx_D = d_residual_D + inverse * (d_normed_D - along * normed_D)
        tl.store(dx + at_D, dx_D.to(dx.dtype.element_ty), mask=exists)
        d_scale_D += dy_D * normed_D
    tl.store(d_scale + first * D + columns, d_scale_D, mask=columns < D)
