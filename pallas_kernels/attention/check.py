"""A check of packed attention against its reference, on the device that is about to train."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from pallas_kernels.attention import attention, reference
from pallas_kernels.attention.segments import find_segments

ROW = (1, 1, 1, 2, 3, 3, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0)
"""Documents of unequal length and a padding tail, in units of TOKENS / 16."""
TOKENS = 512
TOLERANCE = 2e-2
"""Four times what rounding to bfloat16 gives; matrix units may round float32 operands too. An attention that
crosses documents is off by more than 0.1."""
WINDOW = 61
"""The widest window that is checked: wide enough to cross the blocks of every kernel, and so narrow that one
token more or less is an error above TOLERANCE."""


def differences(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype,
    *,
    packed: bool,
    window: int | None = None,
    implementation: str | Sequence[str] | None,
) -> dict[str, float]:
    """Returns the relative errors of o, dq, dk and dv, from the dense-mask reference in float32.

    Two rows of 512 tokens on the default backend, the second turned by a quarter; one key head with all of
    its query heads. A value that is not finite counts as infinite.
    packed: several documents and padding in a row, or one document, as in the run to come. window: of the
    run; a wider one than WINDOW is checked as that, for it would cover these rows. implementation: as for
    `attention`; but what None chooses for these shapes may not be what it chooses for the run's.
    """
    group = heads // kv_heads
    rng = np.random.default_rng(0)
    shapes = [(2, TOKENS, group, head_dim)] * 2 + [(2, TOKENS, 1, head_dim)] * 2
    q, do, k, v = (rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes)
    row = np.repeat(np.asarray(ROW if packed else (1,) * len(ROW), np.int32), TOKENS // len(ROW))
    rows = np.stack([row, np.roll(row, TOKENS // 4)])
    options = {} if window is None else {"window": min(window, WINDOW)}

    @functools.partial(jax.jit, static_argnums=0)  # with the segments: by themselves they are 25 programs
    def run(function, rows, q, k, v, do):
        segments = find_segments(rows, 8 if packed else 1)
        o, pullback = jax.vjp(lambda q, k, v: function(q, k, v, segments, **options), q, k, v)
        return o, *pullback(do)

    found = run(functools.partial(attention, implementation=implementation), rows, q, k, v, do)
    exact = run(reference.attention, rows, *(x.astype(np.float32) for x in (q, k, v, do)))
    errors = {}
    for name, x, y in zip(("o", "dq", "dk", "dv"), found, exact, strict=True):
        x, y = np.asarray(x).astype(np.float64), np.asarray(y).astype(np.float64)
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        errors[name] = float(error) if np.isfinite(error) else float("inf")
    return errors
