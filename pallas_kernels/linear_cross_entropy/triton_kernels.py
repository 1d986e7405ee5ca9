"""The device side of linear_cross_entropy/triton.py. Importing it needs Triton.

Letters: C tokens of a chunk, V vocabulary (this device's part); BV columns of a block.
"""

import triton
import triton.language as tl


@triton.jit
def logits_gradient(
    logits, log_z, targets, weights, d_logits, z_loss: tl.constexpr, V: tl.constexpr, BV: tl.constexpr
):
    """One block of columns of one token. Grid: (C, blocks of columns).

    logits, d_logits [C, V], which may be one and the same: each program reads just what it writes.
    log_z, targets and weights [C].
    """
    token = tl.program_id(0)
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    exists = columns < V
    start = token.to(tl.int64) * V
    log_z_1 = tl.load(log_z + token)
    logit = tl.load(logits + start + columns, mask=exists, other=0.0).to(tl.float32)
    gradient = (1 + 2 * z_loss * log_z_1) * tl.exp(logit - log_z_1)
    gradient -= tl.where(columns == tl.load(targets + token), 1.0, 0.0)
    gradient *= tl.load(weights + token)
    tl.store(d_logits + start + columns, gradient.to(d_logits.dtype.element_ty), mask=exists)


@triton.jit
def losses_and_gradient(
    logits,
    targets,
    weights,
    losses,
    log_z,
    d_logits,
    z_loss: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
):
    """One token after another, as many at a time as there are programs. Grid: (programs,).

    logits, d_logits [C, V], which may be one and the same: each program reads just what it writes. targets,
    weights, losses and log_z [C]. LANES × EACH columns are taken at a time; each lane keeps the largest of
    its own and the sum over them, so that lanes meet once, at the end.
    """
    lane = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    start = tl.program_id(0).to(tl.int64) * V
    for token in range(tl.program_id(0), C, tl.num_programs(0)):
        target = tl.load(targets + token)
        inside = (target >= 0) & (target < V)
        chosen = tl.load(logits + start + target, mask=inside, other=0.0).to(tl.float32)

        top = tl.full((LANES,), -3.0e38, tl.float32)  # finite: of two infinities the difference is none
        total = tl.zeros((LANES,), tl.float32)
        for first in range(0, V, LANES * EACH):
            columns = first + lane
            logit = tl.load(logits + start + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
            before, top = top, tl.maximum(top, tl.max(logit, axis=1))
            total = total * tl.exp(before - top) + tl.sum(tl.exp(logit - top[:, None]), axis=1)
        highest = tl.max(top, axis=0)
        log_z_1 = highest + tl.log(tl.sum(total * tl.exp(top - highest), axis=0))
        tl.store(losses + token, log_z_1 - chosen)
        tl.store(log_z + token, log_z_1)

        weight = tl.load(weights + token)
        for first in range(0, V, LANES * EACH):
            columns = first + lane
            exists = columns < V
            logit = tl.load(logits + start + columns, mask=exists, other=0.0).to(tl.float32)
            gradient = (1 + 2 * z_loss * log_z_1) * tl.exp(logit - log_z_1)
            gradient = weight * (gradient - tl.where(columns == target, 1.0, 0.0))
            tl.store(d_logits + start + columns, gradient.to(d_logits.dtype.element_ty), mask=exists)
        start += tl.num_programs(0).to(tl.int64) * V
