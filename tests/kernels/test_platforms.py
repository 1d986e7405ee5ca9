"""What runs on each platform where nothing is named: the choices in the table of docs/kernels.md."""

import importlib
import logging
import types
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import dispatch
from pallas_kernels.adamw_8bit import Adam, Scalars, quantise, update
from pallas_kernels.attention import attention, cudnn_packed, find_segments
from pallas_kernels.cast_transpose import cast_transpose
from pallas_kernels.collective_matmul import all_gather_matmul
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_outer
from pallas_kernels.linear_cross_entropy import linear_cross_entropy
from pallas_kernels.rms_norm import rms_norm, rms_norm_residual, rms_norm_rotary
from pallas_kernels.routing import combine, route, sort_assignments
from pallas_kernels.routing import dispatch as dispatch_tokens
from pallas_kernels.weighted_swiglu import weighted_swiglu

bf16, f32 = jnp.bfloat16, jnp.float32


def run_attention(platform):
    q, ids = jnp.zeros((1, 256, 2, 64), bf16), jnp.ones((1, 256), jnp.int32)
    return attention(q, q, q, find_segments(ids, 1), platform=platform)


def run_linear_cross_entropy(platform):
    def loss(hidden, matrix):
        targets, weights = jnp.zeros((1, 16), jnp.int32), jnp.ones((1, 16), f32)
        return linear_cross_entropy(hidden, matrix, targets, weights, platform=platform)[0]

    return jax.grad(loss)(jnp.zeros((1, 16, 32), bf16), jnp.zeros((32, 64), f32))


def run_adamw_8bit(platform):
    x = jnp.zeros((4, 256), f32)
    moments = (quantise(x, kind) for kind in ("signed", "unsigned"))
    scalars = Scalars(*(f32(1),) * 4, jnp.asarray(True))
    return update(x, x, None, *moments, None, scalars, Adam(0.9, 0.95, 1e-8, 0.1), platform=platform)


def run_rms_norm(platform):
    return rms_norm(jnp.zeros((4, 256), bf16), jnp.ones((256,)), epsilon=1e-5, platform=platform)


def run_rms_norm_residual(platform):
    return rms_norm_residual(jnp.zeros((4, 256), bf16), jnp.ones((256,)), epsilon=1e-5, platform=platform)


def run_rms_norm_rotary(platform):
    x, angle = jnp.zeros((1, 4, 2, 64), bf16), jnp.ones((1, 4, 32), f32)
    return rms_norm_rotary(x, jnp.ones((64,)), angle, angle, epsilon=1e-5, platform=platform)


def run_grouped_matmul(platform):
    x, w, sizes = jnp.zeros((512, 128), bf16), jnp.zeros((4, 128, 256), bf16), jnp.full(4, 128, jnp.int32)
    return grouped_matmul(x, w, sizes, platform=platform)


def run_grouped_outer(platform):
    x, y, sizes = jnp.zeros((512, 128), bf16), jnp.zeros((512, 256), bf16), jnp.full(4, 128, jnp.int32)
    return grouped_outer(x, y, sizes, platform=platform)


def run_routing(platform):
    how = {"platform": platform}
    logits, valid, x = jnp.zeros((64, 8)), jnp.ones(64, bool), jnp.zeros((64, 128), bf16)
    routed = route(logits, valid, top_k=2, score="softmax", normalise=True, **how)
    order = sort_assignments(routed.ids_NK, 8, **how)
    return combine(dispatch_tokens(x, order, 2, **how), order, 64, **how)


def run_weighted_swiglu(platform):
    return weighted_swiglu(jnp.zeros((64, 2, 128), bf16), jnp.ones(64), platform=platform)


def run_cast_transpose(platform):
    return cast_transpose(jnp.zeros((64, 128), bf16), jnp.float32(1), jnp.float8_e4m3fn, platform=platform)


def run_collective_matmul(platform, rows=512, columns=512, implementation=None):
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,))
    specs = PartitionSpec("tensor"), PartitionSpec(None, "tensor")

    def local(x, w):
        how = {"axis_name": "tensor", "platform": platform, "implementation": implementation}
        return all_gather_matmul(x, (w,), **how)[0]

    function = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[1])
    return function(jnp.zeros((rows, 256), bf16), jnp.zeros((256, columns), bf16))


ROUTING = "route", "sort_assignments", "dispatch", "combine"
RUNS = {
    "attention": run_attention,
    "linear_cross_entropy": run_linear_cross_entropy,
    "adamw_8bit": run_adamw_8bit,
    "rms_norm": run_rms_norm,
    "rms_norm_residual": run_rms_norm_residual,
    "rms_norm_rotary": run_rms_norm_rotary,
    "grouped_matmul": run_grouped_matmul,
    "grouped_outer": run_grouped_outer,
    **dict.fromkeys(ROUTING, run_routing),
    "weighted_swiglu": run_weighted_swiglu,
    "cast_transpose": run_cast_transpose,
    "all_gather_matmul": run_collective_matmul,
}
TRITON = "attention", "linear_cross_entropy", "adamw_8bit", "rms_norm"
TRITON += "grouped_matmul", "routing", "weighted_swiglu", "cast_transpose"
HOPPER, AMPERE, AMD = (9, 0), (8, 0), None  # what a process with a GPU finds of NVIDIA's
WHERE = {"cpu": ("cpu", None), "hopper": ("gpu", HOPPER), "ampere": ("gpu", AMPERE), "amd": ("gpu", AMD)}
WHERE["tpu"] = "tpu", None
CHOICE = {
    "attention": {"cpu": "xla", "hopper": "cudnn_packed", "ampere": "triton", "amd": "xla", "tpu": "xla"},
    "linear_cross_entropy": dict.fromkeys(WHERE, "xla") | {"hopper": "triton", "ampere": "triton"},
    "adamw_8bit": dict.fromkeys(WHERE, "xla") | {"hopper": "triton", "ampere": "triton"},
    **dict.fromkeys(
        ("rms_norm", "rms_norm_residual", "rms_norm_rotary"),
        dict.fromkeys(WHERE, "xla") | {"hopper": "triton", "ampere": "triton"},
    ),
    **dict.fromkeys(
        (*ROUTING, "weighted_swiglu"), dict.fromkeys(WHERE, "xla") | {"hopper": "triton", "ampere": "triton"}
    ),
    **dict.fromkeys(
        ("grouped_matmul", "grouped_outer"),
        dict.fromkeys(WHERE, "xla") | {"hopper": "triton", "ampere": "triton", "tpu": "ragged"},
    ),
    "cast_transpose": dict.fromkeys(WHERE, "xla") | {"hopper": "triton"},
    "all_gather_matmul": dict.fromkeys(WHERE, "reference") | {"tpu": "ring"},
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("operation", RUNS)
def test_what_runs_where_nothing_is_named(operation, where, monkeypatch, caplog):
    platform, capability = WHERE[where]
    wanted = CHOICE[operation][where]

    def triton_call(*operands, out_shape, **how):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape)

    for name in TRITON:
        module = importlib.import_module(f"pallas_kernels.{name}.triton")
        loaded = types.SimpleNamespace(triton_call=triton_call), mock.MagicMock()
        monkeypatch.setattr(module, "load_triton", lambda package, loaded=loaded: loaded)
    for module in (dispatch, cudnn_packed):
        monkeypatch.setattr(module, "nvidia_compute_capability", lambda: capability)
    monkeypatch.setattr(cudnn_packed, "_cudnn_version", lambda: cudnn_packed.MIN_CUDNN)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(dispatch, "_logged", set())
    jax.clear_caches()
    with caplog.at_level(logging.INFO, "jaxthru.kernels"):
        jax.eval_shape(lambda: RUNS[operation](platform))
    said = [record.getMessage() for record in caplog.records]
    assert any(text.startswith(f"kernels: {operation} uses {wanted}") for text in said), said


@pytest.mark.parametrize("shape", [(512, 512), (1 << 16, 1 << 15)], ids=["small", "large"])
@pytest.mark.parametrize("where", WHERE)
def test_fused_runs_where_it_is_expected_to_be_faster(where, shape, monkeypatch, caplog):
    platform, capability = WHERE[where]
    monkeypatch.setattr(dispatch, "nvidia_compute_capability", lambda: capability)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(dispatch, "_logged", set())
    jax.clear_caches()
    with caplog.at_level(logging.INFO, "jaxthru.kernels"):
        jax.eval_shape(lambda: run_collective_matmul(platform, *shape, implementation="fused"))
    (said,) = (record.getMessage() for record in caplog.records)
    faster = where == "hopper" and shape != (512, 512)
    wanted = "mosaic_gpu" if faster else CHOICE["all_gather_matmul"][where]
    assert said.startswith(f"kernels: all_gather_matmul uses {wanted}"), said


def test_kernels_that_write_to_peers_need_nvlink(monkeypatch):
    card = types.SimpleNamespace(device_kind="NVIDIA H100 PCIe")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [card])
    with pytest.raises(dispatch.Unsupported, match="joined by NVLink, found NVIDIA H100 PCIe"):
        dispatch.require_nvlink("gpu")
    card.device_kind = "NVIDIA H200"
    dispatch.require_nvlink("gpu")


@pytest.mark.parametrize("capability", [AMD, AMPERE, (7, 5)], ids=["amd", "ampere", "turing"])
def test_triton_may_be_named_on_gpus_of_other_makers(capability, monkeypatch):
    monkeypatch.setattr(dispatch, "nvidia_compute_capability", lambda: capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    if capability == (7, 5):
        with pytest.raises(dispatch.Unsupported, match=r">= 8\.0, found 7\.5"):
            dispatch.require_gpu("gpu", (8, 0))
    else:
        dispatch.require_gpu("gpu", (8, 0))
    with pytest.raises(dispatch.Unsupported, match="found cpu"):
        dispatch.require_gpu("cpu", (8, 0))
