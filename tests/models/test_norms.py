"""Models whose norms are kernels: the same losses, whatever is rematerialised, looped over or offloaded.

The kernels are replaced by their definitions: they themselves are tested in tests/kernels/.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxthru.engine.offload import OffloadConfig
from jaxthru.models import gemma, moe
from jaxthru.models.layers import RMSNorm
from jaxthru.models.ops import Ops
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout
from pallas_kernels import dispatch
from pallas_kernels.rms_norm import triton
from pallas_kernels.rms_norm.reference import rms_norm, rms_norm_rotary

SIZES = {"vocabulary": tiny.VOCABULARY, "layers": 2, "embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 8}
EXPERTS = moe.Config(**SIZES, experts=4, top_k=2, expert_mlp=16)
GEMMA = gemma.Config(**SIZES, mlp=48, window=6, global_every=2)  # has qk_norm always
KERNELS = "norm_forward", "norm_backward", "norm_rotary_forward", "norm_rotary_backward"


def forward(x, scale, *angles, epsilon, offset):
    x32 = x.astype(jnp.float32)
    norm = rms_norm_rotary if angles else rms_norm
    inverse = jax.lax.rsqrt(jnp.mean(x32**2, axis=-1) + epsilon).reshape(-1)
    return norm(x, scale, *angles, epsilon=epsilon, offset=offset), inverse


def backward(x, scale, *others, offset):
    """Returns the gradients as the chain rule has them, with nothing of x but the inverse roots made anew."""
    *angles, inverse, dy, d_residual = others
    g, C = dy.astype(jnp.float32), x.shape[-1]
    if angles:
        cos, sin = (each[:, :, None, :] for each in angles)
        first, second = g[..., : C // 2], g[..., C // 2 :]
        g = jnp.concatenate([first * cos + second * sin, second * cos - first * sin], -1)
    inverse = inverse.reshape(*x.shape[:-1], 1)
    normed = x.astype(jnp.float32) * inverse
    whole = (1,) * (x.ndim - 1) + scale.shape
    along = g * (scale.astype(jnp.float32) + offset).reshape(whole)
    dx = inverse * (along - normed * jnp.mean(along * normed, axis=-1, keepdims=True))
    dx = dx if d_residual is None else dx + d_residual.astype(jnp.float32)
    return dx.astype(x.dtype), jnp.sum((g * normed).reshape(-1, C), axis=0)


@pytest.fixture
def called(monkeypatch):
    """Has Triton's form run on a CPU. Returns the names of the kernels that are traced."""
    names = []

    def triton_call(*arrays, kernel, out_shape, offset, epsilon=None, residual=False, **_):
        names.append(kernel)
        arrays, numbers = ([x for x in arrays if isinstance(x, int) == number] for number in (False, True))
        assert numbers[0] == arrays[0].size // arrays[0].shape[-1]
        if kernel.endswith("forward"):
            return forward(*arrays, epsilon=epsilon, offset=offset)
        if kernel == "norm_backward":
            arrays[-1] = arrays[-1] if residual else None
        else:
            arrays.append(None)
        dx, d_scale = backward(*arrays, offset=offset)
        return dx, jnp.zeros(out_shape[1].shape).at[-1].set(d_scale)

    loaded = (
        types.SimpleNamespace(triton_call=triton_call),
        types.SimpleNamespace(**{name: name for name in KERNELS}),
    )
    monkeypatch.setattr(triton, "load_triton", lambda package: loaded)
    monkeypatch.setattr(triton, "require_gpu", lambda platform, least: None)
    return names


@pytest.mark.parametrize(("loop", "remat"), [("scan", "none"), ("unroll", "projections")])
def test_kernels_train_as_xla_does(loop, remat, called):
    shape = {"mesh": (1, 1, 1), "loop": loop, "remat": remat, "qk_norm": True}
    wanted = tiny.make(**shape).losses(3)
    assert not called
    np.testing.assert_allclose(tiny.make(**shape, rms_norm="triton").losses(3), wanted, rtol=2e-5)
    assert set(called) == set(KERNELS)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 2)])
def test_kernels_train_as_xla_does_offloaded(mesh, called):
    shape = {"mesh": mesh, "loop": "unroll", "remat": "projections", "qk_norm": True}
    wanted = tiny.make(**shape).losses(3)
    made = tiny.make(**shape, rms_norm="triton")
    step, state = tiny.dispatched(made, OffloadConfig(level="optimizer"))
    found = []
    for index in range(3):
        state, metrics = step(state, made.batch(index))
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, wanted, rtol=2e-5)
    assert set(called) == set(KERNELS)


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param((2, 2, 2), {"remat": "projections"}, id="every_axis"),
        pytest.param(
            (1, 2, 1),
            {"loop": "unroll", "microbatches": 2, "remat": "full", "ops": ("copies",)},
            id="microbatches_and_copies",
        ),
        pytest.param((1, 1, 2, 2), {"of": EXPERTS}, id="experts", marks=pytest.mark.slow),
        pytest.param(
            (1, 1, 2), {"of": EXPERTS, "qk_norm_together": True}, id="heads_together", marks=pytest.mark.slow
        ),
        pytest.param((2, 1, 2), {"of": GEMMA}, id="gemma", marks=pytest.mark.slow),
    ],
)
def test_each_device_makes_the_norms_of_its_own_tokens(mesh, settings, called):
    """With the scale's gradient summed over them: losses of later steps depend on it."""
    settings = settings if settings.get("of") is GEMMA else {"qk_norm": True} | settings
    wanted = tiny.make(mesh, **settings).losses(3)
    assert not called
    np.testing.assert_allclose(tiny.make(mesh, **settings, rms_norm="triton").losses(3), wanted, rtol=2e-5)
    rotated = [name for name in KERNELS if "rotary" in name]
    assert set(called) == {*KERNELS} - {*rotated * settings.get("qk_norm_together", False)}


def test_kernels_gather_no_activation(called):
    """Whose partitioned call would have the tokens of all devices."""
    gathers = set()
    for by in ("xla", "triton"):
        made = tiny.make((1, 2, 1), loop="unroll", qk_norm=True, rms_norm=by)
        gathers.add(made.compiled.as_text().count(" all-gather("))
    assert len(gathers) == 1 and 0 not in gathers


@pytest.mark.gpu
@pytest.mark.several_gpus
@pytest.mark.parametrize(("mesh", "of"), [((1, 2, 1), None), ((1, 1, 2), None), ((1, 1, 1, 2), EXPERTS)])
def test_several_gpus_train_by_kernels_as_by_xla(mesh, of):
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    shape = {"of": of, "qk_norm": True, "attention": "xla"}
    with jax.default_matmul_precision("highest"):  # TF32 has what norms round go on to the fourth digit
        losses = {by: tiny.make(mesh, **shape, rms_norm=by).losses(3) for by in ("triton", "xla")}
    np.testing.assert_allclose(losses["triton"], losses["xla"], rtol=1e-4)


def test_where_no_kernel_can_run_norms_are_left_to_the_partitioner():
    layout = Layout(make_mesh(MeshConfig(), jax.devices()[:1]))
    ops = Ops(layout, jnp.dtype(jnp.float32))
    assert ops.norm_by is None
    several = dataclasses.replace(ops, layout=Layout(make_mesh(MeshConfig(1, 2, 1), jax.devices()[:2])))
    assert several.norm_by == "xla"
    assert dataclasses.replace(several, rms_norm_by="reference").norm_by == "reference"
    with dispatch.assumed("gpu"):
        assert several.norm_by is None


def test_a_norm_of_other_dims_is_xla_s_on_several_devices(called):
    """As families outside of jaxthru may have it: heads that are not rotated."""
    ops = tiny.make((1, 2, 1), rms_norm="triton").step.model.ops
    norm, context = RMSNorm(16, 1e-5), types.SimpleNamespace(ops=ops)
    np.testing.assert_allclose(norm(jnp.ones((3, 5, 16)), context), 1.0, rtol=1e-4)
    assert not called
    np.testing.assert_allclose(norm(jnp.ones((4, 16)), context), 1.0, rtol=1e-4)
    assert called == ["norm_forward"]


def test_a_norm_without_a_context_is_xla_s(called):
    """As families outside of jaxthru may call it, which name no kernels."""
    norm, x = RMSNorm(16, 1e-5), jnp.ones((3, 16))
    np.testing.assert_allclose(norm(x), 1.0, rtol=1e-4)
    same, y = norm.branch(x)
    np.testing.assert_array_equal(same, x)
    np.testing.assert_array_equal(y, norm(x))
    assert not called
