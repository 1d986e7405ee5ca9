"""Copies by `auto`: where they were measured, and nowhere else."""

import dataclasses
import itertools
import logging
import re
import types

import jax
import pytest
import tiny
from runs import ROOT

import jaxthru
from jaxthru import config as configuration
from jaxthru.build import choices, confirmed, early_choices, transfers_choice
from jaxthru.build.checks import validate
from jaxthru.build.compiled import Build, compile_step
from jaxthru.build.language_model import _for_use
from jaxthru.build.memory_estimate import Room, layout_of
from jaxthru.build.proposals import candidates
from jaxthru.engine.offload import OffloadConfig
from jaxthru.runtime import aot, hardware
from pallas_kernels import dispatch

ROOM = Room(round(134.2 * 2**30), 0)
H200, KEY = "NVIDIA H200", transfers_choice.KEY
DENSE = ("mesh.fsdp=2", "precision.matmul=compute", "optim.clip=1.0")
ROWS = {"llama3_8b_8layer": 4, "llama3_2_1b": 32, "qwen3_0_6b": 32}
"""Of a step over two devices, as they were measured."""


def load(name: str, *settings: str) -> configuration.RunConfig:
    rows = f"train.rows={ROWS.get(name, 32)}"
    sequence = f"data.sequence={8192 if name == 'llama3_8b_8layer' else 2048}"
    return configuration.load(ROOT / "configs" / f"{name}.py", [*DENSE, rows, sequence, *settings])


def settled(config, kind=H200, devices=2, processes=1) -> configuration.RunConfig:
    return early_choices.for_devices(config, layout_of(config, devices), kind, (9, 0), processes)[0]


def taken(config, kind=H200, devices=2, processes=1) -> list[str]:
    """Returns how parameters are moved by the first two that are tried of a configuration; by one where that
    is settled."""
    config = settled(config, kind, devices, processes)
    if config.mesh.transfers != "auto":
        return [config.mesh.transfers]
    found = itertools.islice(candidates(config, ROOM, devices=devices), 2)
    return [each.config.mesh.transfers for each in found]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("kept", ["false", "true"])
def test_what_was_measured_tries_copies_first(name, kept):
    config = load(name, f"remat.keep_parameters={kept}", "remat.policy=projections")
    assert taken(config) == ["copies", "collectives"]


def test_the_device_and_its_processes_decide():
    assert aot.TARGETS["h200"].name == transfers_choice.KIND  # so that plans are of the same step
    config = load("llama3_8b_8layer", "mesh.fsdp=-1")
    assert taken(config)[0] == "copies"
    for other in ({"devices": 4}, {"devices": 1}, {"processes": 2}, {"kind": "NVIDIA H100 80GB HBM3"}):
        assert taken(config, **other) == ["collectives"]


@pytest.mark.parametrize(
    "settings",
    [
        ["mesh.fsdp=1", "mesh.data=2"],
        ["mesh.fsdp=1", "mesh.tensor=2"],
        ["train.deterministic=true"],
        ["precision.matmul=fp8"],
        ["precision.matmul=auto"],  # which takes float8 here
        ["precision.compute=float32"],
        ["lora.rank=8"],
        ["train.objective=dpo"],
        ["train.microbatches=2"],
        ["data.sequence=4096"],
        ["remat.policy=projections", "model.loop=unroll", "offload.level=none"],  # nothing is searched for
    ],
    ids=lambda settings: settings[-1],
)
def test_what_was_not_measured_takes_collectives(settings):
    assert settled(load("llama3_8b_8layer", *settings)).mesh.transfers == "collectives"


def of_experts(*settings: str) -> configuration.RunConfig:
    """Returns a step of experts over two devices, as it was measured but for settings."""
    return load("qwen3_30b_a3b_12layer", "mesh.fsdp=1", "mesh.expert=2", "data.sequence=4096", *settings)


@pytest.mark.parametrize("rows", [16, 32])
def test_experts_over_two_devices_try_copies_first(rows):
    assert taken(of_experts(f"train.rows={rows}")) == ["copies", "collectives"]


@pytest.mark.parametrize(
    "settings",
    [
        ["mesh.expert=1", "mesh.fsdp=2"],
        ["mesh.expert=1", "mesh.tensor=2"],
        ["train.rows=8"],
        ["train.rows=16", "train.microbatches=2"],
        ["precision.matmul=fp8_experts"],
        ["train.deterministic=true"],
    ],
    ids=lambda settings: settings[-1],
)
def test_experts_that_were_not_measured_take_collectives(settings):
    assert settled(of_experts(*settings)).mesh.transfers == "collectives"


@pytest.mark.parametrize(
    "settings",
    [["model.loop=scan"], ["offload.level=parameters", "model.loop=unroll", "remat.policy=projections"]],
    ids=lambda settings: settings[0],
)
def test_loops_and_offload_take_collectives(settings):
    config = load("llama3_8b_8layer", "remat.policy=projections", *settings)
    assert {each.mesh.transfers for each in transfers_choice.ways(settled(config))} == {"collectives"}


@pytest.mark.slow
def test_offload_that_auto_needs_takes_collectives():
    """It is known only when a level is tried: 70 B parameters have to be on the host."""
    found = settled(load("llama3_70b", "train.rows=8", "data.sequence=8192", "optim.state=split_master_int8"))
    assert found.mesh.transfers == "auto" and found.offload.level == "auto"
    tried = next(candidates(found, Room(round(134.2 * 2**30), 1 << 40), devices=2))
    assert tried.config.offload.layered and tried.config.mesh.transfers == "collectives"


def test_the_same_by_collectives_comes_next():
    """Which is what is compiled where copies do not fit."""
    config = settled(load("llama3_8b_8layer", "remat.policy=projections", "model.loop=unroll"))
    first, second, *_ = candidates(
        dataclasses.replace(config, offload=OffloadConfig("none")), ROOM, devices=2
    )
    assert first.seconds == second.seconds
    assert (first.config.mesh.copies, second.config.mesh.copies) == (True, False)
    assert ", copies" in first.said and "copies" not in second.said


@pytest.mark.parametrize("asked", ["collectives", "copies"])
def test_what_is_asked_for_stays(asked):
    assert settled(load("llama3_8b_8layer", f"mesh.transfers={asked}")).mesh.transfers == asked


def small() -> configuration.RunConfig:
    base = jaxthru.RunConfig()
    return dataclasses.replace(
        base,
        train=dataclasses.replace(base.train, rows=2),
        model=dataclasses.replace(tiny.SHAPE, loop="unroll"),
        data=dataclasses.replace(base.data, sequence=tiny.SEQUENCE),
        mesh=dataclasses.replace(base.mesh, fsdp=2),
        precision=dataclasses.replace(base.precision, compute="float32"),
        remat=dataclasses.replace(base.remat, policy="projections"),
    )


_compiled: dict[str, confirmed.Confirmed] = {}


def compiled_once(asked, candidate, made, options, room, plain=confirmed.compile_candidate):
    """Compiles a candidate as a start does, but the same one once for all starts of these tests."""
    key = repr((candidate.config, room and room()))
    if key not in _compiled:
        with dispatch.noted() as kernels:  # which a candidate that is not traced again has none of
            found = plain(asked, candidate, made, options, room)
        _compiled[key] = found.with_kernels(kernels)
    return _compiled[key]


@pytest.fixture
def two_devices(monkeypatch):
    """Two devices on which copies are tried; returns what sets how many processes they are of."""
    monkeypatch.setattr(hardware, "devices", lambda: jax.devices()[:2])
    monkeypatch.setattr(transfers_choice, "KIND", jax.devices()[0].device_kind)
    monkeypatch.setattr(transfers_choice, "TOKENS", dict.fromkeys(transfers_choice.TOKENS, 1))
    monkeypatch.setattr(transfers_choice, "_is_like_measured", lambda config: True)
    monkeypatch.setattr(choices, "plain", lambda config: config)  # as on a GPU
    monkeypatch.setattr(choices, "room_here", lambda config: ROOM)
    monkeypatch.setattr(confirmed, "compile_candidate", compiled_once)
    named = choices.device_name

    def processes(count: int) -> None:
        monkeypatch.setattr(jax, "process_count", lambda: count)
        monkeypatch.setattr(choices, "device_name", lambda of: f"{named(of)}, {count}")

    processes(1)
    return processes


def started(config: configuration.RunConfig, folder) -> Build:
    """Returns the step of a start, which leaves config.json and choices.json."""
    asked, chosen = choices.reopened(config), choices.of_file(config)
    config = choices.resolve(asked)
    build = compile_step(config, validate(config, jax.devices()[:2]), tiny.Data(), asked=asked)
    configuration.dump(build.config, folder / "config.json")
    choices.write(folder / "choices.json", choices.still_true(chosen, build.config, build.choices))
    return build


def test_what_was_taken_is_said_and_recorded(two_devices, caplog, tmp_path):
    caplog.set_level(logging.INFO, "jaxthru")
    build = started(small(), tmp_path)
    assert re.search(
        r"compiled in .*: remat projections, unroll, copies: 0.0 of .* GiB as compiled", caplog.text
    )
    assert build.step.model.ops.copies and build.config.mesh.transfers == "copies"
    (row,) = [each for each in build.choices if each.key == KEY]
    assert (row.asked, row.chosen) == ("auto", "copies") and "copies" in row.reason
    resumed = choices.resolve(small(), build.config, build.choices)
    assert resumed.mesh.transfers == "copies"


@pytest.mark.slow
def test_other_processes_are_asked_anew(two_devices, tmp_path):
    """A run that goes on in two processes cannot copy; by its config.json, or resumed, there and back."""
    build, first, second = started(small(), tmp_path), tmp_path, tmp_path / "second"
    second.mkdir()
    two_devices(2)
    assert choices.resolve(small(), build.config, build.choices).mesh.transfers == "auto"
    for number, (processes, taken) in enumerate(
        [(2, "collectives"), (1, "copies"), (2, "collectives"), (1, "copies")]
    ):
        two_devices(processes)
        folder = first if number else second  # of another run's config.json, then of its own
        assert started(configuration.load(first / "config.json"), folder).config.mesh.transfers == taken
        (row,) = [each for each in choices.read(folder / "choices.json") if each.key == KEY]
        assert (row.asked, row.chosen) == ("auto", taken)
    named = configuration.load(first / "config.json", [f"{KEY}=copies"])
    assert choices.resolve(named).mesh.transfers == "copies"


@pytest.mark.parametrize("setting", ["train.deterministic=true", "train.rows=4", "precision.matmul=fp8"])
def test_what_rules_copies_out_opens_them_again(setting, two_devices, tmp_path):
    """Nobody has asked for them."""
    started(small(), tmp_path)
    config = choices.resolve(configuration.load(tmp_path / "config.json", [setting]))
    assert config.mesh.transfers == config.offload.level == "auto"
    same = configuration.load(tmp_path / "config.json", ["train.steps=9"])
    assert choices.resolve(same).mesh.transfers == "copies"


def test_choices_of_other_devices_are_carried_along(two_devices, tmp_path):
    """Those that stay, too, though what is open again makes another configuration."""
    started(small(), tmp_path)
    rows = choices.read(tmp_path / "choices.json")
    numeric = choices.Choice("precision.matmul", "auto", "compute", "why", rows[0].device)
    choices.write(tmp_path / "choices.json", [*rows, numeric])
    two_devices(2)
    started(configuration.load(tmp_path / "config.json"), tmp_path)
    assert numeric in choices.read(tmp_path / "choices.json")


def test_devices_of_several_processes_are_told_apart():
    def devices(*processes: int):
        return [types.SimpleNamespace(device_kind=H200, process_index=index) for index in processes]

    assert choices.device_name(devices(0, 0)) == "2 × NVIDIA H200"
    assert choices.device_name(devices(0, 1)) == "2 × NVIDIA H200 in 2 processes"


def test_a_model_in_use_is_not_copied_unless_asked():
    config, devices = configuration.load(ROOT / "configs/quickstart.py", [f"{KEY}=copies"]), "mesh.fsdp=-1"
    assert _for_use(config, [devices])[0].mesh.transfers == "collectives"
    assert _for_use(config, [devices, f"{KEY}=copies"])[0].mesh.transfers == "copies"


def test_copies_with_too_little_room_are_not_taken(two_devices, monkeypatch, tmp_path):
    whole = confirmed.compile_candidate

    def without_room(asked, candidate, made, options, room):
        found = whole(asked, candidate, made, options, room)
        return dataclasses.replace(found, compiled=None) if made.step.model.ops.copies else found

    monkeypatch.setattr(confirmed, "compile_candidate", without_room)
    assert started(small(), tmp_path).config.mesh.transfers == "collectives"
