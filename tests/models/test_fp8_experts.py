"""Experts multiplied in float8: as near to float32 as eight bits allow, and only where it is asked for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthru import config as configuration
from jaxthru.build import proposals
from jaxthru.build.checks import setting_behind, validate
from jaxthru.build.matmul_choice import account
from jaxthru.build.memory_estimate import layout_of
from jaxthru.models import fp8
from jaxthru.plan import demand
from jaxthru.runtime.errors import InputError
from pallas_kernels.dispatch import Unsupported, assumed
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.testing import fresh_seed, normal

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
SIZES, ROWS, INPUTS, OUTPUTS = (70, 0, 40, 5), 128, 64, 48


def distance(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@functools.cache
def drawn():
    """Returns x, w, dy and sizes; rows behind the last group are not numbers, and one matrix is much larger
    than the others."""
    rng, own = np.random.default_rng(fresh_seed()), sum(SIZES)
    x, dy = (normal(rng, (ROWS, width), jnp.float32).at[own:].set(jnp.nan) for width in (INPUTS, OUTPUTS))
    w = normal(rng, (len(SIZES), INPUTS, OUTPUTS), jnp.float32)
    w *= jnp.asarray([1.0, 1.0, 1e4, 1.0])[:, None, None]
    return x, w, dy, jnp.asarray(SIZES, jnp.int32)


def test_products_are_near_float32_and_a_matrix_s_gradient_is_its():
    """By the deviation of a rounding, 2.7 % in e4m3 and twice that in e5m2; see test_fp8."""
    x, w, dy, sizes = drawn()

    def both(product):
        y, pullback = jax.vjp(lambda x, w: product(x, w, sizes, implementation="xla"), x, w)
        return y, *pullback(dy)

    own = sum(SIZES)
    found, wanted = jax.jit(both, static_argnums=0)(fp8.grouped), both(grouped_matmul)
    begin = 0
    for size in SIZES:  # each by itself: a small matrix's scale is its own
        part = slice(begin, begin + size)
        begin += size
        if size > 30:
            assert 0.03 < distance(found[0][part], wanted[0][part]) < 0.045
            assert 0.05 < distance(found[1][part], wanted[1][part]) < 0.07
    assert begin == own
    np.testing.assert_array_equal(found[2], wanted[2])


def test_a_row_that_is_no_number_is_not_hidden():
    x, w, _, sizes = drawn()
    for bad in (jnp.nan, jnp.inf):
        y = fp8.grouped(x.at[0, 0].set(bad), w, sizes, "xla")
        assert not np.isfinite(np.asarray(y[0])).any()


def test_operands_are_float8_and_sums_of_matrices_are_not():
    x, w, dy, sizes = drawn()

    def both(x, w):
        return jax.vjp(lambda x, w: fp8.grouped(x, w, sizes, "stand_in"), x, w)[1](dy)

    calls = [
        tuple(v.aval.dtype for v in e.invars[:2])
        for e in jax.make_jaxpr(both)(x, w).eqns
        if e.primitive.name == "ffi_call"
    ]
    assert calls == [(E4M3, E4M3), (E5M2, E4M3), (x.dtype, x.dtype)]


def load(*overrides: str) -> configuration.RunConfig:
    asked = "precision.compute=float32", "precision.matmul=fp8_experts", "train.rows=8"
    return configuration.load("configs/quickstart_moe.py", [*asked, *overrides])


def test_asked_for_it_is_taken_and_nothing_is_said_to_be_left(caplog):
    caplog.set_level("INFO", "jaxthru")
    validate(load(), jax.devices()[:1], "cpu")
    assert not caplog.records


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.family=llama"], r"fp8_experts': model.family = 'llama' has no experts; choose 'fp8'"),
        (
            ["kernels.grouped_matmul=triton"],
            r"grouped_matmul = 'triton': with .* one of 'auto', 'mosaic_gpu'",
        ),
        (["lora.rank=2", "lora.base=int8"], r"precision.matmul is 'fp8_experts'; choose lora.base = 'fp8'"),
    ],
    ids=["no experts", "another kernel", "int8"],
)
def test_what_rules_it_out_is_one_line(settings, said):
    with pytest.raises(InputError, match=said) as refused:
        validate(load(*settings), jax.devices()[:1], "cpu")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("named", "setting"),
    [
        ("auto", "precision.matmul = 'fp8_experts'"),
        ("mosaic_gpu", "kernels.grouped_matmul = 'mosaic_gpu'"),
    ],
)
def test_what_the_kernel_cannot_multiply_is_refused_on_a_gpu(named, setting):
    """And nothing slower takes its place without a word. What was asked for is named."""
    x, w, _, sizes = drawn()
    config = load(f"kernels.grouped_matmul={named}")
    by = config.kernels.named("grouped_matmul")
    with (
        assumed("gpu"),
        pytest.raises(Unsupported, match=r"columns of x, 64, do not divide by 128") as refused,
    ):
        jax.eval_shape(lambda x, w: fp8.grouped(x, w, sizes, by), x.astype("bfloat16"), w.astype("bfloat16"))
    assert setting_behind(config, refused.value) == setting


def test_the_account_of_auto_leaves_experts_out():
    """They stay as they are, and gain nothing."""

    def found(experts: int):
        settings = "mesh.expert=1", "model.layers=2", f"model.experts={experts}"
        config = configuration.load("configs/mixtral_8x7b.py", settings)
        return account(config, layout_of(config, 1), "NVIDIA H200", (9, 0))

    one, other = found(8), found(4)
    assert (one.compute, one.float8, one.quantising) == (other.compute, other.float8, other.quantising)
    assert 0 < one.float8 < one.compute < one.step


def test_estimates_of_time_count_what_is_in_float8():
    """Of the experts' three products two, and of a token's experts alone."""
    ways = "compute", "fp8", "fp8_experts"
    settings = "mesh.expert=1", "model.layers=2", "remat.policy=full", "model.loop=unroll"
    configs = [
        configuration.load("configs/mixtral_8x7b.py", [*settings, f"precision.matmul={way}"]) for way in ways
    ]
    compute, fp8_, experts = (proposals._seconds(config, 1, True) for config in configs)
    assert 0 < experts < fp8_ < compute and fp8_ > 0.93 * compute  # attention is a small part
    need = demand.demand(configs[0])
    rates = [demand.rate_of("h200", "NVIDIA H200", need, way)[0] for way in ways]
    assert rates == sorted(rates) and rates[2] > 1.2 * rates[1]
