"""The 8-bit layout: what comes back is close, small entries too; no NaN, no zero divisor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.adamw_8bit import Quantised, block_length, dequantise, quantise
from pallas_kernels.adamw_8bit.shapes import CPU


def draw(shape, decades=6.0):
    """Returns entries that span many orders of magnitude within each block."""
    random = np.random.default_rng(0)
    x = random.standard_normal(shape) * 10.0 ** random.uniform(-decades, 0, shape)
    return jnp.asarray(x, jnp.float32)


def test_blocks_divide_the_last_dim():
    lengths = {4096: 256, 128_256: 256, 14_336: 256, 128: 128, 96: 32, 48: 16, 40: 40, 37: 37, 8: 8}
    assert {last: block_length(last) for last in lengths} == lengths


@pytest.mark.parametrize("shape", CPU.values(), ids=CPU.keys())
def test_codes_have_the_shape_and_scales_one_entry_a_block(shape):
    for kind, dtype in (("signed", jnp.int8), ("unsigned", jnp.uint8)):
        quantised = quantise(jnp.abs(draw(shape)), kind)
        assert quantised.codes.shape == shape and quantised.codes.dtype == dtype
        assert quantised.scale.shape == (*shape[:-1], shape[-1] // block_length(shape[-1]))
        assert dequantise(quantised).shape == shape and dequantise(quantised).dtype == jnp.float32


@pytest.mark.parametrize("shape", CPU.values(), ids=CPU.keys())
def test_what_comes_back_is_within_half_a_code(shape):
    for kind, x, root, codes in (
        ("signed", draw(shape), 1 / 2, 127),
        ("unsigned", jnp.square(draw(shape)), 1 / 4, 255),
    ):
        quantised = quantise(x, kind)
        back = np.asarray(dequantise(quantised), np.float64)
        x, block = np.asarray(x, np.float64), block_length(shape[-1])
        scale = np.repeat(np.asarray(quantised.scale, np.float64), block, axis=-1)
        apart = np.abs((np.abs(back) / scale) ** root - (np.abs(x) / scale) ** root) * codes
        up = (kind == "unsigned") & (np.asarray(quantised.codes) == 1)  # rounded up, by design
        assert apart[~up].max() <= 0.5 + 1e-3 and apart.max() <= 1
        assert (np.sign(back) * np.sign(x) >= 0).all()
        largest = np.abs(x).reshape(*x.shape[:-1], -1, block).max(-1)
        np.testing.assert_array_equal(quantised.scale, largest.astype(np.float32))
        # Relative errors stay small far below the largest: 2 % at a hundredth of it.
        near = np.abs(x) > 1e-2 * scale
        assert (np.abs(back - x) / np.abs(x))[near].max() < (0.09 if kind == "signed" else 0.03)
        again = quantise(jnp.asarray(back, jnp.float32), kind)
        np.testing.assert_array_equal(again.codes, quantised.codes)


def test_no_divisor_turns_to_zero():
    v = jnp.zeros((2, 256)).at[0, 0].set(1.0).at[0, 1].set(1e-30).at[0, 2].set(1e-12)
    quantised = quantise(v, "unsigned")
    np.testing.assert_array_equal(quantised.codes[0, :4], [255, 1, 1, 0])
    assert float(dequantise(quantised)[0, 1]) == pytest.approx(255.0**-4, rel=1e-5)


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 1e-30, 1e37])
def test_extremes_stay_finite(kind, value):
    x = jnp.full((3, 64), value, jnp.float32)
    for function in (quantise, jax.jit(quantise, static_argnums=1)):
        back = dequantise(function(x, kind))
        np.testing.assert_allclose(back, x, rtol=1e-6, atol=2e-38)


def test_bad_input_is_one_line():
    with pytest.raises(ValueError, match="kind 'first' is neither"):
        quantise(jnp.ones(16), "first")
    with pytest.raises(ValueError, match=r"takes float32 .* got bfloat16\[16\]"):
        quantise(jnp.ones(16, jnp.bfloat16), "signed")
    with pytest.raises(ValueError, match="takes float32"):
        quantise(jnp.float32(1), "signed")
    with pytest.raises(
        ValueError, match=r"codes int8\[4, 512\] need scales float32\[4, 2\], got float32\[4, 4\]"
    ):
        dequantise(Quantised(jnp.zeros((4, 512), jnp.int8), jnp.zeros((4, 4))))
