"""What every operation's contract test needs: errors, random inputs, packed rows, and which GPU is here."""

import os
import secrets

import jax
import numpy as np

from pallas_kernels.dispatch import nvidia_compute_capability

# An operation's implementations differ from its reference by at most this relative error.
CPU_TOLERANCE = 1e-5  # those that run on a CPU, in float32
GPU_TOLERANCE = 5e-3  # GPU-only ones in bfloat16, from a float32 reference

SEED_VARIABLE = "JAXTHRU_TEST_SEED"


def fresh_seed() -> int:
    """Returns a new seed and prints it; JAXTHRU_TEST_SEED=<seed> repeats a run."""
    seed = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(31))
    print(f"{SEED_VARIABLE}={seed}")
    return seed


def has_gpu(least: tuple[int, int] = (0, 0)) -> bool:
    """Whether the default backend is an NVIDIA GPU of at least this compute capability."""
    capability = nvidia_compute_capability()
    return jax.default_backend() == "gpu" and capability is not None and capability >= least


def relative_error(found: jax.Array, expected: jax.Array) -> float:
    """Returns ‖found - expected‖ / ‖expected‖ over all elements; infinite if any is not finite."""
    found, expected = (np.asarray(x).astype(np.float64) for x in (found, expected))
    assert found.shape == expected.shape, f"shapes differ: {found.shape}, {expected.shape}"
    if not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return float("inf")
    difference, norm = np.linalg.norm(found - expected), np.linalg.norm(expected)
    return float(difference / norm) if norm else float("inf" if difference else 0)


def assert_close(found, expected, tolerance: float) -> None:
    """Fails unless every leaf of two equal trees is within the relative error; names those that are not."""
    errors = jax.tree.map(relative_error, found, expected)
    far = [f"{jax.tree_util.keystr(path)}: {error:.2e}" for path, error in jax.tree.leaves_with_path(errors)
           if not error <= tolerance]  # fmt: skip
    assert not far, f"relative error above {tolerance:.0e}: {', '.join(far)}"


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype) -> jax.Array:
    """Returns an array of standard normal values."""
    return jax.numpy.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)


def segment_ids(rng: np.random.Generator, rows: int, sequence: int, layout: str) -> np.ndarray:
    """Returns [rows, sequence] int32 ids as in a batch: documents count from 1 in each row, 0 is padding.

    Args:
      rng: draws where documents end, anew for each row.
      rows, sequence: the batch's shape.
      layout: "one_document" fills the row; "documents" fills it with up to 12; "tiny_documents" with
        ones of 1 to 4 tokens; "padding_tail" has a few documents and padding behind them; "mixed" takes each
        of these in turn, and a row of nothing but padding.
    """
    kinds = ("one_document", "padding_tail", "padding", "tiny_documents", "documents")
    layouts = [kinds[row % len(kinds)] if layout == "mixed" else layout for row in range(rows)]
    return np.stack([_row(rng, sequence, kind) for kind in layouts])


def _row(rng: np.random.Generator, sequence: int, layout: str) -> np.ndarray:
    used = sequence
    if layout == "padding":
        used = 0
    elif layout == "padding_tail":
        used = int(rng.integers(sequence // 2, sequence))
    if layout == "tiny_documents":
        begins = rng.random(sequence) < 0.5
        begins[3::4] = True
    else:
        documents = {"one_document": 1, "padding": 1, "padding_tail": 4, "documents": 12}[layout]
        begins = np.zeros(sequence, bool)
        begins[rng.integers(0, max(used, 1), documents - 1)] = True
    begins[0] = True
    ids = np.cumsum(begins).astype(np.int32)
    ids[used:] = 0
    return ids
