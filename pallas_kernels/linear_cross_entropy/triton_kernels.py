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
