"""The contract of the norm: values and gradients, that of the residual stream among them, odd inputs, and
what each form takes and refuses."""

import functools
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import dispatch
from pallas_kernels.rms_norm import (
    OPERATION,
    rms_norm,
    rms_norm_residual,
    rms_norm_rotary,
    rotate,
    triton,
)
from pallas_kernels.rms_norm.shapes import CPU, CPU_HEADS, GPU, GPU_HEADS
from pallas_kernels.testing import CPU_TOLERANCE, GPU_TOLERANCE, assert_close, fresh_seed, has_gpu, normal

EPSILON = 1e-5
FUNCTIONS = {"alone": rms_norm, "residual": rms_norm_residual, "rotary": rms_norm_rotary}
needs_gpu = pytest.mark.skipif(not has_gpu((8, 0)), reason="needs an NVIDIA GPU of capability 8.0")
TRITON = pytest.param("triton", marks=[pytest.mark.gpu, needs_gpu])
CASES = [
    (kind, name, shape)
    for kind in FUNCTIONS
    for name, shape in (CPU_HEADS if kind == "rotary" else CPU).items()
]
GPU_CASES = [
    (kind, name, shape)
    for kind in FUNCTIONS
    for name, shape in (GPU_HEADS if kind == "rotary" else GPU).items()
]


def cases(found: list) -> pytest.MarkDecorator:
    ids = [f"{kind}-{name}" for kind, name, _ in found]
    return pytest.mark.parametrize("kind, shape", [(kind, shape) for kind, _, shape in found], ids=ids)


def draw(rng: np.random.Generator, kind: str, shape, dtype=jnp.float32, scale_dtype=jnp.float32, offset=0.0):
    """Returns what a function takes by place, and the gradients of what it returns."""
    x, dy, d_residual = (normal(rng, shape, dtype) for _ in range(3))
    scale = (1 - offset + 0.3 * normal(rng, shape[-1:], jnp.float32)).astype(scale_dtype)
    if kind == "rotary":
        angle = normal(rng, (*shape[:2], shape[-1] // 2), jnp.float32)
        return (x, scale, jnp.cos(angle), 1.1 * jnp.sin(angle)), dy
    return (x, scale), (d_residual, dy) if kind == "residual" else dy


def run(kind: str, arguments, gradients, **options) -> dict:
    """Returns the values, and the gradients of x and scale."""

    def function(x, scale):
        return FUNCTIONS[kind](x, scale, *arguments[2:], epsilon=EPSILON, **options)

    values, pullback = jax.vjp(function, *arguments[:2])
    dx, d_scale = pullback(gradients)
    return {"values": values, "dx": dx, "d_scale": d_scale}


def expected(kind: str, arguments, gradients, **options) -> dict:
    """Returns the reference's, in float32."""
    arguments, gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (arguments, gradients))
    return run(kind, arguments, gradients, implementation="reference", **options)


def by_numpy(kind: str, arguments, offset: float) -> np.ndarray:
    """Returns the norm by its definition, in float64 and a row at a time."""
    x, scale, *angles = (np.asarray(each, np.float64) for each in arguments)
    rows = x.reshape(-1, x.shape[-1])
    y = np.stack([row / np.sqrt(row @ row / len(row) + EPSILON) * (scale + offset) for row in rows])
    y = y.reshape(x.shape)
    if angles:
        cos, sin = angles
        half = x.shape[-1] // 2
        for i in range(half):
            a, b = y[..., i].copy(), y[..., i + half].copy()
            y[..., i] = a * cos[:, :, None, i] - b * sin[:, :, None, i]
            y[..., i + half] = a * sin[:, :, None, i] + b * cos[:, :, None, i]
    return y


@pytest.mark.parametrize("offset", [0.0, 1.0])
@cases(CASES)
def test_agrees_with_reference(kind, shape, offset):
    arguments, gradients = draw(np.random.default_rng(fresh_seed()), kind, shape, offset=offset)
    found = run(kind, arguments, gradients, offset=offset, implementation="xla")
    assert_close(found, expected(kind, arguments, gradients, offset=offset), CPU_TOLERANCE)
    y = found["values"][1] if kind == "residual" else found["values"]
    assert_close(y, by_numpy(kind, arguments, offset), CPU_TOLERANCE)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("implementation", ["triton", "xla"])
@cases(GPU_CASES)
def test_half_precision_on_gpu(kind, shape, implementation):
    half_precision(kind, shape, implementation, jnp.float32, 0.0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("scale_dtype, offset", [(jnp.float32, 1.0), (jnp.bfloat16, 0.0)], ids=str)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_scales_on_gpu(kind, scale_dtype, offset):
    shape = (GPU_HEADS if kind == "rotary" else GPU)["odd"]
    half_precision(kind, shape, "triton", scale_dtype, offset)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_repeats_to_the_bit_on_gpu(kind):
    shape = GPU_HEADS["qwen3_0_6b_key"] if kind == "rotary" else GPU["llama3_2_1b"]
    arguments, gradients = draw(np.random.default_rng(fresh_seed()), kind, shape, jnp.bfloat16)
    once, *others = (run(kind, arguments, gradients, implementation="triton") for _ in range(10))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, once, other)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_half_precision(kind):
    shape = (CPU_HEADS if kind == "rotary" else CPU)["odd"]
    half_precision(kind, shape, "xla", jnp.bfloat16, 1.0)


def half_precision(kind, shape, implementation, scale_dtype, offset) -> None:
    """Fails unless results are the reference's, and have the dtypes of what they belong to. XLA's form rounds
    twice: a norm before it is rotated, a gradient before the residual stream's is added."""
    rng = np.random.default_rng(fresh_seed())
    arguments, gradients = draw(rng, kind, shape, jnp.bfloat16, scale_dtype, offset)
    found = jax.jit(functools.partial(run, kind, offset=offset, implementation=implementation))(
        arguments, gradients
    )
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves((found["values"], found["dx"])))
    assert found["d_scale"].dtype == scale_dtype
    tolerance = GPU_TOLERANCE * (2 if implementation == "xla" else 1)
    assert_close(found, expected(kind, arguments, gradients, offset=offset), tolerance)


@pytest.mark.parametrize("implementation", ["xla", "reference", TRITON])
def test_the_residual_stream_is_added_once(implementation):
    """The gradient of x is the norm's and that of the residual stream; x comes back as it is."""
    (x, scale), (d_residual, dy) = draw(np.random.default_rng(fresh_seed()), "residual", CPU["odd"])
    how = {"implementation": implementation}
    alone = run("alone", (x, scale), dy, **how)
    both = run("residual", (x, scale), (d_residual, dy), **how)
    np.testing.assert_array_equal(both["values"][0], x)
    assert_close(both["values"][1], alone["values"], 1e-6)
    assert_close(both["dx"], d_residual + alone["dx"], CPU_TOLERANCE)
    assert_close(both["d_scale"], alone["d_scale"], CPU_TOLERANCE)
    zero = jnp.zeros_like(dy)
    stream = run("residual", (x, scale), (d_residual, zero), **how)
    np.testing.assert_array_equal(stream["dx"], d_residual)
    assert not np.any(stream["d_scale"])


@pytest.mark.parametrize("implementation", ["xla", "reference", TRITON])
def test_odd_inputs(implementation):
    how = {"implementation": implementation, "epsilon": EPSILON}
    scale = jnp.full((64,), 2.0)
    y, pullback = jax.vjp(lambda x: rms_norm(x, scale, **how), jnp.zeros((3, 64)))
    assert not np.any(y)  # a row of zeros has a norm of zeros, and a gradient that is finite
    np.testing.assert_allclose(pullback(jnp.ones((3, 64)))[0], 2 / np.sqrt(EPSILON), rtol=1e-5)
    small = rms_norm(jnp.full((3, 64), 1e-12), scale, **how)
    np.testing.assert_allclose(small, 2e-12 / np.sqrt(EPSILON), rtol=1e-5)
    # What is not finite shows, in its own row alone.
    for bad in (jnp.nan, jnp.inf):
        y = np.asarray(rms_norm(jnp.ones((3, 64)).at[1, 5].set(bad), scale, **how))
        assert not np.isfinite(y[1]).all() and np.isfinite(y[[0, 2]]).all()


def test_xla_s_gradient_of_angles_is_not_asked_for():
    arguments, dy = draw(np.random.default_rng(0), "rotary", CPU_HEADS["even"])
    for name in ("xla", "reference"):
        function = functools.partial(rms_norm_rotary, epsilon=EPSILON, implementation=name)
        _, pullback = jax.vjp(function, *arguments)
        assert not any(np.any(gradient) for gradient in pullback(dy)[2:])


def test_rotate_turns_pairs():
    x = jnp.zeros((1, 1, 1, 4)).at[..., 0].set(1.0)
    angle = jnp.asarray([[[jnp.pi / 2, 0.3]]])
    np.testing.assert_allclose(rotate(x, (jnp.cos(angle), jnp.sin(angle))), [[[[0, 0, 1, 0]]]], atol=1e-6)


# Triton's form, without a GPU: see also triton_interpreted.py


@pytest.fixture
def triton_calls(monkeypatch):
    """Returns a list of the calls of kernels, which then give ones."""
    calls = []

    def triton_call(*arrays, kernel, out_shape, **how):
        calls.append((kernel, arrays, how))
        return [jnp.ones(shape.shape, shape.dtype) for shape in out_shape]

    names = "norm_forward", "norm_backward", "norm_rotary_forward", "norm_rotary_backward"
    stub = types.SimpleNamespace(triton_call=triton_call)
    monkeypatch.setattr(
        triton, "load_triton", lambda _: (stub, types.SimpleNamespace(**{name: name for name in names}))
    )
    return calls


@cases([*CASES, *GPU_CASES])
def test_triton_s_blocks_cover_all_rows(kind, shape, triton_calls):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    scale = jax.ShapeDtypeStruct(shape[-1:], jnp.float32)
    angle = jax.ShapeDtypeStruct((*shape[:2], shape[-1] // 2), jnp.float32)
    arguments = (x, scale, angle, angle) if kind == "rotary" else (x, scale)

    def both(arguments, gradients):
        return run(kind, arguments, gradients, implementation="triton", platform="gpu")

    jax.eval_shape(both, arguments, (x, x) if kind == "residual" else x)
    assert [kernel for kernel, *_ in triton_calls] == [
        "norm_" + "rotary_" * (kind == "rotary") + name for name in ("forward", "backward")
    ]
    rows, width = np.prod(shape[:-1]), shape[-1] // (2 if kind == "rotary" else 1)
    for kernel, arrays, how in triton_calls:
        columns = how["BC" if kind == "rotary" else "BD"]
        assert arrays[-2 if kind == "rotary" else -1] == rows and width <= columns < 2 * width
        threads = 32 * how["num_warps"]
        assert how["num_warps"] in (4, 8, 16) and how["R"] * columns <= threads * 32
        if kernel.endswith("forward"):
            assert (how["grid"] - 1) * how["R"] < rows <= how["grid"] * how["R"]
        else:  # no program without a block
            assert how["grid"] == how["programs"] and (how["grid"] - 1) * how["R"] < rows
            if kind == "rotary":
                assert arrays[-1] == shape[2]
            else:
                assert how["residual"] == (kind == "residual")
            assert 1 <= how["stages"] <= 3


def test_what_is_staged_fits_the_smallest_shared_memory():
    for itemsize in (2, 4):
        for D in (64, 1024, 2560, 4096, 8192):
            block = triton.tile(D, **triton.BACKWARD)
            staged = 3 * block["R"] * block["BD"] * itemsize
            assert (triton.stages(staged) - 1) * staged <= 96 << 10
    assert triton.stages(3 * 8192 * 2) == 3 and triton.stages(3 * 8192 * 4) == 2


def test_the_backward_pass_keeps_no_more_than_x_and_a_number_a_row(triton_calls):
    """What a loop over layers stacks for the backward pass: x, the scale, and the inverse roots."""
    x, scale = jnp.ones((64, 256), jnp.bfloat16), jnp.ones((256,))

    def function(x, scale):
        return rms_norm_residual(x, scale, epsilon=EPSILON, implementation="triton", platform="gpu")

    _, pullback = jax.vjp(function, x, scale)
    kept = sorted(leaf.shape for leaf in jax.tree.leaves(pullback))
    assert kept == [(64,), (64, 256), (256,)], kept


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_within_a_shard_map(kind, triton_calls):
    """Rows over two devices: the scale's gradient is a sum over them, whoever calls the kernel."""
    shape = (2, 4, 3, 8) if kind == "rotary" else (6, 16)
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    arguments, gradients = draw(np.random.default_rng(fresh_seed()), kind, shape)
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def run_by(implementation, arguments, gradients):
        specs = (rows, whole) + (rows,) * (len(arguments) - 2)

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=rows)
        def local(*arguments):
            how = {"epsilon": EPSILON, "implementation": implementation, "platform": "gpu"}
            return FUNCTIONS[kind](*arguments, **how)

        values, pullback = jax.vjp(local, *arguments)
        dx, d_scale, *_ = pullback(gradients)
        return {"values": values, "dx": dx, "d_scale": d_scale}

    found = jax.jit(functools.partial(run_by, "xla"))(arguments, gradients)
    assert_close(found, expected(kind, arguments, gradients), CPU_TOLERANCE)
    found = jax.jit(functools.partial(run_by, "triton"))(arguments, gradients)  # kernels give ones
    np.testing.assert_array_equal(found["d_scale"], 2 * triton_calls[-1][2]["grid"])


# What is refused


def test_named_runs_or_raises(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_logged", set())
    (x, scale), _ = draw(np.random.default_rng(0), "alone", CPU["one_row"])
    with caplog.at_level(logging.INFO, "jaxthru.kernels"):
        rms_norm(x, scale, epsilon=EPSILON)
        rms_norm_residual(x, scale, epsilon=EPSILON)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["kernels: rms_norm uses xla", "kernels: rms_norm_residual uses xla"]
    with pytest.raises(ValueError, match=r"no implementation 'xal'; there are triton, xla, reference"):
        rms_norm(x, scale, epsilon=EPSILON, implementation="xal")
    assert OPERATION.names == ("triton", "xla", "reference")


def test_triton_says_what_it_needs(triton_calls):
    how = {"epsilon": EPSILON, "implementation": "triton"}
    x, scale = jnp.ones((2, 64)), jnp.ones((64,))
    with pytest.raises(dispatch.Unsupported, match=r"triton: needs an NVIDIA GPU .* >= 8\.0, found cpu"):
        rms_norm_residual(x, scale, **how)
    how |= {"platform": "gpu"}
    with pytest.raises(dispatch.Unsupported, match="rows of at most 8,192 entries, got 8,193"):
        rms_norm(jnp.ones((2, 8193)), jnp.ones((8193,)), **how)
    angle = jnp.ones((1, 2, 129))
    with pytest.raises(dispatch.Unsupported, match="rows of at most 256 entries, got 258"):
        rms_norm_rotary(jnp.ones((1, 2, 1, 258)), jnp.ones((258,)), angle, angle, **how)
    with jax.enable_x64(True), pytest.raises(dispatch.Unsupported, match="or float32, got float64"):
        rms_norm(jnp.ones((2, 64), jnp.float64), scale, **how)


def test_arguments_are_checked():
    x, scale = jnp.ones((2, 3, 4, 8)), jnp.ones((8,))
    angle = jnp.ones((2, 3, 4))
    with pytest.raises(
        ValueError, match=r"rms_norm: shapes do not fit: .* takes a scale of \(8,\), got \(7,\)"
    ):
        rms_norm(x, jnp.ones((7,)), epsilon=EPSILON)
    with pytest.raises(ValueError, match="rms_norm_residual: x is of a float dtype, got int32"):
        rms_norm_residual(jnp.ones((2, 8), jnp.int32), scale, epsilon=EPSILON)
    with pytest.raises(ValueError, match=r"rms_norm_rotary: .* got \(2, 3, 4\) and \(2, 3, 3\)"):
        rms_norm_rotary(x, scale, angle, angle[..., 1:], epsilon=EPSILON)
    with pytest.raises(ValueError, match="cos and sin are float32, got float32 and bfloat16"):
        rms_norm_rotary(x, scale, angle, angle.astype(jnp.bfloat16), epsilon=EPSILON)
