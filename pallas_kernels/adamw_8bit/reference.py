"""The 8-bit layout of AdamW's moments, and the plain update of parameters that have them.

A block is a run of entries along the last dim that share one float32 scale, the largest magnitude among
them. Codes have the array's shape and scales one entry a block, so that both shard as the array does.

    signed    first moment    int8    code = sign(x) × round(127 × (|x| / scale)^(1/2))
    unsigned  second moment   uint8   code = round(255 × (x / scale)^(1/4)), at least 1 where x > 0

The roots spread the codes over many orders of magnitude: a step of a code is 2 / code of an entry's value
(signed) or 4 / code (unsigned), and the smallest is 6e-5 or 2.4e-10 of the block's scale. Second moments are
never rounded to zero, which would turn a small divisor into none.

Source: block-wise quantised optimizer state: Dettmers et al. 2022 (arXiv:2110.02861). Roots instead of its
table of codes, so that a kernel computes them without a look-up.
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.adamw_8bit.masters import join, round_stochastically, split

BLOCK, SMALLEST_BLOCK = 256, 16
SIGNED_MAX, UNSIGNED_MAX = 127, 255
# XLA may flush what is below the smallest normal number to zero, and dividing by that gives NaN.
SMALLEST_SCALE = float(jnp.finfo(jnp.float32).smallest_normal)


class Quantised(NamedTuple):
    """codes: int8 (signed) or uint8 (unsigned) [..., D]. scale: float32 [..., D / block]."""

    codes: jax.Array
    scale: jax.Array


class Adam(NamedTuple):
    """The constants of AdamW."""

    b1: float
    b2: float
    epsilon: float
    weight_decay: float


class Scalars(NamedTuple):
    """What an update has in common for all parameters, float32 but for `finite`, a bool.

    clip_scale: what gradients are divided by. bias_1, bias_2: one less b1 and b2 to the power of the updates
    made, this one included. finite: False leaves everything as it was.
    """

    clip_scale: jax.Array
    learning_rate: jax.Array
    bias_1: jax.Array
    bias_2: jax.Array
    finite: jax.Array


def block_length(last: int) -> int:
    """Returns how many entries of a last dim of this length share a scale: at most 256, a divisor of it."""
    block = math.gcd(last, BLOCK)
    return block if block >= SMALLEST_BLOCK else last


def quantise(x: jax.Array, kind: Literal["signed", "unsigned"]) -> Quantised:
    """Returns float32 [..., D] as 8-bit codes and a scale per block. A block of zeros comes back as zeros.

    kind: `unsigned` takes entries of at least 0.
    Raises ValueError for another kind or dtype, or an array without dims.
    """
    if kind not in ("signed", "unsigned"):
        raise ValueError(f"quantise: kind {kind!r} is neither signed nor unsigned")
    if x.dtype != jnp.float32 or not x.ndim or not x.shape[-1]:
        raise ValueError(f"quantise: takes float32 [..., D], got {x.dtype}{list(x.shape)}")
    blocks = x.reshape(*x.shape[:-1], -1, block_length(x.shape[-1]))
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    # Written so that NaN is kept: it must not pass for an empty block.
    scale = jnp.where(largest < SMALLEST_SCALE, 0.0, largest)
    share = jnp.abs(blocks) / jnp.where(scale == 0, 1.0, scale)
    if kind == "signed":
        codes = (jnp.sign(blocks) * jnp.round(SIGNED_MAX * jnp.sqrt(share))).astype(jnp.int8)
    else:
        rounded = jnp.round(UNSIGNED_MAX * jnp.sqrt(jnp.sqrt(share)))
        codes = jnp.where(blocks > 0, jnp.maximum(rounded, 1.0), 0.0).astype(jnp.uint8)
    return Quantised(codes.reshape(x.shape), jnp.squeeze(scale, -1))


def dequantise(quantised: Quantised) -> jax.Array:
    """Returns the float32 [..., D] that codes and scales stand for. Their dtype says which kind they are.

    Raises ValueError if codes and scales do not fit each other.
    """
    codes, scale = quantised
    last = codes.shape[-1]
    wanted = (*codes.shape[:-1], last // block_length(last))
    if codes.dtype not in (jnp.int8, jnp.uint8) or scale.shape != wanted or scale.dtype != jnp.float32:
        raise ValueError(
            f"dequantise: codes {codes.dtype}{list(codes.shape)} need scales float32{list(wanted)}, "
            f"got {scale.dtype}{list(scale.shape)}"
        )
    blocks = codes.reshape(*wanted, -1).astype(jnp.float32)
    if codes.dtype == jnp.int8:
        root = blocks / SIGNED_MAX
        share = root * jnp.abs(root)
    else:
        share = jnp.square(jnp.square(blocks / UNSIGNED_MAX))
    return (share * scale[..., None]).reshape(codes.shape)


def update(gradient, weight, remainder, mu, nu, key, scalars: Scalars, adam: Adam):
    """Returns (weight, remainder, mu, nu); see `update` of the package."""
    gradient = gradient.astype(jnp.float32) / scalars.clip_scale
    m = (1 - adam.b1) * gradient + adam.b1 * dequantise(mu)
    v = (1 - adam.b2) * jnp.square(gradient) + adam.b2 * dequantise(nu)
    direction = m / scalars.bias_1 / (jnp.sqrt(v / scalars.bias_2) + adam.epsilon)
    master = weight.astype(jnp.float32) if remainder is None else join(weight, remainder)
    master = master - scalars.learning_rate * (direction + adam.weight_decay * master)
    new_weight, new_remainder = master, None
    if remainder is not None:
        new_weight, new_remainder = split(master)
    elif key is not None:
        new_weight = round_stochastically(master, key)
    new = new_weight, new_remainder, quantise(m, "signed"), quantise(v, "unsigned")
    return jax.tree.map(
        lambda new, old: jnp.where(scalars.finite, new, old), new, (weight, remainder, mu, nu)
    )
