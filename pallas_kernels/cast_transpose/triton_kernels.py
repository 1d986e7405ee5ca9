"""The device side of cast_transpose/triton.py. Importing it needs Triton.

Letters: R rows, C columns; BR and BC of a tile; W words of four rows.
"""

import triton
import triton.language as tl


@triton.jit
def cast_transpose(
    x, up, values, transposed, R: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """One tile. Grid: (C / BC, R / BR), rounded up. x, values [R, C]; up [1]; transposed [C, R], in words of
    four rows: a byte alone would be a store alone."""
    factor = tl.load(up)
    word_W = tl.program_id(1) * (BR // 4) + tl.arange(0, BR // 4)
    column_C = tl.program_id(0) * BC + tl.arange(0, BC)
    exists_WC = (word_W < R // 4)[:, None] & (column_C < C)[None, :]
    at_WC = word_W.to(tl.int64)[:, None] * (4 * C) + column_C[None, :]
    word_WC = tl.zeros((BR // 4, BC), tl.uint32)
    for row in tl.static_range(4):
        x_WC = tl.load(x + at_WC + row * C, mask=exists_WC, other=0.0)
        value_WC = (x_WC.to(tl.float32) * factor).to(values.dtype.element_ty)
        tl.store(values + at_WC + row * C, value_WC, mask=exists_WC)
        word_WC |= value_WC.to(tl.uint8, bitcast=True).to(tl.uint32) << (8 * row)
    at_CW = column_C.to(tl.int64)[:, None] * (R // 4) + word_W[None, :]
    words = transposed.to(tl.pointer_type(tl.uint32), bitcast=True)
    tl.store(words + at_CW, tl.trans(word_WC), mask=tl.trans(exists_WC))
