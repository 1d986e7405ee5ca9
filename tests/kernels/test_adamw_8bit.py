"""The 8-bit layout: what comes back is close, small entries too; no NaN, no zero divisor. The update on it:
AdamW, by every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pallas_kernels import dispatch
from pallas_kernels.adamw_8bit import (
    Adam,
    Quantised,
    Scalars,
    block_length,
    dequantise,
    join,
    quantise,
    reference,
    split,
    update,
    xla,
)
from pallas_kernels.adamw_8bit.shapes import CPU, GPU
from pallas_kernels.testing import assert_close, fresh_seed, has_gpu, normal

needs_gpu = pytest.mark.skipif(not has_gpu((8, 0)), reason="needs an NVIDIA GPU of capability 8.0")
ADAM, UPDATES, RATE, CLIP = Adam(0.9, 0.95, 1e-8, 0.1), 3, 1e-2, 1.7
MASTERS = ("split", "whole", "rounded")


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


def arguments(random, shape, master: str, finite=True, dtype=jnp.float32) -> tuple:
    """Returns what `update` takes, but for the gradient's size as after some updates."""
    gradient = (draw(shape) * normal(random, shape, jnp.float32)).astype(dtype)
    mu = quantise(0.1 * normal(random, shape, jnp.float32), "signed")
    nu = quantise(0.01 * jnp.square(normal(random, shape, jnp.float32)), "unsigned")
    weight, remainder = normal(random, shape, jnp.float32), None
    if master == "split":
        weight, remainder = split(weight)
    elif master == "rounded":
        weight = weight.astype(jnp.bfloat16)
    key = jax.random.key(7) if master == "rounded" else None
    scalars = (jnp.float32(x) for x in (CLIP, RATE, 1 - ADAM.b1**UPDATES, 1 - ADAM.b2**UPDATES))
    return gradient, weight, remainder, mu, nu, key, Scalars(*scalars, jnp.asarray(finite))


def master_of(weight, remainder) -> jax.Array:
    return weight.astype(jnp.float32) if remainder is None else join(weight, remainder)


def by_optax(gradient, weight, remainder, mu, nu, key, scalars) -> tuple:
    """Returns (master, first moment, second moment) in float32, by Optax's AdamW."""
    del key, scalars
    master, adam = master_of(weight, remainder), ADAM
    rule = optax.chain(
        optax.scale_by_adam(adam.b1, adam.b2, adam.epsilon), optax.add_decayed_weights(adam.weight_decay)
    )
    state = rule.init(master)
    before = state[0]._replace(count=jnp.int32(UPDATES - 1), mu=dequantise(mu), nu=dequantise(nu))
    with jax.numpy_dtype_promotion("standard"):
        direction, (after, *_) = rule.update(
            gradient.astype(jnp.float32) / CLIP, (before, *state[1:]), master
        )
    return master - RATE * direction, after.mu, after.nu


def test_a_weight_and_its_remainder_are_of_one_master():
    """Of masters that come to lie within a few units of a tie, whose side rounding decides."""
    rng, shape = np.random.default_rng(fresh_seed()), (16, 16)
    updated = jax.jit(lambda *given: update(*given, ADAM))
    for _ in range(8):
        gradient, *_, mu, nu, key, scalars = arguments(rng, shape, "split")
        step = by_optax(gradient, jnp.zeros(shape), None, mu, nu, key, scalars)[0]
        large = jax.lax.bitcast_convert_type(1 + jnp.abs(normal(rng, shape, jnp.float32)), jnp.int32)
        ties = jax.lax.bitcast_convert_type((large & ~0xFFFF) | 0x8000, jnp.float32)
        before = (np.asarray(ties, np.float64) - np.asarray(step)) / (1 - RATE * ADAM.weight_decay)
        given = gradient, *split(jnp.asarray(before, jnp.float32)), mu, nu, key, scalars
        weight, remainder, *_ = updated(*given)
        np.testing.assert_allclose(join(weight, remainder), ties, rtol=2.0**-10)  # bfloat16's unit: 2^-8


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("shape", CPU.values(), ids=CPU.keys())
def test_the_update_is_adamw(shape, master):
    given = arguments(np.random.default_rng(fresh_seed()), shape, master)
    expected, m, v = by_optax(*given)
    weight, remainder, mu, nu = jax.jit(lambda *given: update(*given, ADAM))(*given)
    assert (weight.dtype, remainder is None) == (given[1].dtype, given[2] is None)
    # Rounded stochastically a weight is up to one unit of bfloat16's last place off, and a single large one,
    # of a small second moment, may be nearly all of the norm.
    assert_close(master_of(weight, remainder), expected, 2**-7 if master == "rounded" else 1e-6)
    for found, moment, kind in ((mu, m, "signed"), (nu, v, "unsigned")):
        wanted = quantise(moment, kind)
        # Sums in another order may fall on the other side of half a code.
        assert np.abs(np.asarray(found.codes, int) - np.asarray(wanted.codes, int)).max() <= 1
        assert_close(found.scale, wanted.scale, 1e-6)


@pytest.mark.parametrize("name, rows", [("blocks", 5), ("head_dim", 50), ("odd", 2), ("one_a_row", 3)])
def test_slabs_are_updated_as_the_whole_is(name, rows, bit_exact):
    """To the bit, whether slabs divide the rows or some are left; but for the bits that rounding draws.

    With powers of two products and quotients are exact, so that it does not matter which of them a compiler
    joins with a sum, or with each other, where one rounding takes the place of two.
    """
    shape, adam = CPU[name], Adam(0.5, 0.5, 1e-8, 0.125)
    exact = Scalars(*(jnp.float32(x) for x in (2.0, 2.0**-7, 0.5, 0.25)), jnp.asarray(True))
    random = np.random.default_rng(fresh_seed())
    given = {master: arguments(random, shape, master, dtype=jnp.bfloat16)[:-1] for master in MASTERS}

    def updated(update, **how):
        """Returns what becomes of each, by one program."""
        run = jax.jit(lambda given, exact: [update(*each, exact, adam, **how) for each in given])
        return run([*given.values()], exact)

    by_slabs, whole = updated(xla.update, slab=rows * shape[-1]), updated(reference.update)
    for master, found, expected in zip(MASTERS, by_slabs, whole, strict=True):
        if master == "rounded":
            # Both round one number up or down: a unit in the last place apart at the most.
            assert_close(found[0].astype(jnp.float32), expected[0].astype(jnp.float32), 2.0**-7)
            found, expected = found[1:], expected[1:]
        assert_same(found, expected)


def test_each_slab_is_rounded_by_other_bits():
    shape = CPU["one_a_row"]
    given = arguments(np.random.default_rng(0), shape, "rounded")
    same = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), given[:5])
    weight, *_ = xla.update(*same, *given[5:], ADAM, slab=shape[-1])
    assert len({row.tobytes() for row in np.asarray(weight)}) > 1


@pytest.mark.parametrize("master", MASTERS)
def test_an_update_that_is_not_finite_changes_nothing(master):
    given = arguments(np.random.default_rng(0), CPU["blocks"], master, finite=False)
    given = (given[0].at[0].set(jnp.nan), *given[1:])
    assert_same(update(*given, ADAM), given[1:5])


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(expected))


def test_the_kernel_says_what_it_needs(monkeypatch):
    given = arguments(np.random.default_rng(0), CPU["odd"], "split")
    with pytest.raises(dispatch.Unsupported, match=r"triton: needs an NVIDIA GPU .* >= 8\.0, found cpu"):
        update(*given, ADAM, implementation="triton", platform="cpu")
    with pytest.raises(dispatch.Unsupported, match="a last dim that is a multiple of 16, got 37"):
        update(*given, ADAM, implementation="triton", platform="gpu")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("name", ["one_block", "blocks", "narrow", "head_dim", "query", "up"])
def test_the_kernel_agrees_with_xla_and_with_itself(name, master):
    shape = (CPU | GPU)[name]
    given = arguments(np.random.default_rng(fresh_seed()), shape, master, dtype=jnp.bfloat16)
    kernel = jax.jit(lambda *given: update(*given, ADAM, implementation="triton"))
    plain = jax.jit(lambda *given: update(*given, ADAM, implementation="xla"))
    found, expected = kernel(*given), plain(*given)
    assert_close(master_of(*found[:2]), master_of(*expected[:2]), 5e-3 if master == "rounded" else 1e-6)
    for mine, theirs in zip(found[2:], expected[2:], strict=True):
        assert np.abs(np.asarray(mine.codes, int) - np.asarray(theirs.codes, int)).max() <= 1
        assert_close(mine.scale, theirs.scale, 1e-6)
    for _ in range(10):
        assert_same(kernel(*given), found)
    assert_same(kernel(*given[:6], given[6]._replace(finite=jnp.asarray(False))), given[1:5])


@needs_gpu
@pytest.mark.gpu
def test_the_kernel_rounds_up_as_often_as_the_rest_says():
    """A quarter of the way from one bfloat16 to the next goes up one time in four."""
    shape = GPU["query"]
    given = arguments(np.random.default_rng(0), shape, "rounded")
    one = jnp.ones(shape, jnp.bfloat16)
    still = (
        jnp.zeros(shape),
        one,
        None,
        quantise(jnp.zeros(shape), "signed"),
        quantise(jnp.zeros(shape), "unsigned"),
    )
    rate = (2**-7 / 4) / -1.0  # weight decay alone moves it: up, for the rate is negative
    scalars = given[6]._replace(learning_rate=jnp.float32(rate / ADAM.weight_decay))
    weight, *_ = update(*still, jax.random.key(3), scalars, ADAM, implementation="triton")
    assert set(np.unique(np.asarray(weight, np.float32))) == {1.0, 1.0 + 2**-7}
    assert np.mean(np.asarray(weight, np.float32) > 1) == pytest.approx(0.25, abs=0.002)
