"""rms_norm: every implementation against float64, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.rms_norm import rms_norm, triton
from pallas_kernels.rms_norm.shapes import CPU, GPU
from pallas_kernels.testing import CPU_TOLERANCE, GPU_TOLERANCE, assert_close, fresh_seed, has_gpu, normal

EPSILON = 1e-5
needs_gpu = pytest.mark.skipif(not has_gpu((8, 0)), reason="needs an NVIDIA GPU of capability 8.0")


def draw(shape, dtype) -> tuple:
    """Returns (x, scale) and the gradients of both results."""
    random = np.random.default_rng(fresh_seed())
    x, *gradients = (normal(random, shape, dtype) for _ in range(3))
    return (x, 1 + 0.1 * normal(random, shape[-1:], jnp.float32)), tuple(gradients)


def written_out(x, scale, d_residual, dy):
    """Returns the results and the gradients, in float64."""
    x, scale, d_residual, dy = (np.asarray(array).astype(np.float64) for array in (x, scale, d_residual, dy))
    inverse = 1 / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPSILON)
    normed, d_normed = x * inverse, dy * scale
    along = np.mean(d_normed * normed, -1, keepdims=True)
    return (x, normed * scale), (d_residual + inverse * (d_normed - along * normed), np.sum(dy * normed, 0))


def run(arguments, gradients, implementation):
    @jax.jit
    def both(arguments, gradients):
        function = lambda *a: rms_norm(*a, epsilon=EPSILON, implementation=implementation)  # noqa: E731
        results, pullback = jax.vjp(function, *arguments)
        return results, pullback(gradients)

    return both(arguments, gradients)


@pytest.mark.parametrize("shape", CPU.values(), ids=CPU.keys())
def test_the_reference_is_the_norm(shape):
    given = draw(shape, jnp.float32)
    assert_close(run(*given, None), written_out(*given[0], *given[1]), CPU_TOLERANCE)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU.values(), ids=GPU.keys())
def test_the_kernel_agrees_and_repeats(shape):
    given = draw(shape, jnp.bfloat16)
    found = run(*given, "triton")
    assert_close(found, written_out(*given[0], *given[1]), GPU_TOLERANCE)
    for _ in range(10):
        jax.tree.map(np.testing.assert_array_equal, run(*given, "triton"), found)


@pytest.mark.parametrize("width", [64, 3000, 4096, 5120, 6144, 16_384])
def test_warps_are_a_power_of_two(width):
    assert triton.warps(width) in (4, 8, 16)


def test_the_kernel_says_what_it_needs():
    (x, scale), _ = draw((2, 32_768), jnp.float32)
    with pytest.raises(dispatch.Unsupported, match=r"triton: needs an NVIDIA GPU .* >= 8\.0, found cpu"):
        rms_norm(x, scale, epsilon=EPSILON, implementation="triton")
    with pytest.raises(dispatch.Unsupported, match="rows of at most 16384, got 32768"):
        rms_norm(x, scale, epsilon=EPSILON, implementation="triton", platform="gpu")
