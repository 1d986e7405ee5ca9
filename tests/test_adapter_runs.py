"""Runs that begin with an adapter: refused before any work, measured against it, and resumed without it."""

import dataclasses
import json
import math
import shutil

import jax
import pytest
from published import change_json, folder_of, make_site, only

from jaxthru.build.adapted_weights import adapted_paths
from jaxthru.build.export_weights import export_weights
from jaxthru.build.step import base_of, bound, chain_of
from jaxthru.config import load_own
from jaxthru.huggingface import adapter
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.mesh import make_mesh
from jaxthru.runtime.sharding import Layout
from jaxthru.train import run

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
FAST = ("lora.rank=2", "optim.learning_rate=1e-2")


@pytest.fixture
def site(tmp_path):
    folder_of(tmp_path, "smollm")
    return make_site(tmp_path)


@pytest.fixture
def first(site):
    """An adapter that adds nothing."""
    config = site.config(f"model.pretrained={site.path / 'smollm'}", *FAST)
    sides = adapter.sides(config.model, adapted_paths(chain_of(config)), config.lora.rank)
    targets = sorted({name.split(".")[-3] for name in sides})
    settings = adapter.settings_of(config.lora, targets, config.model.pretrained)
    zeros = lambda path, like: jax.numpy.zeros(like.shape, like.dtype)  # noqa: E731
    adapter.write_adapter(site.path / "first", sides, zeros, "float32", {adapter.CONFIG: settings})
    return site.path / "first"


def refused(site, *settings: str) -> str:
    """Returns the line by which a run is refused; nothing has been made."""
    before = sorted(site.path.rglob("*"))
    with pytest.raises(InputError) as raised:
        run(site.config(*settings), site.path / "refused")
    assert sorted(site.path.rglob("*")) == before
    return str(raised.value)


def test_an_adapter_is_looked_at_before_any_work(site, first):
    base, begins = f"model.pretrained={site.path / 'smollm'}", f"lora.adapter={first}"
    missing = f"lora.adapter={site.path / 'none'}"
    assert "has no adapter_config.json" in refused(site, base, "lora.rank=2", missing)
    assert "needs model.pretrained, its base" in refused(site, begins)
    (first / adapter.WEIGHTS).rename(first / "elsewhere")
    assert f"has no {adapter.WEIGHTS}" in refused(site, base, begins)
    (first / "elsewhere").rename(first / adapter.WEIGHTS)
    change_json(first / adapter.CONFIG, base_model_name_or_path="an/other")
    assert "is an adapter of 'an/other'" in refused(site, base, begins)


def test_a_run_that_begins_with_an_adapter_is_not_measured_against_the_base_alone(site, first):
    config = site.config(f"model.pretrained={site.path / 'smollm'}", f"lora.adapter={first}")
    model = bound(config, Layout(make_mesh(config.mesh, jax.devices()[:1])), "xla")
    assert base_of(config, model) is None
    afresh = dataclasses.replace(config, lora=dataclasses.replace(config.lora, adapter=None))
    assert base_of(afresh, model).chain.groups[0].blocks[0].apply.on is False


@pytest.mark.slow
def test_preferences_begin_with_what_was_tuned_and_go_on_without_its_folder(site, monkeypatch):
    only(monkeypatch, 1)
    base = f"model.pretrained={site.path / 'smollm'}"
    tuned = run(site.config(base, "train.steps=3", *FAST), site.path / "tuned")
    folder = export_weights(tuned, site.path / "adapter", adapter=True)
    (site.path / "smollm" / "chat_template.jinja").write_text(TEMPLATE)
    with (site.path / "pairs.jsonl").open("w") as file:
        for number in range(40):
            prompt = f"what, {chr(97 + number % 26) * (1 + number // 26)}"
            file.write(json.dumps({"prompt": prompt, "chosen": " a cat", "rejected": " no"}) + "\n")
    mix = site.path / "pairs.toml"
    mix.write_text('[sources.local_pairs]\nweight = 1.0\npaths = ["pairs.jsonl"]\n')
    settings = [base, "train.objective=dpo", f"data.mix={mix}", "data.sequence=64", "checkpoint.every=1"]
    config = site.config(*settings, f"lora.adapter={folder}", "optim.learning_rate=1e-2", "train.steps=2")
    made = run(config, site.path / "preferred")
    losses = [row["loss"] for row in made.read_metrics()]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[1] < losses[0]
    shutil.rmtree(folder)
    shutil.rmtree(made.checkpoints / "2")
    again = run(load_own(made.config), made.path)
    assert [row["loss"] for row in again.read_metrics()] == losses
