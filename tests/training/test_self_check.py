"""A device whose attention is wrong trains nothing."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from tiny import SHAPE, bind, make

from jaxthru.models.ops import Ops
from jaxthru.runtime.errors import TrainingError
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout
from jaxthru.training import self_check
from jaxthru.training.self_check import check_attention
from pallas_kernels.attention import check, reference
from pallas_kernels.attention.check import TOLERANCE, differences


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("dtype", "window"), [("float32", None), ("bfloat16", None), ("bfloat16", 4096)])
def test_what_runs_here_agrees(packed, dtype, window):
    errors = differences(4, 2, 16, jnp.dtype(dtype), packed=packed, window=window, implementation=None)
    assert errors.keys() == {"o", "dq", "dk", "dv"}
    assert max(errors.values()) < (1e-5 if dtype == "float32" else TOLERANCE / 2)
    assert dtype == "float32" or min(errors.values()) > 0


def across_documents(q, k, v, segments, *, implementation, window=None):
    """Attention that is causal within the row, as a kernel that loses its documents would be."""
    return reference.attention(q, k, v, segments._replace(ids=jnp.zeros_like(segments.ids)))


def within(change):
    """Returns attention whose windows are changed."""

    def attention(q, k, v, segments, *, implementation, window):
        return reference.attention(q, k, v, segments, window=change(window))

    return attention


@pytest.mark.parametrize(("window", "packed"), [(20, True), (4096, True), (4096, False)])
def test_a_wrong_window_is_seen(monkeypatch, window, packed):
    for change in (lambda window: None, lambda window: window - 1, lambda window: window + 1):
        monkeypatch.setattr(check, "attention", within(change))
        errors = differences(
            4, 2, 16, jnp.dtype("bfloat16"), packed=packed, window=window, implementation=None
        )
        assert max(errors.values()) > 1.5 * TOLERANCE


def not_a_number(q, k, v, segments, *, implementation, window=None):
    return reference.attention(q, k, v, segments).at[0, 5].set(jnp.nan)


@pytest.mark.parametrize("wrong", [across_documents, not_a_number])
def test_wrong_attention_is_refused(monkeypatch, wrong):
    monkeypatch.setattr(check, "attention", wrong)
    assert max(differences(4, 2, 16, jnp.dtype("bfloat16"), packed=True, implementation=None).values()) > 0.1
    model = make().step.objective.model
    check_attention(model, 8, 64, 8)  # on a CPU there is no library to mistrust
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(
        TrainingError, match=r"kernels.attention = .*: on the cpu of process 0 it is off its reference by o "
    ):
        check_attention(model, 8, 64, 8)


def windowed(chain, window):
    """A chain whose blocks attend alternately within a window, and to all."""

    def narrowed(stage):
        def apply(params, x, context):
            def attention(q, k, v, segments, _):
                return context.attend(q, k, v, window)

            inner = dataclasses.replace(context, attention=attention)
            return stage.apply(params, x, inner)

        return dataclasses.replace(stage, name=f"{stage.name}_local", apply=apply)

    (group,) = chain.groups
    both = tuple(each for block in group.blocks for each in (narrowed(block), block))
    return chain._replace(groups=(group._replace(blocks=both, repetitions=group.repetitions // 2),))


def test_each_kind_of_attention_is_checked_with_its_window(monkeypatch):
    model = make().step.objective.model
    plain = model.attention_shapes(2, 64)
    assert [shape.window for shape in plain] == [None]
    model = dataclasses.replace(model, chain=windowed(model.chain, 48))
    assert model.attention_shapes(2, 64) == [plain[0]._replace(window=48), plain[0]]
    assert model.attention_shapes(2, 48) == plain  # the window covers the row
    checked = []

    def differences(*_, window, **__):
        checked.append(window)
        return {"o": 1.0 if window else 0.0}

    monkeypatch.setattr(self_check, "differences", differences)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(TrainingError, match=r"by o 1\.0e\+00 \(window 48\), above"):
        check_attention(model, 8, 64, 8)
    assert checked == [48, None]


@pytest.mark.parametrize(
    ("rows", "mesh", "first"),
    [(2, (1, 1, 1), "cudnn_packed"), (4, (1, 1, 1), "triton"), (4, (1, 2, 1), "cudnn_packed")],
)
def test_what_is_checked_is_what_the_run_takes(monkeypatch, rows, mesh, first):
    """Rows of 8,192 tokens with room for 64 segments: cuDNN's workspace is 8 GiB a row and device."""
    checked = []

    def differences(*_, implementation, **__):
        checked.append(implementation)
        return {"o": 0.0}

    monkeypatch.setattr(self_check, "differences", differences)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    layout = Layout(make_mesh(MeshConfig(*mesh), jax.devices()[: math.prod(mesh)]))
    shape = dataclasses.replace(SHAPE, heads=16, kv_heads=4, head_dim=128)
    model = bind(shape, Ops(layout, jnp.dtype("bfloat16")), "none")
    check_attention(model, rows, 8192, 64)
    assert [names[0] for names in checked] == [first]
