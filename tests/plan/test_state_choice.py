"""`optim.state=auto`: split masters where they were measured to be faster, and a run keeps what it has."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import pytest
import tiny
from runs import ROOT

import jaxthru
from jaxthru import config as configuration
from jaxthru.build import choices, early_choices, state_choice
from jaxthru.build.checks import validate
from jaxthru.build.compiled import compile_step
from jaxthru.build.defaults import plain
from jaxthru.build.memory_estimate import Room, layout_of
from jaxthru.optim.formats import FORMATS
from jaxthru.plan.__main__ import main as plan
from jaxthru.runtime import aot
from jaxthru.runtime.errors import InputError

HOPPER = (9, 0)


def load(name: str, *overrides: str) -> configuration.RunConfig:
    return configuration.load(ROOT / "configs" / f"{name}.py", [*overrides])


@pytest.mark.parametrize("name", ["llama3_8b_8layer", "llama3_8b_one_gpu", "qwen3_0_6b", "olmoe_1b_7b"])
def test_models_in_bfloat16_have_split_masters_under_adamw(name):
    config, why = state_choice.settled(load(name), HOPPER)
    assert config.optim.state == "split_master_float32" and "no cast" in why
    both = [FORMATS[state].bytes_per_parameter() for state in (config.optim.state, "float32")]
    assert sum(both[0]) == sum(both[1]), "as many bytes"


@pytest.mark.parametrize(
    ("name", "settings", "capability", "unlike"),
    [
        ("llama3_2_1b", [], None, "without an NVIDIA GPU"),
        ("llama3_2_1b", ["precision.compute=float32"], HOPPER, "precision.compute = 'float32'"),
        ("llama3_2_1b", ["optim.name=muon"], HOPPER, "optim.name = 'muon'"),
        ("llama3_2_1b", ["lora.rank=8"], HOPPER, "with adapters"),
        ("olmoe_1b_7b", ["precision.matmul=fp8_experts"], HOPPER, "precision.matmul = 'fp8_experts'"),
    ],
)
def test_what_was_not_found_faster_stays_float32(name, settings, capability, unlike):
    config, why = state_choice.settled(load(name, *settings), capability)
    assert config.optim.state == "float32" and unlike in why


def test_what_is_asked_for_stays():
    for asked in ("float32", "split_master_int8"):
        config, why = state_choice.settled(load("llama3_2_1b", f"optim.state={asked}"), HOPPER)
        assert (config.optim.state, why) == (asked, "")


def test_the_default_is_open_and_on_a_cpu_float32():
    config = jaxthru.RunConfig()
    assert config.optim.state == "auto" and config.optim.format == FORMATS["float32"]
    assert choices.resolve(config).optim.state == plain(config).optim.state == "float32"


def test_float8_that_auto_takes_has_split_masters_too():
    config = load("llama3_8b_8layer", "precision.matmul=auto")
    config, _ = early_choices.for_devices(config, layout_of(config, 1), "NVIDIA H200", HOPPER)
    assert (config.precision.matmul, config.optim.state) == ("fp8", "split_master_float32")


def test_a_name_that_is_none_is_refused_in_one_line(tmp_path):
    file = tmp_path / "file.py"
    file.write_text(
        "from jaxthru.config import OptimConfig, RunConfig\n"
        "def config():\n    return RunConfig(optim=OptimConfig(state='split_master_flot32'))\n"
    )
    with pytest.raises(InputError, match=r"optim\.state = 'split_master_flot32': must be one of"):
        configuration.load(file)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Has choices.py see one GPU."""
    gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", process_index=0)
    monkeypatch.setattr(choices.hardware, "devices", lambda: [gpu])


@pytest.mark.parametrize("has", ["float32", "split_master_float32"])
def test_a_run_keeps_its_own_on_any_device(has, on_a_gpu):
    """One from before there was `auto` has float32, which its checkpoints are of."""
    run = load("llama3_8b_8layer", f"optim.state={has}", "model.loop=auto")
    rows = () if has == "float32" else (choices.Choice("optim.state", "auto", has, "why", "8 × another"),)
    for more in ([], ["train.rows=4"]):
        assert choices.resolve(load("llama3_8b_8layer", *more), run, rows).optim.state == has
    asked = load("llama3_8b_8layer", "optim.state=split_master")
    assert choices.resolve(asked, run, rows).optim.state == "split_master"


@pytest.mark.parametrize(
    ("setting", "state"),
    [
        ("train.rows=4", "split_master_float32"),
        ("precision.compute=float32", "auto"),
        ("optim.name=muon", "auto"),
        ("lora.rank=8", "auto"),
    ],
)
def test_a_new_run_by_a_config_json_opens_it_where_what_decides_it_is_another(
    setting, state, tmp_path, on_a_gpu
):
    configuration.dump(load("llama3_2_1b", "optim.state=split_master_float32"), tmp_path / "config.json")
    row = choices.Choice("optim.state", "auto", "split_master_float32", "why", "1 × NVIDIA H200")
    choices.write(tmp_path / "choices.json", [row])
    config = configuration.load(tmp_path / "config.json", [setting])
    assert choices.resolve(config).optim.state == state


def test_what_was_taken_is_said_and_recorded_and_trains(monkeypatch):
    monkeypatch.setattr(choices, "room_here", lambda config: Room(2**30, 2**30))
    defaults = jaxthru.RunConfig()
    config = jaxthru.RunConfig(
        train=dataclasses.replace(defaults.train, rows=2),
        model=dataclasses.replace(tiny.SHAPE, loop="scan"),
        data=dataclasses.replace(defaults.data, sequence=tiny.SEQUENCE),
    )
    monkeypatch.setattr(early_choices, "capability_of", lambda layout: HOPPER)
    build = compile_step(config, validate(config, jax.devices()[:1]), tiny.Data())
    (row,) = [each for each in build.choices if each.key == "optim.state"]
    assert (row.asked, row.chosen) == ("auto", "split_master_float32") and "no cast" in row.reason
    params = build.first_state()["params"]
    matrices = {leaf.dtype for leaf in jax.tree.leaves(params) if leaf.ndim > 2}
    assert matrices == {jnp.dtype(jnp.bfloat16)}


def test_a_plan_is_of_what_a_run_would_take(capsys, monkeypatch):
    monkeypatch.setattr(aot, "available", lambda: False)
    asked = ["memory", "--config", str(ROOT / "configs/llama3_2_1b.py"), "--segments", "1"]
    settings = "remat.policy=none", "model.loop=unroll", "offload.level=none", "train.rows=4"
    asked += [part for each in settings for part in ("--set", each)]
    sizes = {}
    for state in ("auto", "split_master_float32", "float32"):
        assert plan([*asked, "--set", f"optim.state={state}"]) == 0
        text = capsys.readouterr().out
        sizes[state] = re.findall(r"fits: ([\d.]+) of", text)
        assert ("optim.state = auto is split_master_float32" in text) == (state == "auto")
    assert sizes["auto"] == sizes["split_master_float32"] != sizes["float32"]


def test_on_a_tpu_it_is_float32():
    config = load("llama3_2_1b")
    settled, _ = early_choices.for_devices(config, layout_of(config, 1), "TPU v5e", None)
    assert settled.optim.state == "float32"
