"""The device side of routing/triton.py. Importing it needs Triton.

Letters: N tokens, E experts, K of each token, X = E + 1 with what is no expert's, R = N·K assignments, P
blocks of B assignments, D width; BN, BE, BK, BX, BP and BD the sizes of a block. Loads are masked where there
is nothing. Offsets of rows are int64.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(float("-inf"))
LOWEST_CHOICE = tl.constexpr(-1.7e38)  # two of them are a number
HIGHEST_CHOICE = tl.constexpr(3.4e38)


@triton.jit
def route(
    logits,
    valid,
    bias,
    tokens,
    ids,
    weights,
    E: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BN: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
):
    """One block of tokens. Grid: tokens / BN, rounded up.

    logits [N, E]; valid [N] int8; bias [E]; ids, weights [N, K]. SIGMOID, or a softmax; OF_CHOSEN:
    the choice is among logits, and weights are the softmax of those chosen.
    """
    token_N, exists_N, valid_N, _, _, logit_NE = block(logits, valid, tokens, E, BN, BE)
    expert_E = tl.arange(0, BE)
    inside_NE = tl.where((expert_E < E)[None, :], logit_NE, LOWEST)
    most_N, total_N = of_softmax(inside_NE)
    score_NE = scores(inside_NE, most_N, total_N, SIGMOID)
    of_what_NE = logit_NE if OF_CHOSEN else score_NE
    choice_NE = of_what_NE + tl.load(bias + expert_E, mask=expert_E < E, other=0.0)[None, :]
    # Of what is no more than what was chosen one expert would be found again. What is no number is chosen
    # first, so that its weight says so.
    choice_NE = tl.where(choice_NE == choice_NE, tl.maximum(choice_NE, LOWEST_CHOICE), HIGHEST_CHOICE)
    choice_NE = tl.where((expert_E < E)[None, :], choice_NE, LOWEST)
    if TOP_GROUPS < GROUPS:
        choice_NE = limit(choice_NE, expert_E, E // GROUPS, GROUPS, TOP_GROUPS, BN, BE)

    place_K = tl.arange(0, BK)
    id_NK = tl.zeros((BN, BK), tl.int32)
    for k in tl.static_range(K):
        # It is never more than E - 1; the compiler that is told so keeps to its registers.
        id_N = tl.minimum(tl.argmax(choice_NE, axis=1, tie_break_left=True), E - 1)
        choice_NE = tl.where(expert_E[None, :] == id_N[:, None], LOWEST, choice_NE)
        id_NK = tl.where((place_K == k)[None, :], id_N[:, None], id_NK)
    exists_K = (place_K < K)[None, :]
    exists_NK = exists_N[:, None] & exists_K
    chosen_NK = token_N.to(tl.int64)[:, None] * E + id_NK
    logit_NK = tl.load(logits + chosen_NK, mask=exists_NK & valid_N[:, None], other=0.0)
    if OF_CHOSEN:
        most_N, total_N = of_softmax(tl.where(exists_K, logit_NK, LOWEST))
    weight_NK = scores(logit_NK, most_N, total_N, SIGMOID)
    if NORMALISE:
        weight_NK = weight_NK / tl.sum(tl.where(exists_K, weight_NK, 0.0), axis=1)[:, None]
    at_NK = token_N.to(tl.int64)[:, None] * K + place_K[None, :]
    tl.store(ids + at_NK, tl.where(valid_N[:, None], id_NK, E), mask=exists_NK)
    tl.store(weights + at_NK, tl.where(valid_N[:, None], weight_NK * SCALE, 0.0), mask=exists_NK)


@triton.jit
def route_back(
    logits,
    valid,
    ids,
    d_weights,
    tokens,
    d_logits,
    E: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    SCALE: tl.constexpr,
    BN: tl.constexpr,
    BE: tl.constexpr,
):
    """The gradient of one block of tokens' logits by their weights. Grid: tokens / BN, rounded up.

    logits, d_logits [N, E]; valid [N] int8; ids, d_weights [N, K]; the rest as for `route`.
    """
    token_N, exists_N, valid_N, at_NE, exists_NE, logit_NE = block(logits, valid, tokens, E, BN, BE)
    expert_E = tl.arange(0, BE)

    chosen_NE = tl.zeros((BN, BE), tl.int1)
    d_score_NE = tl.zeros((BN, BE), tl.float32)
    for k in tl.static_range(K):
        at_N = token_N.to(tl.int64) * K + k
        id_N = tl.load(ids + at_N, mask=exists_N, other=E)
        is_NE = expert_E[None, :] == id_N[:, None]
        chosen_NE = chosen_NE | is_NE
        d_N = tl.load(d_weights + at_N, mask=exists_N, other=0.0) * SCALE
        d_score_NE = tl.where(is_NE, d_N[:, None], d_score_NE)
    among_NE = (expert_E < E)[None, :]
    if OF_CHOSEN:
        among_NE = among_NE & (chosen_NE | ~valid_N[:, None])  # a softmax of none would be no number
    inside_NE = tl.where(among_NE, logit_NE, LOWEST)
    most_N, total_N = of_softmax(inside_NE)
    score_NE = scores(inside_NE, most_N, total_N, SIGMOID)
    if NORMALISE:
        sum_N = tl.sum(tl.where(chosen_NE, score_NE, 0.0), axis=1)
        sum_N = tl.where(valid_N, sum_N, 1.0)
        mean_N = tl.sum(score_NE * d_score_NE, axis=1) / sum_N
        d_score_NE = tl.where(chosen_NE, (d_score_NE - mean_N[:, None]) / sum_N[:, None], 0.0)
    if SIGMOID:
        d_logit_NE = d_score_NE * score_NE * (1.0 - score_NE)
    else:
        d_logit_NE = score_NE * (d_score_NE - tl.sum(score_NE * d_score_NE, axis=1)[:, None])
    tl.store(d_logits + at_NE, tl.where(valid_N[:, None], d_logit_NE, 0.0), mask=exists_NE)


@triton.jit
def block(logits, valid, tokens, E: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr):
    """Returns a program's tokens, which of them exist and which are valid; where their logits are, which
    exist, and they, 0 where a token is not valid."""
    token_N = tl.program_id(0) * BN + tl.arange(0, BN)
    exists_N = token_N < tokens
    valid_N = tl.load(valid + token_N, mask=exists_N, other=0) != 0
    expert_E = tl.arange(0, BE)
    exists_NE = exists_N[:, None] & (expert_E < E)[None, :]
    at_NE = token_N.to(tl.int64)[:, None] * E + expert_E[None, :]
    logit_NE = tl.load(logits + at_NE, mask=exists_NE & valid_N[:, None], other=0.0)
    return token_N, exists_N, valid_N, at_NE, exists_NE, logit_NE


@triton.jit
def of_softmax(inside_NE):
    """Returns each token's largest logit, and the sum of the exponentials of what all are below it."""
    most_N = tl.max(inside_NE, axis=1)
    return most_N, tl.sum(tl.exp(inside_NE - most_N[:, None]), axis=1)


@triton.jit
def scores(logit_NX, most_N, total_N, SIGMOID: tl.constexpr):
    """Returns the scores of some of a token's logits; most_N, total_N: see `of_softmax`, of those that share
    the softmax."""
    return tl.sigmoid(logit_NX) if SIGMOID else tl.exp(logit_NX - most_N[:, None]) / total_N[:, None]


@triton.jit
def limit(
    choice_NE,
    expert_E,
    OF_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BN: tl.constexpr,
    BE: tl.constexpr,
):
    """Returns the choice with -inf in all groups but those whose best two have the largest sums.

    sums_NE: of its group's best two, at each expert, so that a group is found by its first expert.
    """
    sums_NE = tl.full((BN, BE), LOWEST, tl.float32)
    for group in tl.static_range(GROUPS):
        own_NE = (expert_E // OF_GROUP == group)[None, :]
        of_group_NE = tl.where(own_NE, choice_NE, LOWEST)
        best_N = tl.max(of_group_NE, axis=1)
        id_N = tl.argmax(of_group_NE, axis=1, tie_break_left=True)
        second_N = tl.max(tl.where(expert_E[None, :] == id_N[:, None], LOWEST, of_group_NE), axis=1)
        sums_NE = tl.where(own_NE, (best_N + second_N)[:, None], sums_NE)
    among_NE = tl.zeros((BN, BE), tl.int1)
    for _ in tl.static_range(TOP_GROUPS):
        group_N = tl.argmax(sums_NE, axis=1, tie_break_left=True) // OF_GROUP
        is_NE = (expert_E // OF_GROUP)[None, :] == group_N[:, None]
        among_NE = among_NE | is_NE
        sums_NE = tl.where(is_NE, LOWEST, sums_NE)
    return tl.where(among_NE, choice_NE, LOWEST)


@triton.jit
def count_blocks(
    ids, assignments, counts, P: tl.constexpr, X: tl.constexpr, B: tl.constexpr, BX: tl.constexpr
):  # fmt: skip
    """How many of one block's assignments go to each expert. Grid: (P,). ids [R]; counts [X, P]."""
    at_B = tl.program_id(0) * B + tl.arange(0, B)
    id_B = tl.load(ids + at_B, mask=at_B < assignments, other=X)
    expert_X = tl.arange(0, BX)
    count_X = tl.sum((id_B[:, None] == expert_X[None, :]).to(tl.int32), axis=0)
    tl.store(counts + expert_X * P + tl.program_id(0), count_X, mask=expert_X < X)


@triton.jit
def sum_blocks(counts, before, sizes, P: tl.constexpr, BP: tl.constexpr):
    """Of one expert, the assignments in all blocks before each. Grid: (X,). counts, before [X, P]; sizes
    [X]."""
    at = tl.program_id(0) * P
    so_far = tl.zeros((), tl.int32)
    for first in range(0, P, BP):
        block_P = first + tl.arange(0, BP)
        count_P = tl.load(counts + at + block_P, mask=block_P < P, other=0)
        tl.store(before + at + block_P, so_far + tl.cumsum(count_P, axis=0) - count_P, mask=block_P < P)
        so_far += tl.sum(count_P, axis=0)
    tl.store(sizes + tl.program_id(0), so_far)


@triton.jit
def place(ids, before, begins, assignments, order, inverse, P: tl.constexpr, B: tl.constexpr):
    """Where each of one block's assignments goes. Grid: (P,).

    ids, order, inverse [R]; before [X, P]; begins [X]: each expert's first row. Each place is written once.
    """
    within_B = tl.arange(0, B)
    at_B = tl.program_id(0) * B + within_B
    exists_B = at_B < assignments
    id_B = tl.load(ids + at_B, mask=exists_B, other=0)
    # The same ids along the other dim.
    other_B = tl.load(ids + at_B, mask=exists_B, other=-1)
    earlier_BB = (other_B[None, :] == id_B[:, None]) & (within_B[None, :] < within_B[:, None])
    row_B = tl.sum(earlier_BB.to(tl.int32), axis=1)
    row_B += tl.load(begins + id_B, mask=exists_B, other=0)
    row_B += tl.load(before + id_B * P + tl.program_id(0), mask=exists_B, other=0)
    tl.store(inverse + at_B, row_B, mask=exists_B)
    tl.store(order + row_B, at_B, mask=exists_B)


@triton.jit
def dispatch(
    x, inverse, sized, tokens, y, K: tl.constexpr, D: tl.constexpr, B: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """The rows of one block of tokens, one part of their width. Grid: (tokens / B, D / BD), each rounded up.
    x [tokens, D]; inverse [tokens, K], of those that have an expert all different ones; sized [1]: rows that
    have one; y [R, D], where others are not written."""
    token_B = tl.program_id(0) * B + tl.arange(0, B)
    column_D = tl.program_id(1) * BD + tl.arange(0, BD)
    exists_B = token_B < tokens
    sized_1 = tl.load(sized)
    at_BD = token_B.to(tl.int64)[:, None] * D + column_D[None, :]
    x_BD = tl.load(x + at_BD, mask=exists_B[:, None] & (column_D < D)[None, :], other=0.0)
    for k in tl.static_range(K):
        row_B = tl.load(inverse + token_B * K + k, mask=exists_B, other=0)
        has_BD = (exists_B & (row_B < sized_1))[:, None] & (column_D < D)[None, :]
        to_BD = row_B.to(tl.int64)[:, None] * D + column_D[None, :]
        tl.store(y + to_BD, x_BD, mask=has_BD, eviction_policy="evict_first")


@triton.jit
def combine(
    y, inverse, sized, tokens, x, K: tl.constexpr, D: tl.constexpr, B: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """The sums of one block of tokens' rows, one part of their width. Grid: (tokens / B, D / BD), each
    rounded up. y [R, D]; inverse [tokens, K]; sized [1]: rows that have an expert, others are not read;
    x [tokens, D]."""
    token_B = tl.program_id(0) * B + tl.arange(0, B)
    column_D = tl.program_id(1) * BD + tl.arange(0, BD)
    exists_B = token_B < tokens
    sized_1 = tl.load(sized)
    sum_BD = tl.zeros((B, BD), tl.float32)
    for k in tl.static_range(K):
        row_B = tl.load(inverse + token_B * K + k, mask=exists_B, other=0)
        has_BD = (exists_B & (row_B < sized_1))[:, None] & (column_D < D)[None, :]
        at_BD = row_B.to(tl.int64)[:, None] * D + column_D[None, :]
        sum_BD += tl.load(y + at_BD, mask=has_BD, other=0.0).to(tl.float32)
    to_BD = token_B.to(tl.int64)[:, None] * D + column_D[None, :]
    x_BD = sum_BD.to(x.dtype.element_ty)
    exists_BD = exists_B[:, None] & (column_D < D)[None, :]
    tl.store(x + to_BD, x_BD, mask=exists_BD, eviction_policy="evict_first")
