"""The device side of rms_norm/triton.py. Importing it needs Triton.

Letters: R rows of a block, D width of a row, C of a head; BD and BC the powers of two that hold D and C/2.
Loads are masked where a row or a column does not exist, and give 0 there, which adds nothing to any sum.

Arrays of activations are read once and have no place in the cache, where the scale is to stay.
"""

import triton
import triton.language as tl


@triton.jit
def norm_forward(
    x,
    scale,
    rows,
    y,
    inverse,
    epsilon: tl.constexpr,
    offset: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    R: tl.constexpr,
):
    """One block of rows. Grid: rows / R, rounded up. x, y [rows, D]; scale [D]. inverse [rows]: of the roots,
    which the backward pass takes."""
    column_D = tl.arange(0, BD)
    row_R, exists_R, at_RD, exists_RD = places(tl.program_id(0), rows, column_D, D, D, R)
    x_RD = tl.load(x + at_RD, mask=exists_RD, other=0.0, eviction_policy="evict_first").to(tl.float32)
    scale_RD = scales(scale + column_D, column_D < D, offset, R, BD)
    inverse_R = tl.rsqrt(tl.sum(x_RD * x_RD, axis=1) / D + epsilon)
    y_RD = x_RD * inverse_R[:, None] * scale_RD
    tl.store(y + at_RD, y_RD.to(y.dtype.element_ty), mask=exists_RD)
    tl.store(inverse + row_R, inverse_R, mask=exists_R)


@triton.jit
def norm_backward(
    x,
    scale,
    inverse,
    dy,
    d_residual,
    rows,
    dx,
    d_scale,
    residual: tl.constexpr,
    programs: tl.constexpr,
    stages: tl.constexpr,
    offset: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    R: tl.constexpr,
):
    """Every `programs`th block of rows from this program's number on. Grid: (programs,).

    x, dy, dx [rows, D]; scale [D]; inverse [rows]. d_residual [rows, D], which `residual` has added to dx and
    which else is not read. d_scale [programs, D]: this program's rows summed. stages: how many blocks are
    loaded or worked on at once.
    """
    column_D = tl.arange(0, BD)
    scale_RD = scales(scale + column_D, column_D < D, offset, R, BD)
    d_scale_RD = tl.zeros((R, BD), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, R), programs, num_stages=stages):
        row_R, exists_R, at_RD, exists_RD = places(block, rows, column_D, D, D, R)
        x_RD = tl.load(x + at_RD, mask=exists_RD, other=0.0).to(tl.float32)
        dy_RD = tl.load(dy + at_RD, mask=exists_RD, other=0.0).to(tl.float32)
        inverse_R = tl.load(inverse + row_R, mask=exists_R, other=0.0)
        normed_RD = x_RD * inverse_R[:, None]
        d_scale_RD += dy_RD * normed_RD
        d_normed_RD = dy_RD * scale_RD
        along_R = tl.sum(d_normed_RD * normed_RD, axis=1) / D
        dx_RD = inverse_R[:, None] * (d_normed_RD - along_R[:, None] * normed_RD)
        if residual:
            dx_RD += tl.load(d_residual + at_RD, mask=exists_RD, other=0.0).to(tl.float32)
        tl.store(dx + at_RD, dx_RD.to(dx.dtype.element_ty), mask=exists_RD)
    at_D = tl.program_id(0) * D + column_D
    tl.store(d_scale + at_D, tl.sum(d_scale_RD, axis=0), mask=column_D < D)


@triton.jit
def norm_rotary_forward(
    x,
    scale,
    cos,
    sin,
    rows,
    heads,
    y,
    inverse,
    epsilon: tl.constexpr,
    offset: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    R: tl.constexpr,
):
    """As `norm_forward`, of heads: each row is one of a token's `heads`. x, y [rows, C]; cos, sin
    [rows / heads, C/2]. The halves of a row, which a rotation mixes, are loaded apart."""
    column_C = tl.arange(0, BC)
    row_R, exists_R, at_RC, exists_RC = places(tl.program_id(0), rows, column_C, C // 2, C, R)
    first_RC = tl.load(x + at_RC, mask=exists_RC, other=0.0, eviction_policy="evict_first").to(tl.float32)
    second_RC = tl.load(x + at_RC + C // 2, mask=exists_RC, other=0.0, eviction_policy="evict_first")
    second_RC = second_RC.to(tl.float32)
    scale_RC = scales(scale + column_C, column_C < C // 2, offset, R, BC)
    scale2_RC = scales(scale + column_C + C // 2, column_C < C // 2, offset, R, BC)
    angle_RC = (row_R // heads)[:, None] * (C // 2) + column_C[None, :]
    cos_RC = tl.load(cos + angle_RC, mask=exists_RC, other=0.0)
    sin_RC = tl.load(sin + angle_RC, mask=exists_RC, other=0.0)

    inverse_R = tl.rsqrt(tl.sum(first_RC * first_RC + second_RC * second_RC, axis=1) / C + epsilon)
    first_RC = first_RC * inverse_R[:, None] * scale_RC
    second_RC = second_RC * inverse_R[:, None] * scale2_RC
    y_type = y.dtype.element_ty
    tl.store(y + at_RC, (first_RC * cos_RC - second_RC * sin_RC).to(y_type), mask=exists_RC)
    tl.store(y + at_RC + C // 2, (second_RC * cos_RC + first_RC * sin_RC).to(y_type), mask=exists_RC)
    tl.store(inverse + row_R, inverse_R, mask=exists_R)


@triton.jit
def norm_rotary_backward(
    x,
    scale,
    cos,
    sin,
    inverse,
    dy,
    rows,
    heads,
    dx,
    d_scale,
    programs: tl.constexpr,
    stages: tl.constexpr,
    offset: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    R: tl.constexpr,
):
    """As `norm_backward`, of heads; see `norm_rotary_forward`. The gradient is rotated back first."""
    column_C = tl.arange(0, BC)
    scale_RC = scales(scale + column_C, column_C < C // 2, offset, R, BC)
    scale2_RC = scales(scale + column_C + C // 2, column_C < C // 2, offset, R, BC)
    d_scale_RC = tl.zeros((R, BC), tl.float32)
    d_scale2_RC = tl.zeros((R, BC), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, R), programs, num_stages=stages):
        row_R, exists_R, at_RC, exists_RC = places(block, rows, column_C, C // 2, C, R)
        first_RC = tl.load(x + at_RC, mask=exists_RC, other=0.0).to(tl.float32)
        second_RC = tl.load(x + at_RC + C // 2, mask=exists_RC, other=0.0).to(tl.float32)
        dy_RC = tl.load(dy + at_RC, mask=exists_RC, other=0.0).to(tl.float32)
        dy2_RC = tl.load(dy + at_RC + C // 2, mask=exists_RC, other=0.0).to(tl.float32)
        angle_RC = (row_R // heads)[:, None] * (C // 2) + column_C[None, :]
        cos_RC = tl.load(cos + angle_RC, mask=exists_RC, other=0.0)
        sin_RC = tl.load(sin + angle_RC, mask=exists_RC, other=0.0)
        inverse_R = tl.load(inverse + row_R, mask=exists_R, other=0.0)

        back_RC = dy_RC * cos_RC + dy2_RC * sin_RC
        back2_RC = dy2_RC * cos_RC - dy_RC * sin_RC
        first_RC *= inverse_R[:, None]
        second_RC *= inverse_R[:, None]
        d_scale_RC += back_RC * first_RC
        d_scale2_RC += back2_RC * second_RC
        back_RC *= scale_RC
        back2_RC *= scale2_RC
        along_R = tl.sum(back_RC * first_RC + back2_RC * second_RC, axis=1) / C
        first_RC = inverse_R[:, None] * (back_RC - along_R[:, None] * first_RC)
        second_RC = inverse_R[:, None] * (back2_RC - along_R[:, None] * second_RC)
        tl.store(dx + at_RC, first_RC.to(dx.dtype.element_ty), mask=exists_RC)
        tl.store(dx + at_RC + C // 2, second_RC.to(dx.dtype.element_ty), mask=exists_RC)
    at_C = tl.program_id(0) * C + column_C
    tl.store(d_scale + at_C, tl.sum(d_scale_RC, axis=0), mask=column_C < C // 2)
    tl.store(d_scale + at_C + C // 2, tl.sum(d_scale2_RC, axis=0), mask=column_C < C // 2)


@triton.jit
def places(block, rows, column_D, width: tl.constexpr, stride: tl.constexpr, R: tl.constexpr):
    """Returns a block's rows [R], which of them exist, where their entries are [R, D], and which of these
    exist. stride: from a row to the next."""
    row_R = block * R + tl.arange(0, R)
    exists_R = row_R < rows
    at_RD = row_R.to(tl.int64)[:, None] * stride + column_D[None, :]
    return row_R, exists_R, at_RD, exists_R[:, None] & (column_D < width)[None, :]


@triton.jit
def scales(scale_D, exists_D, offset: tl.constexpr, R: tl.constexpr, BD: tl.constexpr):
    """Returns the scale for each row, loaded as rows are: it would else change threads by shared memory."""
    scale_RD = tl.broadcast_to(scale_D[None, :], (R, BD))
    exists_RD = tl.broadcast_to(exists_D[None, :], (R, BD))
    return tl.load(scale_RD, mask=exists_RD, other=0.0).to(tl.float32) + offset
