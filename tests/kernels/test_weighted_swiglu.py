"""The contract of the experts' SwiGLU: values and gradients of rows and weights, rows that are not numbers,
and what each form takes and refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.testing import CPU_TOLERANCE, GPU_TOLERANCE, assert_close, fresh_seed, has_gpu
from pallas_kernels.weighted_swiglu import OPERATION, weighted_swiglu
from pallas_kernels.weighted_swiglu.shapes import CPU, GPU, draw

needs_gpu = pytest.mark.skipif(not has_gpu((8, 0)), reason="needs an NVIDIA GPU of capability 8.0")


def drawn(shape: tuple[int, int], dtype=jnp.float32):
    return draw(np.random.default_rng(fresh_seed()), shape, dtype)


def run(gate_up, weights, dy, implementation: str | None = None) -> dict:
    function = lambda *a: weighted_swiglu(*a, implementation=implementation)  # noqa: E731
    y, pullback = jax.vjp(function, gate_up, weights)
    d_gate_up, d_weights = pullback(dy)
    return {"y": y, "d_gate_up": d_gate_up, "d_weights": d_weights}


def by_numpy(gate_up, weights, dy) -> dict:
    """Returns values, and gradients by their definition, in float64."""
    (gate, up), weight, dy = (
        np.asarray(gate_up, np.float64).transpose(1, 0, 2),
        np.asarray(weights, np.float64)[:, None],
        np.asarray(dy, np.float64),
    )
    opened = 1 / (1 + np.exp(-gate))
    silu = gate * opened
    d_gate = dy * weight * up * opened * (1 + gate * (1 - opened))
    return {
        "y": silu * up * weight,
        "d_gate_up": np.stack([d_gate, dy * weight * silu], axis=1),
        "d_weights": (dy * silu * up).sum(axis=1),
    }


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("name", CPU)
def test_agrees_with_numpy(name, implementation):
    given = drawn(CPU[name])
    assert_close(run(*given, implementation), by_numpy(*given), CPU_TOLERANCE)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_half_precision_is_rounded_once(implementation):
    given = drawn(CPU["odd"], jnp.bfloat16)
    found = run(*given, implementation)
    assert [found[name].dtype for name in found] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    assert_close(found, by_numpy(*given), GPU_TOLERANCE)
    assert_close(found["d_weights"], by_numpy(*given)["d_weights"], CPU_TOLERANCE)


def test_a_row_that_is_not_a_number_stays_alone():
    gate_up, weights, dy = drawn(CPU["odd"])
    found = run(gate_up.at[30:].set(jnp.nan), weights, dy.at[30:].set(jnp.nan), "xla")
    wanted = by_numpy(gate_up[:30], weights[:30], dy[:30])
    assert_close({name: array[:30] for name, array in found.items()}, wanted, CPU_TOLERANCE)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_rows_behind_the_last_group_may_be_left_out(implementation):
    gate_up, weights, dy = drawn(CPU["odd"])
    sizes = jnp.array([11, 0, 19], jnp.int32)
    function = lambda *a: weighted_swiglu(*a, sizes, implementation=implementation)  # noqa: E731
    y, pullback = jax.vjp(function, gate_up, weights)
    found = dict(zip(("y", "d_gate_up", "d_weights"), (y, *pullback(dy)), strict=True))
    wanted = by_numpy(gate_up[:30], weights[:30], dy[:30])
    assert_close({name: array[:30] for name, array in found.items()}, wanted, CPU_TOLERANCE)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("name", ["odd", "qwen3_30b"])
def test_half_precision_on_gpu(name, implementation):
    given = drawn(GPU[name], jnp.bfloat16)
    assert_close(jax.jit(run, static_argnums=3)(*given, implementation), by_numpy(*given), GPU_TOLERANCE)


@pytest.mark.gpu
@needs_gpu
def test_repeats_to_the_bit_on_gpu():
    given = drawn(GPU["odd"], jnp.bfloat16)
    once, *others = (run(*given, "triton") for _ in range(100))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, once, other)


def test_what_is_refused():
    gate_up, weights, _ = drawn(CPU["one_row"])
    assert OPERATION.names == ("triton", "xla", "reference")
    with pytest.raises(dispatch.Unsupported, match=r"triton: needs an NVIDIA GPU .* found cpu"):
        weighted_swiglu(gate_up, weights, implementation="triton")
    with pytest.raises(ValueError, match="no implementation 'xal'; there are triton, xla, reference"):
        weighted_swiglu(gate_up, weights, implementation="xal")
    with pytest.raises(ValueError, match=r"gate and up \[R, 2, M\] \(1, 8\), weights \[R\] \(1,\)"):
        weighted_swiglu(gate_up[:, 0], weights)
    with pytest.raises(ValueError, match="weights float32, got float32 and bfloat16"):
        weighted_swiglu(gate_up, weights.astype(jnp.bfloat16))
