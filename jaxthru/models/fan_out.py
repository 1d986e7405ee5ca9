"""One activation that several matmuls read: how their gradients are added up.

cuBLAS adds an array to a product as it writes it, with no pass over memory of its own. XLA has it do so where
nothing is added to the product yet, and of two products to the first operand of their sum alone. JAX's own
sums have what was added up before as the first, which of a third product on is left to a pass: a read and a
write of the activation, and another read, 0.27 GB a layer of Llama-3.2-1B at 32,768 tokens. The bits are the
same.
"""

import functools
from collections.abc import Sequence

import jax


def added(products: Sequence[jax.Array]) -> jax.Array:
    """Returns the sum of products, the first of them added last."""
    return functools.reduce(lambda total, product: product + total, reversed(products))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def fan_out(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """Returns x so many times: one for each matmul that reads it, whose gradients `added` then adds up."""
    return (x,) * count


fan_out.defvjp(
    lambda x, count: ((x,) * count, None),
    lambda count, _, gradients: (added(gradients),),
)
