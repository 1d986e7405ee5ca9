"""The Triton kernel of linear cross-entropy's losses, run on a CPU by Triton's interpreter and compared with
XLA's way.

    TRITON_INTERPRET=1 python tests/kernels/triton_interpreted_losses.py
"""

import itertools

import jax.numpy as jnp
import numpy as np
from triton_interpreted import numbers_are_numbers, triton_call

from pallas_kernels.linear_cross_entropy import triton, triton_kernels, xla
from pallas_kernels.testing import CPU_TOLERANCE, assert_close, fresh_seed, normal

triton.PROGRAMS = 2  # so that a program visits several tokens
TILES = {"LANES": 16, "EACH": 4}, {"LANES": 4, "EACH": 8}


def check(tokens: int, vocabulary: int, z_loss: float, tile: dict) -> None:
    triton.ROW_TILE = tile
    rng = np.random.default_rng(fresh_seed())
    logits = 30 * normal(rng, (tokens, vocabulary), jnp.float32)
    targets = jnp.asarray(rng.integers(-2, vocabulary + 2, tokens), jnp.int32)  # some of them outside
    targets = targets.at[0].set(vocabulary - 1)
    logits = logits.at[0, -1].set(0.0)  # else a token may have no gradient but rounding
    weights = jnp.asarray(rng.random(tokens) * (rng.random(tokens) > 0.2), jnp.float32)
    arguments = logits, targets, weights, z_loss, None
    assert_close(triton.losses_and_gradient(*arguments), xla.losses_and_gradient(*arguments), CPU_TOLERANCE)


def what_is_not_finite_stays_so() -> None:
    for value in (np.nan, np.inf):
        logits = jnp.zeros((2, 100), jnp.float32).at[1, 77].set(value)
        found = triton.losses_and_gradient(
            logits, jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.float32), 0.0, None
        )
        assert np.isfinite(found[0][0]) and not np.isfinite(found[0][1]), value


if __name__ == "__main__":
    numbers_are_numbers()
    stub = type("jax_triton", (), {"triton_call": staticmethod(triton_call)})
    triton.load_triton = lambda package: (stub, triton_kernels)
    for case in itertools.product((1, 5), (37, 64, 301), (0.0, 1e-2), TILES):
        check(*case)
        print("ok", *case, flush=True)
    what_is_not_finite_stays_so()
    print("ok", "not finite")
