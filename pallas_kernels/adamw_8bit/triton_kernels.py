"""The device side of adamw_8bit/triton.py. Importing it needs Triton.

Letters: R blocks that one program updates, B entries of a block, which share a scale.

Results lie where the operands do: each program reads just what it writes, and where nothing is to be updated
writes nothing. Grid of all: blocks / R, rounded up.

scalars: float32 [5]: what gradients are multiplied by; the learning rate; the same for both moments, which
takes the bias off them; whether to update.

Roots are the hardware's, and quotients products with an inverse where that is the same for many entries: each
is exact to a few units in the last place, where a code has 8 bits. IEEE's own are many instructions each.
"""

import triton
import triton.language as tl


@triton.jit
def update_split(
    gradient,
    weight,
    remainder,
    mu,
    mu_scale,
    nu,
    nu_scale,
    scalars,
    blocks,
    weight_out,
    remainder_out,
    mu_out,
    mu_scale_out,
    nu_out,
    nu_scale_out,
    b1: tl.constexpr,
    b2: tl.constexpr,
    epsilon: tl.constexpr,
    weight_decay: tl.constexpr,
    smallest_scale: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """The weight is bfloat16, and the remainder (int16) makes it the float32 master."""
    if tl.load(scalars + 4) == 0:
        return
    at_RB, exists_RB = entries(blocks, R, B)
    direction_RB = advance(gradient, mu, mu_scale, nu, nu_scale, scalars, blocks, mu_out, mu_scale_out,
                           nu_out, nu_scale_out, b1, b2, epsilon, smallest_scale, R, B)  # fmt: skip
    high_RB = tl.load(weight + at_RB, mask=exists_RB, other=0).to(tl.int16, bitcast=True).to(tl.int32)
    low_RB = tl.load(remainder + at_RB, mask=exists_RB, other=0).to(tl.int32)
    master_RB = ((high_RB << 16) + low_RB).to(tl.float32, bitcast=True)
    master_RB -= tl.load(scalars + 1) * (direction_RB + weight_decay * master_RB)
    bits_RB = master_RB.to(tl.int32, bitcast=True)
    high_RB = (bits_RB + 0x8000) >> 16
    tl.store(weight_out + at_RB, high_RB.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=exists_RB)
    tl.store(remainder_out + at_RB, (bits_RB - (high_RB << 16)).to(tl.int16), mask=exists_RB)


@triton.jit
def update_alone(
    gradient,
    weight,
    mu,
    mu_scale,
    nu,
    nu_scale,
    scalars,
    seed,
    blocks,
    weight_out,
    mu_out,
    mu_scale_out,
    nu_out,
    nu_scale_out,
    rounded: tl.constexpr,
    b1: tl.constexpr,
    b2: tl.constexpr,
    epsilon: tl.constexpr,
    weight_decay: tl.constexpr,
    smallest_scale: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """The weight is the float32 master or, if `rounded`, bfloat16 without one, stochastically rounded.
    seed: int32 [1], which only chance reads."""
    if tl.load(scalars + 4) == 0:
        return
    at_RB, exists_RB = entries(blocks, R, B)
    direction_RB = advance(gradient, mu, mu_scale, nu, nu_scale, scalars, blocks, mu_out, mu_scale_out,
                           nu_out, nu_scale_out, b1, b2, epsilon, smallest_scale, R, B)  # fmt: skip
    new_RB = tl.load(weight + at_RB, mask=exists_RB, other=0).to(tl.float32)
    new_RB -= tl.load(scalars + 1) * (direction_RB + weight_decay * new_RB)
    if rounded:
        noise_RB = tl.randint(tl.load(seed), at_RB) & 0xFFFF
        bits_RB = (new_RB.to(tl.int32, bitcast=True) + noise_RB) >> 16
        tl.store(weight_out + at_RB, bits_RB.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=exists_RB)
    else:
        tl.store(weight_out + at_RB, new_RB, mask=exists_RB)


@triton.jit
def entries(blocks, R: tl.constexpr, B: tl.constexpr):
    """Returns where this program's entries are [R, B], and which of them exist."""
    block_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at_RB = block_R[:, None] * B + tl.arange(0, B)[None, :]
    return at_RB, (block_R < blocks)[:, None]


@triton.jit
def advance(
    gradient,
    mu,
    mu_scale,
    nu,
    nu_scale,
    scalars,
    blocks,
    mu_out,
    mu_scale_out,
    nu_out,
    nu_scale_out,
    b1: tl.constexpr,
    b2: tl.constexpr,
    epsilon: tl.constexpr,
    smallest_scale: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """Updates both moments and returns the direction of the weights' update, float32 [R, B]."""
    at_RB, exists_RB = entries(blocks, R, B)
    block_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    exists_R = block_R < blocks
    g_RB = tl.load(gradient + at_RB, mask=exists_RB, other=0).to(tl.float32)
    g_RB *= tl.load(scalars)
    root_RB = tl.load(mu + at_RB, mask=exists_RB, other=0).to(tl.float32) * (1 / 127)
    m_RB = root_RB * tl.abs(root_RB) * tl.load(mu_scale + block_R, mask=exists_R, other=0)[:, None]
    root_RB = tl.load(nu + at_RB, mask=exists_RB, other=0).to(tl.float32) * (1 / 255)
    root_RB = root_RB * root_RB
    v_RB = root_RB * root_RB * tl.load(nu_scale + block_R, mask=exists_R, other=0)[:, None]
    m_RB = (1 - b1) * g_RB + b1 * m_RB
    v_RB = (1 - b2) * (g_RB * g_RB) + b2 * v_RB

    share_RB, scale_R = shares(tl.abs(m_RB), smallest_scale)
    code_RB = nearest(127.0 * tl.sqrt(share_RB))
    tl.store(mu_out + at_RB, tl.where(m_RB < 0, -code_RB, code_RB).to(tl.int8), mask=exists_RB)
    tl.store(mu_scale_out + block_R, scale_R, mask=exists_R)
    share_RB, scale_R = shares(v_RB, smallest_scale)
    code_RB = nearest(255.0 * tl.sqrt(tl.sqrt(share_RB)))
    code_RB = tl.where(v_RB > 0, tl.maximum(code_RB, 1.0), 0.0)
    tl.store(nu_out + at_RB, code_RB.to(tl.uint8), mask=exists_RB)
    tl.store(nu_scale_out + block_R, scale_R, mask=exists_R)

    return m_RB * tl.load(scalars + 2) / (tl.sqrt(v_RB * tl.load(scalars + 3)) + epsilon)


@triton.jit
def shares(size_RB, smallest_scale: tl.constexpr):
    """Returns sizes as shares of the largest of their block, and that: 0 for a block of next to nothing."""
    scale_R = tl.max(size_RB, axis=1)
    scale_R = tl.where(scale_R < smallest_scale, 0.0, scale_R)
    return size_RB * (1 / tl.where(scale_R == 0, 1.0, scale_R))[:, None], scale_R


@triton.jit
def nearest(x):
    """Returns the nearest whole number, of two the even one, for 0 <= x < 2^22: float32 has no fractions from
    2^23 on, and sums are rounded so."""
    return (x + 12582912.0) - 12582912.0
