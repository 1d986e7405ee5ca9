"""Named shapes of the experts' SwiGLU, [rows, width], which drive tests and benchmarks alike.

`draw` makes the arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.testing import normal

# Small enough for a CPU.
CPU = {"even": (64, 32), "odd": (37, 19), "one_row": (1, 8), "wide": (3, 1100)}

# The benchmark's, after models: 16,384 tokens, each in as many rows as it has experts.
GPU = {
    "odd": (1031, 300),
    "mixtral": (32_768, 14_336),
    "olmoe": (131_072, 1024),
    "qwen3_30b": (131_072, 768),
}


def draw(rng: np.random.Generator, shape: tuple[int, int], dtype=jnp.float32) -> tuple[jax.Array, ...]:
    """Returns gate and up [rows, 2, width], the rows' weights [rows] in float32, and dy [rows, width].

    dy has the signs of what it is multiplied by, so that no weight's gradient, which sums over a row, is of
    terms that cancel: float32's rounding of the terms would be large beside the little that is left.
    """
    gate_up, weights = 2 * normal(rng, (shape[0], 2, shape[1]), dtype), normal(rng, shape[:1], jnp.float32)
    return gate_up, weights, jnp.copysign(normal(rng, shape, dtype), gate_up[:, 0] * gate_up[:, 1])
