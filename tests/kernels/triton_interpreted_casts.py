"""The Triton kernel of casts to float8, run on a CPU by Triton's interpreter, against the reference.

TRITON_INTERPRET=1 python tests/kernels/triton_interpreted_casts.py
"""

import itertools

import jax.numpy as jnp
import numpy as np
from triton_interpreted import numbers_are_numbers, triton_call

from pallas_kernels.cast_transpose import DTYPES, cast_transpose, triton, triton_kernels
from pallas_kernels.cast_transpose.shapes import draw
from pallas_kernels.testing import fresh_seed

IN_TILES = {"one_tile": (128, 64), "odd": (52, 37), "four_rows": (4, 150), "several_tiles": (260, 130)}


def check(shape: tuple[int, int], dtype: jnp.dtype) -> None:
    """Both results, to the bit, of numbers that are the dtype's: where a GPU carries a mantissa over into the
    exponent, as it rounds, Triton's interpreter does not."""
    x, up = draw(np.random.default_rng(fresh_seed()), shape)
    x = ((x * up).astype(dtype).astype(jnp.float32) / up).at[0, 0].set(0.0)
    found, wanted = (
        cast_transpose(x, up, dtype, implementation=by, platform="gpu") for by in ("triton", "reference")
    )
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))


if __name__ == "__main__":
    numbers_are_numbers()
    stub = type("jax_triton", (), {"triton_call": staticmethod(triton_call)})
    triton.load_triton = lambda package: (stub, triton_kernels)
    for name, dtype in itertools.product(IN_TILES, DTYPES):
        check(IN_TILES[name], dtype)
        print("ok", name, jnp.dtype(dtype).name, flush=True)
