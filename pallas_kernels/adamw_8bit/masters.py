"""Masters of bfloat16 weights: the other 16 bits of a float32 beside it, or stochastic rounding."""

import jax
import jax.numpy as jnp


def split(master: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns float32 as a bfloat16 weight and the int16 remainder with which `join` gives every bit back.

    The weight is the nearest bfloat16, ties away from zero: to the nearest even one, ties either way would
    leave an even weight 65,537 remainders.
    """
    # A CPU may make each of a master of its own, rounded otherwise: where a tie lies between these, what
    # comes back is a unit of bfloat16 off. XLA for GPUs makes both in one kernel.
    master = jax.lax.platform_dependent(master, cpu=jax.lax.optimization_barrier, default=lambda x: x)
    bits = jax.lax.bitcast_convert_type(master, jnp.int32)
    high = (bits + 0x8000) >> 16
    remainder = bits - (high << 16)
    return jax.lax.bitcast_convert_type(high.astype(jnp.int16), jnp.bfloat16), remainder.astype(jnp.int16)


def join(weight: jax.Array, remainder: jax.Array) -> jax.Array:
    """Returns the float32 master that `split` took apart."""
    high = jax.lax.bitcast_convert_type(weight, jnp.int16).astype(jnp.int32)
    return jax.lax.bitcast_convert_type((high << 16) + remainder.astype(jnp.int32), jnp.float32)


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Returns float32 as bfloat16, stochastically rounded, up or down so that its mean is `x` (as in
    arXiv:2010.06192): updates smaller than half a step of the weight are not lost."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(((bits + noise) >> 16).astype(jnp.uint16), jnp.bfloat16)
