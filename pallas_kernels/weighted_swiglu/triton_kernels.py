"""The device side of weighted_swiglu/triton.py. Importing it needs Triton.

Letters: R rows, M width; BR and BM of a block, by which the width is gone over. Loads are masked where a row
or a column does not exist.
"""

import triton
import triton.language as tl


@triton.jit
def weighted_swiglu(
    gate_up, weights, sized, rows, y, M: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """One block of rows. Grid: rows / BR, rounded up. gate_up [rows, 2, M]; weights [rows]; sized [1]: rows
    that count, others need not be made; y [rows, M]."""
    if tl.program_id(0) * BR >= tl.load(sized):
        return
    row_R = tl.program_id(0) * BR + tl.arange(0, BR)
    weight_R = tl.load(weights + row_R, mask=row_R < rows, other=0.0)
    for first in tl.static_range(0, M, BM):
        at_RM, exists_RM = places(row_R, rows, first, M, BM)
        from_RM = at_RM + (row_R.to(tl.int64) * M)[:, None]
        gate_RM = tl.load(gate_up + from_RM, mask=exists_RM, other=0.0).to(tl.float32)
        up_RM = tl.load(gate_up + from_RM + M, mask=exists_RM, other=0.0).to(tl.float32)
        y_RM = gate_RM * tl.sigmoid(gate_RM) * up_RM * weight_R[:, None]
        tl.store(y + at_RM, y_RM.to(y.dtype.element_ty), mask=exists_RM)


@triton.jit
def weighted_swiglu_backward(
    gate_up,
    weights,
    dy,
    sized,
    rows,
    d_gate_up,
    d_weights,
    M: tl.constexpr,
    BR: tl.constexpr,
    BM: tl.constexpr,
):
    """As `weighted_swiglu`. dy [rows, M]; d_gate_up [rows, 2, M]; d_weights [rows]."""
    if tl.program_id(0) * BR >= tl.load(sized):
        return
    row_R = tl.program_id(0) * BR + tl.arange(0, BR)
    weight_R = tl.load(weights + row_R, mask=row_R < rows, other=0.0)
    d_weight_R = tl.zeros((BR,), tl.float32)
    for first in tl.static_range(0, M, BM):
        at_RM, exists_RM = places(row_R, rows, first, M, BM)
        from_RM = at_RM + (row_R.to(tl.int64) * M)[:, None]
        gate_RM = tl.load(gate_up + from_RM, mask=exists_RM, other=0.0).to(tl.float32)
        up_RM = tl.load(gate_up + from_RM + M, mask=exists_RM, other=0.0).to(tl.float32)
        dy_RM = tl.load(dy + at_RM, mask=exists_RM, other=0.0).to(tl.float32)
        open_RM = tl.sigmoid(gate_RM)
        silu_RM = gate_RM * open_RM
        d_weight_R += tl.sum(dy_RM * silu_RM * up_RM, axis=1)
        d_hidden_RM = dy_RM * weight_R[:, None]
        d_gate_RM = d_hidden_RM * up_RM * (open_RM + silu_RM * (1 - open_RM))
        tl.store(d_gate_up + from_RM, d_gate_RM.to(d_gate_up.dtype.element_ty), mask=exists_RM)
        d_up_RM = d_hidden_RM * silu_RM
        tl.store(d_gate_up + from_RM + M, d_up_RM.to(d_gate_up.dtype.element_ty), mask=exists_RM)
    tl.store(d_weights + row_R, d_weight_R, mask=row_R < rows)


@triton.jit
def places(row_R, rows, first, M: tl.constexpr, BM: tl.constexpr):
    """Returns where a block's entries are in an array [rows, M], and which of them exist."""
    column_M = first + tl.arange(0, BM)
    exists_RM = (row_R < rows)[:, None] & (column_M < M)[None, :]
    return row_R.to(tl.int64)[:, None] * M + column_M[None, :], exists_RM
