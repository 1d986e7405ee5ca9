"""A device whose attention is wrong trains nothing."""

import jax
import jax.numpy as jnp
import pytest
from tiny import make

from jaxthru.training.account import TrainingError
from jaxthru.training.self_check import check_attention
from pallas_kernels.attention import check, reference
from pallas_kernels.attention.check import TOLERANCE, differences


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_runs_here_agrees(packed, dtype):
    errors = differences(4, 2, 16, jnp.dtype(dtype), packed=packed)
    assert errors.keys() == {"o", "dq", "dk", "dv"} and max(errors.values()) < TOLERANCE[dtype] / 2
    assert dtype == "float32" or min(errors.values()) > 0


def across_documents(q, k, v, segments, *, implementation):
    """Attention that is causal within the row, as a kernel that loses its documents would be."""
    return reference.attention(q, k, v, segments._replace(ids=jnp.zeros_like(segments.ids)))


def not_a_number(q, k, v, segments, *, implementation):
    return reference.attention(q, k, v, segments).at[0, 5].set(jnp.nan)


@pytest.mark.parametrize("wrong", [across_documents, not_a_number])
def test_wrong_attention_is_refused(monkeypatch, wrong):
    monkeypatch.setattr(check, "attention", wrong)
    assert max(differences(4, 2, 16, jnp.dtype("bfloat16"), packed=True).values()) > 0.1
    model = make().step.objective.model
    check_attention(model, 8)  # on a CPU there is no library to mistrust
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(
        TrainingError, match=r"model.attention = .*: on this cpu it is off its reference by o "
    ):
        check_attention(model, 8)
