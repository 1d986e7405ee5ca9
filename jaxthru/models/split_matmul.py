"""A product of bfloat16 activations and float32 weights on matrix units, as exact as one in float32.

A GPU multiplies float32 outside of its matrix units, or as TF32 with a third of the digits. A float32 is the
sum of three bfloat16, and bfloat16 products are exact in float32, so that all of a weight's digits take part:
the pieces stand beside each other, as columns of one product. The sums are float32, as everywhere. Error
beside float64 as that of float32's own product, but for how matrix units round what they add up
(scripts/bench/measure/kernels/router.py has both).

Shapes: N tokens, D embed, E columns of the weight.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import resolve_platform
from pallas_kernels.dot import dot

BFLOAT16 = {"exponent_bits": 8, "mantissa_bits": 7}


def router_matmul(x_ND: jax.Array, weight_DE: jax.Array, for_gpu: bool = False) -> jax.Array:
    """Returns x · weight, [N, E] float32: by `split_matmul` where that is the faster, on GPUs.

    For the backward pass x is kept as it is, not as float32. x_ND: bfloat16 or float32. weight_DE: float32.
    for_gpu: also where there is none, in a plan.
    """
    if (for_gpu or resolve_platform() == "gpu") and x_ND.dtype == jnp.bfloat16:
        return split_matmul(x_ND, weight_DE)
    return _float32_matmul(x_ND, weight_DE)


@jax.checkpoint
def _float32_matmul(x_ND: jax.Array, weight_DE: jax.Array) -> jax.Array:
    return jnp.matmul(x_ND.astype(jnp.float32), weight_DE, precision="highest")


@jax.custom_vjp
def split_matmul(x_ND: jax.Array, weight_DE: jax.Array) -> jax.Array:
    """Returns x · weight, [N, E] float32. x_ND: bfloat16. weight_DE: float32, whose gradient has all digits
    too; that of x is rounded to bfloat16 once, in the end."""
    return _sum_of_three(dot(x_ND, _beside(_pieces(weight_DE, 3)), 1, 0, jnp.float32))


def _forward(x_ND, weight_DE):
    return split_matmul(x_ND, weight_DE), (x_ND, weight_DE)


def _backward(kept, gradient_NE):
    x_ND, weight_DE = kept
    first_NE, second_NE, third_NE = _pieces(gradient_NE, 3)
    first_DE, second_DE = _pieces(weight_DE, 2)
    # Of x's gradient, which is rounded, what is below 2⁻¹⁶ of a product is left out.
    gradients, weights = (first_NE, second_NE, first_NE), (first_DE, first_DE, second_DE)
    dx_ND = dot(_beside(gradients), _beside(weights), 1, 1, x_ND.dtype)
    pieces = _beside((first_NE, second_NE, third_NE))
    return dx_ND, _sum_of_three(dot(x_ND, pieces, 0, 0, jnp.float32))


split_matmul.defvjp(_forward, _backward)


def _pieces(x: jax.Array, count: int) -> list[jax.Array]:
    """Returns so many bfloat16 arrays whose sum is x, three in all its digits."""
    pieces = []
    for _ in range(count):
        # A cast there and back XLA may leave out, and then nothing would be left for the next piece.
        piece = jax.lax.reduce_precision(x, **BFLOAT16)
        pieces.append(piece.astype(jnp.bfloat16))
        x -= piece
    return pieces


def _beside(pieces) -> jax.Array:
    return jnp.concatenate(pieces, axis=1)


def _sum_of_three(y: jax.Array) -> jax.Array:
    """Returns the sum of three matrices beside each other, the smallest first."""
    first, second, third = jnp.split(y, 3, axis=1)
    return third + second + first
