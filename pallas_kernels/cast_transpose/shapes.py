"""Named shapes of matrices that are cast to float8, [rows, columns], which drive tests and benchmarks alike.

`draw` makes the arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.testing import normal

# Small enough for a CPU.
CPU = {"even": (128, 64), "odd": (52, 37), "one_row": (1, 8), "wide": (4, 1100)}

# The benchmark's, after models: tokens by widths, and a matrix.
GPU = {
    "odd": (1028, 300),
    "llama_1b_stream": (32_768, 2048),
    "llama_1b_mlp": (32_768, 8192),
    "qwen3_4b_mlp": (8192, 9728),
    "llama3_8b_mlp": (16_384, 14_336),
    "llama3_8b_down": (14_336, 4096),
}


def draw(rng: np.random.Generator, shape: tuple[int, int], dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Returns a matrix [rows, columns] of a dtype, and a scale that spreads its numbers over float8."""
    return normal(rng, shape, dtype), jnp.float32(16)
