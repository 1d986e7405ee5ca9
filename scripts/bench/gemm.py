"""Times one large matrix product on random data, over and over, and prints one JSON line.

    python scripts/bench/gemm.py --dtype bf16|fp8 [--size N]

What it sustains under the power cap, not the data sheet, is the ceiling of a long run of matrix products.
"""

import argparse
import sys

import harness
import jax
import jax.numpy as jnp

from jaxthru.runtime import xla

REPEATS = 50  # products between two looks at the clock, so that the look costs nothing


def operands(dtype: jnp.dtype, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns two random square matrices."""
    return tuple(jax.random.normal(jax.random.key(seed), (size, size)).astype(dtype) for seed in (0, 1))


@jax.jit
def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a × bᵀ: both contracted along rows, the one layout that the float8 kernels take."""
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--size", type=int, default=8192)
    harness.add_seconds(parser)
    arguments = parser.parse_args()
    xla.configure()
    dtype = {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}[arguments.dtype]
    size = arguments.size
    a, b = operands(dtype, size)

    def dispatch():
        for _ in range(REPEATS):
            last = product(a, b)
        return last

    timing = harness.timed(dispatch, jax.block_until_ready, arguments.warmup_seconds, arguments.timed_seconds)
    line = timing.line(0)
    harness.emit(
        {
            "benchmark": "gemm",
            **line,
            "settings": {"dtype": arguments.dtype, "size": size},
            "tflops": round(2 * size**3 * REPEATS / line["step_seconds_mean"] / 1e12, 1),
            **harness.provenance(),
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
