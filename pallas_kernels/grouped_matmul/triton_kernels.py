"""The device side of grouped_matmul/triton.py. Importing it needs Triton.

Letters: R rows, E groups, I columns of the rows, O of the results, P tiles of rows; BR, BI and BO the sizes
of a block. Offsets of rows and of matrices are int64: there may be more than 2**31 entries.

Rows of other groups, or of none, are never loaded: of a block that has fewer rows the last one is loaded
again, or zeros where rows are summed. What is not a number in them reaches nothing.
"""

import triton
import triton.language as tl


@triton.jit
def grouped_matmul(
    x,
    w,
    groups,
    firsts,
    ends,
    y,
    I: tl.constexpr,  # noqa: E741
    O: tl.constexpr,  # noqa: E741
    E: tl.constexpr,
    P: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BR: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
    BAND: tl.constexpr,
):
    """One tile of the result. Grid: (P × O / BO, rounded up).

    x [R, I]; w [E, I, O], or [E, O, I] where TRANSPOSED; y [R, O]. groups, firsts, ends [P]: of each tile its
    group, first row, and the row behind the group's last. BAND tiles of rows are taken column by column.
    """
    band = tl.program_id(0) // (BAND * tl.cdiv(O, BO)) * BAND
    within = tl.program_id(0) % (BAND * tl.cdiv(O, BO))
    high = tl.minimum(P - band, BAND)
    tile = band + within % high
    group = tl.load(groups + tile)
    if group == E:
        return
    end = tl.load(ends + tile)
    row_R = tl.load(firsts + tile) + tl.arange(0, BR)
    column_O = within // high * BO + tl.arange(0, BO)
    column_I = tl.arange(0, BI)
    x_at = x + tl.minimum(row_R, end - 1).to(tl.int64)[:, None] * I + column_I[None, :]
    if TRANSPOSED:
        w_at = w + group.to(tl.int64) * (I * O) + column_O[None, :] * I + column_I[:, None]
    else:
        w_at = w + group.to(tl.int64) * (I * O) + column_I[:, None] * O + column_O[None, :]
    exists_O = (column_O < O)[None, :]
    sum_RO = tl.zeros((BR, BO), tl.float32)
    for first in range(0, I, BI):
        if I % BI == 0:
            x_RI = tl.load(x_at)
        else:
            x_RI = tl.load(x_at, mask=(first + column_I < I)[None, :], other=0.0)
        if I % BI == 0 and O % BO == 0:
            w_IO = tl.load(w_at)
        else:
            w_IO = tl.load(w_at, mask=(first + column_I < I)[:, None] & exists_O, other=0.0)
        sum_RO = tl.dot(x_RI, w_IO, sum_RO, input_precision="ieee")
        x_at += BI
        w_at += BI if TRANSPOSED else BI * O
    y_at = y + row_R.to(tl.int64)[:, None] * O + column_O[None, :]
    tl.store(y_at, sum_RO.to(y.dtype.element_ty), mask=(row_R < end)[:, None] & exists_O)


@triton.jit
def grouped_outer(
    x,
    y,
    begins,
    sizes,
    into,
    sums,
    ADDED: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    O: tl.constexpr,  # noqa: E741
    BI: tl.constexpr,
    BO: tl.constexpr,
    BR: tl.constexpr,
):
    """One tile of one group's sum. Grid: (E × I / BI × O / BO, each rounded up).

    x [R, I]; y [R, O]; begins, sizes [E]: of each group its first row and how many; sums [E, I, O]. into
    float32 [E, I, O], which may be `sums`: added where ADDED, else not read.
    """
    tiles_O: tl.constexpr = tl.cdiv(O, BO)
    tiles: tl.constexpr = tl.cdiv(I, BI) * tiles_O
    group = tl.program_id(0) // tiles
    within = tl.program_id(0) % tiles
    size = tl.load(sizes + group)
    begin = tl.load(begins + group).to(tl.int64)
    column_I = within // tiles_O * BI + tl.arange(0, BI)
    column_O = within % tiles_O * BO + tl.arange(0, BO)
    exists_I, exists_O = (column_I < I)[None, :], (column_O < O)[None, :]
    row_R = tl.arange(0, BR)
    x_at = x + (begin + row_R)[:, None] * I + column_I[None, :]
    y_at = y + (begin + row_R)[:, None] * O + column_O[None, :]
    at = group.to(tl.int64) * (I * O) + column_I[:, None] * O + column_O[None, :]
    exists_IO = (column_I < I)[:, None] & exists_O
    # From the start: at the end there would be no registers for it.
    sum_IO = tl.load(into + at, mask=exists_IO, other=0.0) if ADDED else tl.zeros((BI, BO), tl.float32)
    whole = size // BR * BR
    for _ in range(0, whole, BR):
        x_RI = tl.load(x_at) if I % BI == 0 else tl.load(x_at, mask=exists_I, other=0.0)
        y_RO = tl.load(y_at) if O % BO == 0 else tl.load(y_at, mask=exists_O, other=0.0)
        sum_IO = tl.dot(tl.trans(x_RI), y_RO, sum_IO, input_precision="ieee")
        x_at += BR * I
        y_at += BR * O
    if whole < size:
        own_R = (row_R < size - whole)[:, None]
        x_RI = tl.load(x_at, mask=own_R & exists_I, other=0.0)
        y_RO = tl.load(y_at, mask=own_R & exists_O, other=0.0)
        sum_IO = tl.dot(tl.trans(x_RI), y_RO, sum_IO, input_precision="ieee")
    tl.store(sums + at, sum_IO.to(sums.dtype.element_ty), mask=exists_IO)
