"""Held-out loss: a mean over tokens, of all and of each source."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthru.engine.objectives.cross_entropy import CrossEntropy
from jaxthru.runtime.errors import InputError
from jaxthru.training.evaluate import EvaluateConfig, Evaluation, NoEvaluation


def evaluation(sums, batches=(None,), **config) -> Evaluation:
    return Evaluation(EvaluateConfig(**config), sums, batches, ("code", "prose", "none"))


def test_every_token_counts_once():
    """Neither sources nor batches of few tokens count for more: means of means would be 3, or 2."""
    batches = [((8.0, 4.0, 0.0), (2.0, 2.0, 0.0)), ((0.0, 20.0, 0.0), (0.0, 20.0, 0.0))]

    def sums(params, batch, weight):
        assert params == "params" and weight.dtype == jnp.float32 and weight == 1
        return {"loss": 1e9, "source_loss": np.float32(batch[0]), "source_tokens": np.float32(batch[1])}

    row = evaluation(sums, batches)(7, "params")
    assert row == {
        "step": 7,
        "loss": pytest.approx(32 / 24),
        "loss_by_source": {"code": pytest.approx(4), "prose": pytest.approx(24 / 22), "none": None},
        "tokens": 24,
    }


def test_many_batches_add_up_in_more_than_float32():
    """Beyond 2^24 a float32 sum no longer counts single tokens."""

    def sums(params, batch, weight):
        counts = np.float32([2**24 if batch == 0 else 1, 0, 0])
        return {"source_loss": counts, "source_tokens": counts}

    assert evaluation(sums, range(4))(1, None)["tokens"] == 2**24 + 3


def test_the_loss_mask_and_the_sources_are_the_batch_s():
    """With each token's cross-entropy known, what counts of it is the mask's to say, whatever its weight."""
    draw = np.random.default_rng(0)
    cross_entropy = draw.uniform(1, 9, (4, 16)).astype(np.float32)
    source = np.repeat(np.arange(2, dtype=np.int32), 32).reshape(4, 16)
    mask = (draw.random((4, 16)) < 0.4 + 0.3 * source).astype(np.float32)
    batch = {"loss_mask": mask, "source": source, "targets": np.zeros((4, 16), np.int32)}
    ops = SimpleNamespace(linear_cross_entropy=lambda *_: (jnp.zeros(()), jnp.asarray(cross_entropy), None))
    model = SimpleNamespace(ops=ops, lm_head=lambda params: (params, None))
    objective = CrossEntropy(model=model, max_segments=8, sources=3)
    sums = lambda params, batch, weight: objective(params, None, batch, weight)[1]  # noqa: E731
    row = evaluation(sums, [jax.tree.map(jnp.asarray, batch)])(0, None)
    counts = mask.astype(bool)
    assert row["loss"] == pytest.approx(cross_entropy[counts].mean(), rel=1e-6)
    assert row["tokens"] == counts.sum() and row["loss_by_source"]["none"] is None
    for number, name in enumerate(("code", "prose")):
        own = cross_entropy[counts & (source == number)].mean()
        assert row["loss_by_source"][name] == pytest.approx(own, rel=1e-6)


@pytest.mark.parametrize(
    ("every", "due"), [(0, [0, 9]), (4, [0, 4, 8, 9])], ids=["first and last", "every fourth"]
)
def test_when_it_is_due(every, due):
    evaluate = evaluation(None, every=every)
    assert [step for step in range(10) if evaluate.due(step, last=step == 9)] == due
    assert not any(NoEvaluation().due(step, last=step == 9) for step in range(10))


@pytest.mark.parametrize("name", ["every", "rows"])
def test_refuses(name):
    with pytest.raises(InputError, match=rf"evaluate\.{name} = -1: must be at least 0"):
        EvaluateConfig(**{name: -1})
