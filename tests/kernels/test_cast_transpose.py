"""The contract of casts to float8: both results to the bit, what is not finite, what is taken and refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.cast_transpose import DTYPES, OPERATION, STAND_IN, cast_transpose
from pallas_kernels.cast_transpose.shapes import CPU, GPU, draw
from pallas_kernels.testing import fresh_seed, has_gpu

E4M3, E5M2 = DTYPES
IDS = {"ids": ["e4m3", "e5m2"]}
needs_gpu = pytest.mark.skipif(not has_gpu((9, 0)), reason="needs an NVIDIA GPU of capability 9.0")


def by_numpy(x, up, dtype) -> tuple[np.ndarray, np.ndarray]:
    values = (np.asarray(x, np.float32) * np.float32(up)).astype(jnp.dtype(dtype))
    return values, values.T


def assert_same(found, wanted) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, **IDS)
@pytest.mark.parametrize("name", CPU)
def test_both_are_numpy_s_numbers(name, dtype, implementation):
    x, up = draw(np.random.default_rng(fresh_seed()), CPU[name])
    x = x.at[0, 0].set(0.0).at[-1, -1].set(jnp.nan)
    assert_same(cast_transpose(x, up, dtype, implementation=implementation), by_numpy(x, up, dtype))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("name", "x_dtype", "dtype"), list(itertools.product(GPU, (jnp.bfloat16, jnp.float32), DTYPES))
)
def test_both_are_xla_s_numbers_on_gpu(name, x_dtype, dtype):
    """Numbers from the smallest to the largest, and what is not a number."""
    rng = np.random.default_rng(fresh_seed())
    x, _ = draw(rng, GPU[name], jnp.float32)
    x = (x * 2.0 ** jnp.asarray(rng.integers(-24, 3, (len(x), 1)), jnp.float32)).astype(x_dtype)
    x = x.at[1, 2].set(jnp.nan)
    up = jnp.float32(2.0 ** np.floor(np.log2(float(jnp.finfo(dtype).max) / 64)))
    run = jax.jit(cast_transpose, static_argnames=("dtype", "implementation"))
    found, wanted = (run(x, up, dtype=dtype, implementation=by) for by in ("triton", "xla"))
    assert_same(found, wanted)


@pytest.mark.gpu
@needs_gpu
def test_repeats_to_the_bit_on_gpu():
    x, up = draw(np.random.default_rng(fresh_seed()), GPU["odd"], jnp.bfloat16)
    once, *others = (cast_transpose(x, up, E4M3, implementation="triton") for _ in range(100))
    for other in others:
        assert_same(other, once)


def test_a_stand_in_has_the_kernel_s_results_and_refuses_what_it_refuses():
    x, up = draw(np.random.default_rng(fresh_seed()), CPU["even"], jnp.bfloat16)

    def operands(x):
        jaxpr = jax.make_jaxpr(lambda *a: cast_transpose(*a, E5M2, implementation=STAND_IN))(x, up)
        return {str(each.primitive) for each in jaxpr.eqns}, jaxpr.out_avals

    primitives, made = operands(x)
    assert primitives == {"ffi_call"}
    assert [(each.shape, each.dtype) for each in made] == [((128, 64), E5M2), ((64, 128), E5M2)]
    for refused in (x[:126], x.astype(E4M3)):
        with pytest.raises(dispatch.Unsupported, match="needs") as refusal:
            operands(refused)
        assert refusal.value.operation == "cast_transpose"  # by which a plan names the setting


def test_what_is_refused():
    x, up = draw(np.random.default_rng(fresh_seed()), CPU["even"])
    assert OPERATION.names == ("triton", "xla", "reference")
    with pytest.raises(dispatch.Unsupported, match=r"triton: needs an NVIDIA GPU .* >= 9\.0, found cpu"):
        cast_transpose(x, up, E4M3, implementation="triton")
    for refused, needed in (
        (x[:126], r"a multiple of 4 rows \(tokens, .*\), got 126"),
        (x.astype(E4M3), "bfloat16, "),
    ):
        with pytest.raises(dispatch.Unsupported, match=f"triton: needs {needed}"):
            cast_transpose(refused, up, E4M3, implementation="triton", platform="gpu")
    with pytest.raises(ValueError, match="no implementation 'xal'; there are triton, xla, reference"):
        cast_transpose(x, up, E4M3, implementation="xal")
    with pytest.raises(ValueError, match=r"x is \[R, C\] and the scale a scalar, got \(64,\), \(\)"):
        cast_transpose(x[0], up, E4M3)
    with pytest.raises(ValueError, match="the scale float32, got int32 and float32"):
        cast_transpose(x.astype(jnp.int32), up, E4M3)
    with pytest.raises(ValueError, match="casts to float8_e4m3fn and float8_e5m2, not to float16"):
        cast_transpose(x, up, jnp.float16)
