"""Copies by `auto`: where they were measured and nowhere else, and chosen anew by each start."""

import dataclasses
import json
import logging

import jax
import pytest
import tiny
from runs import ROOT

import jaxthru
from jaxthru import config as configuration
from jaxthru.build import choices, early_choices, transfers_choice
from jaxthru.build.checks import validate
from jaxthru.build.compiled import compile_step
from jaxthru.build.memory_estimate import layout_of
from jaxthru.runtime import aot, hardware

H200, KEY = "NVIDIA H200", transfers_choice.KEY
DENSE = ("mesh.fsdp=2", "precision.matmul=compute", "optim.clip=1.0")
MEASURED = {"llama3_8b_8layer": 4, "llama3_2_1b": 32, "qwen3_0_6b": 32}


def load(name: str, *settings: str) -> configuration.RunConfig:
    rows = MEASURED.get(name, 32)
    return configuration.load(ROOT / "configs" / f"{name}.py", [*DENSE, f"train.rows={rows}", *settings])


def chosen(config, kind=H200, devices=2, processes=1) -> str:
    layout = layout_of(config, devices)
    config, reasons = early_choices.for_devices(config, layout, kind, (9, 0), processes)
    assert bool(reasons[KEY]) == (config.mesh.transfers == "copies")
    return config.mesh.transfers


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("kept", ["false", "true"])
def test_what_was_measured_takes_copies(name, kept):
    assert chosen(load(name, f"remat.keep_parameters={kept}", "data.sequence=2048")) == (
        "copies" if name != "llama3_8b_8layer" else "auto"  # 4,096 tokens of a GPU are too few
    )
    assert chosen(load(name, f"remat.keep_parameters={kept}", "data.sequence=8192")) == "copies"


def test_the_device_and_its_processes_decide():
    assert aot.TARGETS["h200"].name == transfers_choice.KIND  # so that plans are of the same step
    config = load("llama3_8b_8layer", "mesh.fsdp=-1")
    assert chosen(config) == "copies"
    assert chosen(config, devices=4) == chosen(config, devices=1) == chosen(config, processes=2) == "auto"
    assert chosen(config, kind="NVIDIA H100 80GB HBM3") == chosen(config, kind="cpu") == "auto"


@pytest.mark.parametrize(
    "settings",
    [
        ["mesh.fsdp=1", "mesh.data=2"],
        ["mesh.fsdp=1", "mesh.tensor=2"],
        ["train.deterministic=true"],
        ["precision.matmul=fp8"],
        ["precision.matmul=auto"],  # which takes float8 here
        ["precision.compute=float32"],
        ["model.loop=scan"],
        ["offload.level=parameters", "model.loop=unroll", "remat.policy=projections"],
        ["lora.rank=8"],
        ["train.microbatches=2"],
    ],
    ids=lambda settings: settings[-1],
)
def test_what_was_not_measured_does_not(settings):
    assert chosen(load("llama3_8b_8layer", *settings)) == "auto"


def test_experts_do_not():
    assert chosen(load("qwen3_30b_a3b_12layer", "mesh.expert=1")) == "auto"
    assert chosen(load("qwen3_30b_a3b_12layer", "mesh.expert=2", "mesh.fsdp=1")) == "auto"


@pytest.mark.parametrize("asked", ["collectives", "copies"])
def test_what_is_asked_for_stays(asked):
    config, reasons = early_choices.for_devices(
        load("llama3_8b_8layer", f"mesh.transfers={asked}"),
        layout_of(load("llama3_8b_8layer"), 2),
        H200,
        (9, 0),
    )
    assert config.mesh.transfers == asked and not reasons[KEY]


class Data:
    vocabulary, segments, names, tokenizer = tiny.SHAPE.vocabulary, 4, ("a",), None
    units, masked = {}, False


def test_what_was_taken_is_said_recorded_and_chosen_anew(monkeypatch, caplog, tmp_path):
    """A run that goes on in two processes cannot copy, and `device` of choices.json does not tell them."""
    caplog.set_level(logging.INFO, "jaxthru")
    base = jaxthru.RunConfig()
    config = dataclasses.replace(
        base,
        train=dataclasses.replace(base.train, rows=2),
        model=tiny.SHAPE,
        data=dataclasses.replace(base.data, sequence=tiny.SEQUENCE),
        mesh=dataclasses.replace(base.mesh, fsdp=2),
        precision=dataclasses.replace(base.precision, compute="float32"),
    )
    monkeypatch.setattr(hardware, "devices", lambda: jax.devices()[:2])
    monkeypatch.setattr(transfers_choice, "KIND", jax.devices()[0].device_kind)
    monkeypatch.setattr(transfers_choice, "TOKENS", 1)
    monkeypatch.setattr(transfers_choice, "_like_measured", lambda config: True)
    asked = choices.resolve(config)
    build = compile_step(asked, validate(asked, jax.devices()[:2]), Data())
    assert f"{KEY} = 'auto' is 'copies', as measured" in caplog.text
    assert build.step.model.ops.copies and build.config.mesh.transfers == "copies"
    (row,) = [each for each in build.choices if each.key == KEY]
    assert (row.asked, row.chosen, row.reason) == ("auto", "copies", transfers_choice.WHY)
    # Resumed, and started from its config.json.
    assert choices.resolve(config, build.config, build.choices).mesh.transfers == "auto"
    configuration.dump(build.config, tmp_path / "config.json")
    assert json.loads((tmp_path / "config.json").read_text())["mesh"]["transfers"] == "copies"
    choices.write(tmp_path / "choices.json", build.choices)
    again = configuration.load(tmp_path / "config.json")
    assert choices.resolve(again).mesh.transfers == "auto"
    named = configuration.load(tmp_path / "config.json", [f"{KEY}=copies"])
    assert choices.resolve(named).mesh.transfers == "copies"
