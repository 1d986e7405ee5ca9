"""The device side of attention/triton.py. Importing it needs Triton.

`first` and `last` say what each token may see, and be seen by: its segment, or so much of it as lies within a
window. A block of queries meets the keys from its first query's `first` up to its own last query, and a block
of keys the queries from its own first key up to its last key's `last`: what lies outside is never read. In
between, only the blocks at the rims need a mask: of the three parts that each of these ranges has, the middle
one has none.

Scores are kept in base 2: `scale` is C**-0.5 × log2(e), and `statistics` holds log2 of each query's sum.

Letters: T tokens of a row, H query heads, K key heads, C width of a head; BQ and BK queries and keys of a
block; arrays are [B, T, heads, C] but `statistics` and `delta`, which are [B, H, T], and `first` and `last`,
the first key that each token sees and the last query that sees it, [B, T], neither of which ever falls.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)  # finite, so that a row whose block is all masked makes no NaN


@triton.jit
def _rows(start, T: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, N: tl.constexpr):
    """Returns the offsets [N, C] of N tokens of one head, and which tokens exist [N]."""
    tokens = start + tl.arange(0, N)
    return tokens[:, None] * (HEADS * C) + tl.arange(0, C)[None, :], tokens < T


@triton.jit
def _parts(low, high, free_low, free_high):
    """Returns the ends of the three parts of [low, high): masked, free of masks, masked."""
    some = free_low < free_high
    return tl.where(some, free_low, high), tl.where(some, free_high, high)


@triton.jit
def _keys_of(first, start, T: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr):
    """Returns low, the two inner ends and high of the keys that the queries at `start` meet."""
    high = tl.minimum(start + BQ, T)
    low = tl.load(first + start) // BK * BK
    free_low = tl.cdiv(tl.load(first + high - 1), BK) * BK
    free_low_end, free_high = _parts(low, high, free_low, start // BK * BK)
    return low, free_low_end, free_high, high


@triton.jit
def _forward_part(
    acc, top, total, q, k, v, first_q, q_tokens, low, high, scale,
    T: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for start in tl.range(low, high, BK):
        offsets, exists = _rows(start, T, K, C, BK)
        k_tile = tl.load(k + offsets, mask=exists[:, None], other=0.0) if MASKED else tl.load(k + offsets)
        scores = tl.dot(q, tl.trans(k_tile))
        if MASKED:
            tokens = start + tl.arange(0, BK)
            seen = (tokens[None, :] <= q_tokens[:, None]) & (tokens[None, :] >= first_q[:, None])
            scores = tl.where(seen, scores * scale, LOWEST)
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            v_tile = tl.load(v + offsets, mask=exists[:, None], other=0.0)
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new_top[:, None])
            v_tile = tl.load(v + offsets)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None])
        top = new_top
    return acc, top, total


@triton.jit
def forward(
    q, k, v, first, o, statistics,
    scale: tl.constexpr, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. Grid: (blocks of queries, H, B)."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BQ  # the late blocks have the most keys
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    first += row * T
    q += row * T * H * C + head * C
    o += row * T * H * C + head * C
    k += row * T * K * C + head // (H // K) * C
    v += row * T * K * C + head // (H // K) * C
    statistics += (row * H + head) * T

    offsets, exists = _rows(start, T, H, C, BQ)
    tokens = start + tl.arange(0, BQ)
    first_q = tl.load(first + tokens, mask=exists, other=0)
    q_tile = tl.load(q + offsets, mask=exists[:, None], other=0.0)
    acc = tl.zeros([BQ, C], tl.float32)
    top = tl.full([BQ], float("-inf"), tl.float32)
    total = tl.zeros([BQ], tl.float32)
    low, inner, outer, high = _keys_of(first, start, T, BQ, BK)
    acc, top, total = _forward_part(
        acc, top, total, q_tile, k, v, first_q, tokens, low, inner, scale, T, K, C, BK, True
    )
    acc, top, total = _forward_part(
        acc, top, total, q_tile, k, v, first_q, tokens, inner, outer, scale, T, K, C, BK, False
    )
    acc, top, total = _forward_part(
        acc, top, total, q_tile, k, v, first_q, tokens, outer, high, scale, T, K, C, BK, True
    )
    tl.store(o + offsets, (acc / total[:, None]).to(o.dtype.element_ty), mask=exists[:, None])
    tl.store(statistics + tokens, top + tl.log2(total), mask=exists)


@triton.jit
def _dq_part(
    dq, q, do, statistic, delta, k, v, first_q, q_tokens, low, high, scale,
    T: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for start in tl.range(low, high, BK):
        offsets, exists = _rows(start, T, K, C, BK)
        if MASKED:
            k_tile = tl.load(k + offsets, mask=exists[:, None], other=0.0)
            v_tile = tl.load(v + offsets, mask=exists[:, None], other=0.0)
        else:
            k_tile = tl.load(k + offsets)
            v_tile = tl.load(v + offsets)
        weights = tl.exp2(tl.dot(q, tl.trans(k_tile)) * scale - statistic[:, None])
        if MASKED:
            tokens = start + tl.arange(0, BK)
            seen = (tokens[None, :] <= q_tokens[:, None]) & (tokens[None, :] >= first_q[:, None])
            weights = tl.where(seen, weights, 0.0)
        d_scores = weights * (tl.dot(do, tl.trans(v_tile)) - delta[:, None])
        dq = tl.dot(d_scores.to(k_tile.dtype), k_tile, dq)
    return dq


@triton.jit
def backward_q(
    q, k, v, do, statistics, delta, first, dq,
    scale: tl.constexpr, root: tl.constexpr, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of queries of one head. Grid: (blocks of queries, H, B). root: C**-0.5."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BQ
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    first += row * T
    q += row * T * H * C + head * C
    do += row * T * H * C + head * C
    dq += row * T * H * C + head * C
    k += row * T * K * C + head // (H // K) * C
    v += row * T * K * C + head // (H // K) * C
    statistics += (row * H + head) * T
    delta += (row * H + head) * T

    offsets, exists = _rows(start, T, H, C, BQ)
    tokens = start + tl.arange(0, BQ)
    first_q = tl.load(first + tokens, mask=exists, other=0)
    q_tile = tl.load(q + offsets, mask=exists[:, None], other=0.0)
    do_tile = tl.load(do + offsets, mask=exists[:, None], other=0.0)
    statistic = tl.load(statistics + tokens, mask=exists, other=0.0)
    delta_q = tl.load(delta + tokens, mask=exists, other=0.0)
    acc = tl.zeros([BQ, C], tl.float32)
    low, inner, outer, high = _keys_of(first, start, T, BQ, BK)
    acc = _dq_part(
        acc, q_tile, do_tile, statistic, delta_q, k, v, first_q, tokens, low, inner, scale, T, K, C, BK, True
    )
    acc = _dq_part(
        acc, q_tile, do_tile, statistic, delta_q, k, v, first_q, tokens, inner, outer, scale,
        T, K, C, BK, False,
    )  # fmt: skip
    acc = _dq_part(
        acc, q_tile, do_tile, statistic, delta_q, k, v, first_q, tokens, outer, high, scale, T, K, C, BK, True
    )
    tl.store(dq + offsets, (acc * root).to(dq.dtype.element_ty), mask=exists[:, None])


@triton.jit
def backward_kv(
    q, k, v, do, statistics, delta, first, last, dk, dv,
    scale: tl.constexpr, root: tl.constexpr, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of keys of one key head, summed over its query heads.

    Grid: (blocks of keys, K, B). root: C**-0.5.
    """
    start = tl.program_id(0) * BK  # the early blocks have the most queries
    key_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    first += row * T
    last += row * T
    k += row * T * K * C + key_head * C
    v += row * T * K * C + key_head * C
    dk += row * T * K * C + key_head * C
    dv += row * T * K * C + key_head * C
    q += row * T * H * C + key_head * (H // K) * C
    do += row * T * H * C + key_head * (H // K) * C
    statistics += (row * H + key_head * (H // K)) * T
    delta += (row * H + key_head * (H // K)) * T

    offsets_k, exists_k = _rows(start, T, K, C, BK)
    tokens_k = start + tl.arange(0, BK)
    k_tile = tl.load(k + offsets_k, mask=exists_k[:, None], other=0.0)
    v_tile = tl.load(v + offsets_k, mask=exists_k[:, None], other=0.0)
    acc_k = tl.zeros([BK, C], tl.float32)
    acc_v = tl.zeros([BK, C], tl.float32)
    low = start // BQ * BQ
    high = tl.load(last + tl.minimum(start + BK, T) - 1) + 1
    free_low = tl.cdiv(start + BK - 1, BQ) * BQ
    free_high = (tl.load(last + start) + 1) // BQ * BQ
    inner, outer = _parts(low, high, free_low, free_high)
    # One loop for all parts and query heads: loads go on from one to the next, and it takes fewer registers.
    steps = tl.cdiv(high - low, BQ)
    for step in tl.range(0, steps * (H // K)):
        member = step // steps
        begin = low + (step - member * steps) * BQ
        offsets, exists = _rows(begin, T, H, C, BQ)
        tokens = begin + tl.arange(0, BQ)
        q_tile = tl.load(q + member * C + offsets, mask=exists[:, None], other=0.0)
        do_tile = tl.load(do + member * C + offsets, mask=exists[:, None], other=0.0)
        statistic = tl.load(statistics + member * T + tokens, mask=exists, other=0.0)
        delta_q = tl.load(delta + member * T + tokens, mask=exists, other=0.0)
        scores = tl.dot(k_tile, tl.trans(q_tile))
        d_weights = tl.dot(v_tile, tl.trans(do_tile))  # here, so that it runs beside the exponentials
        weights = tl.exp2(scores * scale - statistic[None, :])
        if (begin < inner) | (begin >= outer):
            first_q = tl.load(first + tokens, mask=exists, other=T)
            seen = (tokens_k[:, None] <= tokens[None, :]) & (tokens_k[:, None] >= first_q[None, :])
            weights = tl.where(seen, weights, 0.0)
        acc_v = tl.dot(weights.to(do_tile.dtype), do_tile, acc_v)
        d_scores = weights * (d_weights - delta_q[None, :])
        acc_k = tl.dot(d_scores.to(q_tile.dtype), q_tile, acc_k)
    tl.store(dk + offsets_k, (acc_k * root).to(dk.dtype.element_ty), mask=exists_k[:, None])
    tl.store(dv + offsets_k, acc_v.to(dv.dtype.element_ty), mask=exists_k[:, None])
