"""Float32 products by bfloat16 pieces: their digits, and where a router takes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxthru.models.split_matmul import router_matmul, split_matmul
from pallas_kernels import dispatch
from pallas_kernels.testing import fresh_seed, normal

N, D, E = 96, 256, 16


def inputs() -> tuple:
    rng = np.random.default_rng(fresh_seed())
    weight = normal(rng, (D, E), jnp.float32) * jnp.exp2(rng.integers(-20, 20, (D, E)).astype(np.float32))
    return normal(rng, (N, D), jnp.bfloat16), weight, normal(rng, (N, E), jnp.float32)


def both(product):
    def run(x, weight, dy):
        y, pullback = jax.vjp(product, x, weight)
        return y, *pullback(dy)

    return jax.jit(run)


def test_has_the_digits_of_float32():
    """Beside float64, of weights of very different sizes; compiled, for XLA may leave casts out."""
    arguments = inputs()
    x, weight, dy = (np.asarray(each, np.float64) for each in arguments)
    exact = x @ weight, dy @ weight.T, x.T @ dy
    ours, theirs = both(split_matmul)(*arguments), both(router_matmul)(*arguments)
    for found, float32, wanted in zip(ours, theirs, exact, strict=True):
        assert found.dtype == float32.dtype
        error, usual = (np.linalg.norm(np.asarray(of, np.float64) - wanted) for of in (found, float32))
        assert error <= 4 * usual and usual < 1e-2 * np.linalg.norm(wanted)


def operands(jaxpr) -> set[str]:
    """Returns the dtypes that matmuls of a program take."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found |= {str(variable.aval.dtype) for variable in equation.invars}
        for inner in jaxprs_in_params(equation.params):
            found |= operands(inner)
    return found


@pytest.mark.parametrize(
    "platform, dtype, taken",
    [("gpu", jnp.bfloat16, "bfloat16"), ("gpu", jnp.float32, "float32"), ("cpu", jnp.bfloat16, "float32")],
)
def test_is_for_bfloat16_on_gpus(platform, dtype, taken):
    x, weight, dy = inputs()
    with dispatch.assumed(platform):
        traced = jax.make_jaxpr(both(lambda x, weight: router_matmul(x, weight)))(x.astype(dtype), weight, dy)
    assert operands(traced.jaxpr) == {taken}
