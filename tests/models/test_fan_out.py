"""Gradients of an activation that several products read: the same bits, and added up by cuBLAS."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthru.models.fan_out import fan_out
from jaxthru.runtime import aot
from pallas_kernels.testing import fresh_seed, normal


def gradient(x, weights, cotangents, fanned: bool):
    """Returns that of x, of its products with the weights."""

    def products(x):
        each = fan_out(x, len(weights)) if fanned else (x,) * len(weights)
        return [one @ weight for one, weight in zip(each, weights, strict=True)]

    return jax.vjp(products, x)[1](cotangents)[0]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_the_sum_has_the_bits_of_jax_s_own(count, dtype):
    rng = np.random.default_rng(fresh_seed())
    x, *cotangents = (normal(rng, (7, 12), dtype) for _ in range(1 + count))
    weights = [normal(rng, (12, 12), dtype) for _ in range(count)]
    found, expected = (gradient(x, weights, cotangents, fanned) for fanned in (True, False))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.compiles_for("cuda")
@pytest.mark.parametrize("fanned", [True, False])
def test_cublas_adds_all_of_three_products(fanned):
    """Of JAX's own sum one addition is a pass of its own: once that changes, `fan_out` may go."""
    shape = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    widths = (2048, 512, 512)
    arguments = shape(8192, 2048), [shape(2048, n) for n in widths], [shape(8192, n) for n in widths]
    lowered = aot.lower(jax.jit(gradient, static_argnums=3), *arguments, fanned)
    text = aot.compile_for(lowered, aot.TARGETS["h200"]).hlo
    additions = re.findall(r'"beta":([\d.]+)', text)
    assert sorted(map(float, additions)) == ([0, 1, 1] if fanned else [0, 0, 1])
