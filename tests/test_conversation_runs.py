"""Runs of configs/sft.py on conversations: what they say, record and keep, and that they go on to the bit."""

import json
import logging

import numpy as np
import pytest
from published import only

import jaxthru
from jaxthru.runtime.errors import InputError
from jaxthru.train import run

SHAPE = (
    *("model.vocabulary=300", "model.layers=2", "model.embed=64", "model.heads=2", "model.kv_heads=1"),
    *("model.head_dim=32", "model.mlp=128", "precision.compute=float32", "kernels.attention=xla"),
    *("data.sequence=128", "train.rows=4", "train.microbatches=2", "evaluate.every=0", "evaluate.rows=4"),
    *("metrics.tensorboard=false", "optim.learning_rate=0.01"),
)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Of a small model and a mix of talks about numbers, of which the answers can be learnt."""
    only(monkeypatch, 1)
    asked = "please say what comes after"
    talks = [
        [{"role": "user", "content": f"{asked} {n}"}, {"role": "assistant", "content": f"it is {n + 1}"}]
        for n in range(120)
    ]
    rows = (json.dumps({"messages": talk}) + "\n" for talk in talks)
    (tmp_path / "talks.jsonl").write_text("".join(rows))
    source = '[sources.talks]\nrecipe = "local_chat"\npaths = ["talks.jsonl"]\nweight = 1\n'
    (tmp_path / "mix.toml").write_text(f"held_out = 0.1\n[tokenizer]\nvocabulary = 300\n{source}")
    return (*SHAPE, f"data.mix={tmp_path / 'mix.toml'}", f"data.store={tmp_path / 'store'}")


def test_a_mix_of_which_nothing_fits_is_refused_before_work(settings, tmp_path):
    """Without a step compiled, and without a run directory."""
    config = jaxthru.load_config("sft", [*settings, "data.sequence=16"])
    with pytest.raises(InputError, match=r"source talks: nothing to train on is left of its 1\d\d documents"):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_learns_answers_and_goes_on_to_the_bit(settings, tmp_path, caplog):
    caplog.set_level(logging.INFO, "jaxthru")
    config = lambda steps: jaxthru.load_config("sft", [*settings, f"train.steps={steps}"])  # noqa: E731
    whole = run(config(30), tmp_path / "whole")
    [line] = [text for text in caplog.messages if text.startswith("source talks: ")]
    assert " full, " in line and "left out: 0 longer than data.sequence = 128, 0 without" in line
    schedule = ["optim.schedule_steps=30"]
    first = jaxthru.load_config("sft", [*settings, *schedule, "train.steps=12"])
    run(first, tmp_path / "parts")
    parts = run(jaxthru.load_config("sft", [*settings, *schedule, "train.steps=30"]), tmp_path / "parts")
    rows = whole.read_metrics()
    assert [row["loss"] for row in parts.read_metrics()] == [row["loss"] for row in rows]
    for row in rows:
        assert 0 < row["trained_tokens"] < row["tokens"] <= 4 * 128
        assert row["masked_share"] == 1 - row["trained_tokens"] / row["tokens"]
        assert row["packing_fill"] == row["tokens"] / (4 * 128)
    assert np.mean([row["packing_fill"] for row in rows]) > 0.8
    before, after = whole.read_eval()
    assert after["loss"] < 0.8 * before["loss"]
    kept = {path.name for path in whole.tokenizer.iterdir()}
    assert {"tokenizer.json", "chat_template.jinja"} <= kept
