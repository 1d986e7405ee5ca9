"""Times one large matrix product on random data, over and over, and prints one JSON line.

    python scripts/bench/gemm.py --dtype bf16|fp8 [--size N]

What it sustains under the power cap, not the data sheet, is the ceiling of a long run of matrix products.
"""

import sys

import harness
import jax
import jax.numpy as jnp
import timed_loop

from jaxthru.runtime import xla

REPEATS = 50  # products between two looks at the clock, so that the look costs nothing


def operands(dtype: jnp.dtype, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns two random square matrices."""
    return tuple(jax.random.normal(jax.random.key(seed), (size, size)).astype(dtype) for seed in (0, 1))


@jax.jit
def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a × bᵀ: both contracted along rows, the one layout that the float8 kernels take."""
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def measure(arguments) -> dict:
    xla.configure()
    dtype = {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}[arguments.dtype]
    size = arguments.size
    a, b = operands(dtype, size)

    def dispatch():
        for _ in range(REPEATS):
            last = product(a, b)
        return last

    timing = timed_loop.timed(
        dispatch, jax.block_until_ready, arguments.warmup_seconds, arguments.timed_seconds
    )
    line, flops = timing.line(0), 2 * size**3 * REPEATS
    settings = {"dtype": arguments.dtype, "size": size}
    return line | {"settings": settings, "tflops": round(flops / line["step_seconds_mean"] / 1e12, 1)}


main = harness.program(
    __doc__,
    measure,
    harness.option("--dtype", choices=("bf16", "fp8"), default="bf16"),
    harness.option("--size", type=int, default=8192),
    config=False,
    seconds=(20.0, 40.0),
)


if __name__ == "__main__":
    sys.exit(main())
