"""The command `plan memory`: what it refuses, what does not fit, and which step it plans."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest
import rich
from runs import ROOT

from jaxthru import config as configuration
from jaxthru.build import choices
from jaxthru.build.defaults import replaced
from jaxthru.build.memory_estimate import Room, estimate
from jaxthru.build.proposals import Candidate
from jaxthru.plan import memory
from jaxthru.plan.__main__ import main
from jaxthru.runtime import aot

SCANNED_LAYERS = "--set", "model.loop=scan", "--set", "offload.activations=inputs"
UNFIT_CASTS = "precision.matmul=fp8 kernels.cast_transpose=triton train.rows=1 data.sequence=126"
UNFIT_CASTS = tuple(word for setting in UNFIT_CASTS.split() for word in ("--set", setting))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "h300"), "--device h300: unknown; did you mean 'h"),
        (("--devices", "0"), "--devices 0: must be at least 1"),
        (("--segments", "0"), "--segments: must be at least 1"),
        (("--devices", "3"), "must be a multiple of mesh.fsdp = 3"),
        (("--best", *SCANNED_LAYERS), "model.loop = 'scan': with offload.level = 'auto'"),
        *(
            pytest.param(
                (*UNFIT_CASTS, *words),
                "kernels.cast_transpose = 'triton': cast_transpose: no implementation can run here: triton: "
                "needs a multiple of 4 rows (tokens, or a weight's inputs), got 126\n",
                marks=pytest.mark.compiles_for("cuda"),
            )
            for words in ((), ("--best",))
        ),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(aot, "use_cpu", lambda devices: None)  # there are eight
    assert main(["memory", "--config", str(ROOT / "configs" / "quickstart.py"), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize("settings", [(), ("--best",), ("--best", "--set", "offload.level=optimizer")])
def test_a_model_that_fits_nowhere_is_told_what_it_lacks(settings, capsys):
    of = ["memory", "--config", str(ROOT / "configs" / "llama3_70b.py"), "--segments", "8"]
    assert main([*of, *settings]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "nothing fits with optim.state = 'split_master_float32'; at the least it needs " in said[-1]
    assert any(" scan " in line and line.split()[-1:] == ["no"] for line in said) == (settings == ("--best",))


@pytest.mark.parametrize(("over", "fits"), [(1.05, "yes"), (1.2, "yes"), (1.3, "no")])
def test_what_arithmetic_alone_finds_too_large_is_compiled_for_the_table(over, fits, monkeypatch, capsys):
    settings = "model.loop=scan", "offload.level=none", "model.layers=4", "kernels.attention=cudnn_packed"
    path = ROOT / "configs" / "qwen3_0_6b.py"
    size = estimate(configuration.load(path, [*settings, "remat.policy=full"]), segments=8)[0].peak_device
    monkeypatch.setattr(memory, "room", lambda *_: Room(round(size / over), 0))
    monkeypatch.setattr(memory, "confirm", lambda _, candidate, *rest: (candidate, candidate.plan))
    command = ["memory", "--best", "--config", str(path), "--segments", "8"]
    assert main([*command, *(word for each in settings for word in ("--set", each))]) == (fits == "no")
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if " full " in line)
    assert row[-1] == fits


def with_fraction(config, share):
    return replaced(config, {"offload.fraction": share})


def test_the_table_has_the_offload_that_was_confirmed(monkeypatch, capsys):
    """What was proposed beside it was another fraction, with other bytes on the device and on the host."""
    config = configuration.load(
        ROOT / "configs" / "qwen3_0_6b.py", ["offload.level=optimizer", "remat.policy=gate", "model.layers=4"]
    )
    sizes = {share: estimate(with_fraction(config, share), segments=8)[0] for share in (0.25, 1.0)}
    compiled = dataclasses.replace(sizes[1.0], peak_device=7 << 30, peak_host=3 << 30)
    monkeypatch.setattr(aot, "available", lambda: True)
    monkeypatch.setattr(memory, "traced", lambda *_: (None, (), ""))
    monkeypatch.setattr(memory, "Programs", lambda *_: SimpleNamespace(planned=None))
    monkeypatch.setattr(memory, "fitted", lambda *_: (with_fraction(config, 1.0), compiled, 0))
    proposed = Candidate(with_fraction(config, 0.25), sizes[0.25], 1.0, 0)
    confirmed, plan = memory.confirm(config, proposed, aot.TARGETS["h200"], Room(1 << 40, 1 << 40), 1, 8)
    assert plan.peak_host == 3 << 30 and sizes[0.25].peak_host < sizes[1.0].peak_host
    assert confirmed.plan.peak_host == pytest.approx(sizes[1.0].peak_host, rel=0.05), "but for the gaps"
    rich.print(memory.best_table([(confirmed, plan, True)]))
    row = capsys.readouterr().out.splitlines()[-2].split()
    assert row[3:] == ["1.00", "1.00", f"{confirmed.plan.peak_device / 2**30:.1f}", "7.0", "3.0", "yes"]


def test_without_the_plugin_an_estimate_is_printed_and_said_to_be_one(monkeypatch, capsys):
    monkeypatch.setattr(aot, "available", lambda: False)
    monkeypatch.setattr(aot, "use_cpu", lambda devices: None)
    of = ["memory", "--config", str(ROOT / "configs" / "llama3_8b.py"), "--set", "model.layers=4"]
    assert main([*of, "--set", "offload.host_gib=100"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Memory of a step, an estimate by arithmetic: ") and "fits: " in said
    assert "the GPU's host: 100.0 GiB to pin, by offload.host_gib" in said
    assert main([*of, "--set", "offload.host_gib=5"]) == 1
    assert "of which it may fill 4.8 (97% of offload.host_gib)" in capsys.readouterr().out


def test_a_config_json_is_planned_as_a_run_on_that_device_would_take_it(tmp_path, monkeypatch, capsys):
    """What was settled elsewhere is chosen anew, and what was settled on such devices stays."""
    monkeypatch.setattr(aot, "available", lambda: False)
    asked = configuration.load(ROOT / "configs" / "qwen3_0_6b.py")
    chosen = replaced(asked, {"model.loop": "scan", "remat.policy": "full", "offload.level": "none"})
    configuration.dump(chosen, tmp_path / "config.json")
    for device, anew in (("8 × cpu", True), ("1 × NVIDIA H200", False)):
        made = choices.made(asked, chosen, "why", jax.devices()[:1])
        choices.write(tmp_path / "choices.json", [dataclasses.replace(each, device=device) for each in made])
        assert main(["memory", "--config", str(tmp_path / "config.json"), "--segments", "8"]) == 0
        assert ("remat.policy = auto is " in capsys.readouterr().out) == anew
