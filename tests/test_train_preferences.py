"""Runs of direct preference optimisation: from pairs to the record, resumed, longer, offloaded, adapters."""

import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxthru
from jaxthru.build.compiled import build_step
from jaxthru.build.step import base_of
from jaxthru.data.loading.dataset import open_data
from jaxthru.engine.inline import loss
from jaxthru.engine.model import Model
from jaxthru.engine.objectives.answers import answers_of
from jaxthru.models import family
from jaxthru.runtime.errors import InputError
from jaxthru.training.run_directory import RunDirectory

pytestmark = pytest.mark.slow

SETTINGS = """
model.layers=2 model.embed=32 model.heads=2 model.kv_heads=1 model.head_dim=16 model.mlp=64
model.vocabulary=400 model.loop=unroll data.sequence=128 train.rows=16 train.steps=4
optim.learning_rate=1e-3 optim.warmup_ratio=0 optim.schedule_steps=4 checkpoint.every=2
evaluate.every=2 evaluate.rows=8 metrics.tensorboard=false precision.compute=float32 kernels.attention=xla
"""
WORDS = "red blue green apple pear plum cat dog bird house tree river stone road cloud rain"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds a mix of pairs whose chosen answers are polite."""
    folder, draw = tmp_path_factory.mktemp("preferences"), np.random.default_rng(0)
    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(200):
            one, two, three = draw.choice(WORDS.split(), 3).tolist()
            prompt = [{"role": "user", "content": f"What of the {one} and the {two}?"}]
            said = {"chosen": f"I like the {three}, thank you.", "rejected": f"No {three}, go away, {two}."}
            sides = {side: [{"role": "assistant", "content": text}] for side, text in said.items()}
            file.write(json.dumps({"prompt": prompt} | sides) + "\n")
    (folder / "mix.toml").write_text(
        "held_out = 0.2\n[tokenizer]\nvocabulary = 380\n"
        '[sources.local_pairs]\nweight = 1.0\npaths = ["pairs.jsonl"]\n'
    )
    return folder


def configured(folder: Path, *more: str) -> jaxthru.RunConfig:
    where = [f"data.mix={folder / 'mix.toml'}", f"data.store={folder / 'store'}"]
    return jaxthru.load_config("dpo", [*where, *SETTINGS.split(), *more])


def run(folder: Path, name: str, *more: str) -> RunDirectory:
    return jaxthru.run(configured(folder, *more), folder / name)


def rows(run: RunDirectory, *names: str) -> list[tuple]:
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [tuple(line[name] for name in ("step", "loss", "grad_norm", *names)) for line in lines]


@pytest.fixture(scope="module")
def whole(folder) -> RunDirectory:
    return run(folder, "whole")


def test_it_begins_at_ln_2_and_learns(whole):
    found = rows(whole, "reward_margin", "trained_tokens", "masked_share")
    assert found[0][1] == pytest.approx(math.log(2), abs=1e-6) and found[0][3] == pytest.approx(0, abs=1e-6)
    assert found[-1][1] < 0.6 and found[-1][3] > 0.1 and 0 < found[0][5] < 1 and found[0][4] > 20
    evaluations = [json.loads(line) for line in whole.eval_file.read_text().splitlines()]
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    assert evaluations[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert evaluations[-1]["reward_accuracy"] == 1 and evaluations[-1]["loss"] < 0.6
    margin = evaluations[-1]["chosen_reward"] - evaluations[-1]["rejected_reward"]
    assert evaluations[-1]["reward_margin"] == pytest.approx(margin, abs=1e-5)
    assert evaluations[-1]["loss_by_source"] == {"local_pairs": pytest.approx(evaluations[-1]["loss"])}


def test_it_resumes_to_the_bit_with_what_is_kept(folder, whole):
    again = folder / "again"
    shutil.copytree(whole.path, again)
    shutil.rmtree(again / "checkpoints" / "4")
    kept = (again / "reference.npz").read_bytes()
    assert rows(run(folder, "again")) == rows(whole) and (again / "reference.npz").read_bytes() == kept


def test_a_longer_run_asks_the_first_weights_again(folder, whole):
    run(folder, "longer", "train.steps=2")
    before = (folder / "longer" / "reference.npz").stat().st_mtime_ns
    assert rows(run(folder, "longer")) == rows(whole)
    assert (folder / "longer" / "reference.npz").stat().st_mtime_ns > before


def test_offloaded_and_in_micro_batches_it_is_the_same(folder, whole):
    found = run(folder, "offloaded", "offload.level=parameters", "train.microbatches=2")
    np.testing.assert_allclose(rows(found), rows(whole), rtol=2e-4)
    assert rows(found)[0][1] == pytest.approx(math.log(2), abs=1e-6)


def test_beside_adapters_the_base_is_asked_in_the_step(folder):
    found = run(folder, "adapters", "lora.rank=4", "optim.learning_rate=1e-2")
    losses = [row[1] for row in rows(found)]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < 0.69
    assert not found.reference.exists()
    shutil.copytree(found.path, folder / "adapters_again")
    shutil.rmtree(folder / "adapters_again" / "checkpoints" / "4")
    again = run(folder, "adapters_again", "lora.rank=4", "optim.learning_rate=1e-2")
    assert rows(again) == rows(found)
    offloaded = run(folder, "kept", "lora.rank=4", "optim.learning_rate=1e-2", "offload.level=parameters")
    assert offloaded.reference.exists()
    np.testing.assert_allclose(rows(offloaded), rows(found), rtol=2e-3)


def test_without_its_adapters_a_model_is_its_base_to_the_bit(folder):
    """Whatever the adapters have learnt."""
    config = configured(folder, "lora.rank=4")
    with open_data(config.data) as data:
        built = build_step(config, data)
        params = built.first_state()["params"]
        batch = built.place(data.builder.build(np.zeros(16, np.int64), np.arange(16)), 16)
    params = jax.tree.map(lambda leaf: leaf + 0.1 if leaf.shape[:1] == (4,) else leaf, params)  # each B
    objective, one = built.step.objective, jnp.ones((), jnp.float32)
    plain = Model(family.chain(config.model), objective.model.ops, "none", "unroll")
    base = {name: tree for name, tree in params.items() if name != "layers"}
    without = lambda block: {name: tree for name, tree in block.items() if name != "lora"}  # noqa: E731
    base["layers"] = tuple(tuple(tuple(map(without, each)) for each in group) for group in params["layers"])

    def answers(model: Model, params) -> np.ndarray:
        asked = answers_of(objective, model)
        return np.asarray(jax.jit(lambda params: loss(asked, params, batch, one)[1]["answers"])(params))

    found = answers(base_of(config, objective.model), params)
    np.testing.assert_array_equal(found, answers(plain, base))
    assert np.abs(found - answers(objective.model, params)).max() > 1e-3, "the adapters do something"


def test_refuses_what_is_not_of_pairs(folder):
    with pytest.raises(InputError, match=r"source python_stdlib of data\.mix = 'quickstart' is not of pairs"):
        run(folder, "refused", "data.mix=quickstart")
    with pytest.raises(InputError, match=r"local_pairs of .* is of pairs, whose rejected answers would be"):
        run(folder, "refused", "train.objective=cross_entropy")
