"""A step that the host's memory cannot hold is refused on CPU devices, in one line that says what fits."""

import dataclasses
import re

import jax
import pytest
from runs import ROOT

from jaxthru import config as configuration
from jaxthru.build import host_memory
from jaxthru.build.checks import validate
from jaxthru.build.compiled import build_step
from jaxthru.build.memory_estimate import estimate, indispensable
from jaxthru.engine.offload import OffloadConfig
from jaxthru.runtime import distributed, hardware
from jaxthru.runtime.errors import InputError
from jaxthru.train import main

GIB = 1 << 30


def load(*settings, name="llama3_8b_8layer"):
    return configuration.load(ROOT / "configs" / f"{name}.py", settings)


def host_of(monkeypatch, size: float, swap: float = 0):
    monkeypatch.setattr(hardware, "host_limit_bytes", lambda: round(size * GIB))
    monkeypatch.setattr(hardware, "swap_bytes", lambda: round(swap * GIB))


def test_the_command_refuses_before_it_prepares_or_compiles(monkeypatch, capsys, tmp_path):
    host_of(monkeypatch, 23)
    path = str(ROOT / "configs" / "llama3_8b_8layer.py")
    store = f"data.store={tmp_path}/store"
    mesh = ("--set", "mesh.fsdp=8", "--set", "train.rows=8", "--set", "precision.compute=float32")
    assert main(["--config", path, "--set", store, *mesh, "--run-dir", f"{tmp_path}/run"]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("jaxthru: "))
    assert "model.layers = 8, optim.state = 'float32': needs 41.7 GiB at once" in line
    assert "(parameters 10.4, optimizer 20.8, gradients 10.4) on 8 × cpu, and this host has 23.0 GiB" in line
    assert line.endswith("fits; for a GPU, ask `python -m jaxthru.plan memory --config F`")
    assert not [*tmp_path.iterdir()]


def test_what_must_exist_is_counted_to_the_byte():
    config = load()
    parameters = 2_795_573_248
    needed = indispensable(config, 1)
    assert needed["parameters"] == 4 * parameters and needed["optimizer"] == 8 * parameters + 4
    tables_and_norms = 2 * 4096 * 128256 + (2 * 8 + 1) * 4096  # in float32, the rest in bfloat16
    assert needed["gradients"] == 2 * (parameters + tables_and_norms)
    eight = indispensable(load("mesh.fsdp=8", "train.rows=8"), 8)
    assert eight["parameters"] == pytest.approx(needed["parameters"] / 8, rel=1e-3)
    copies = indispensable(load("mesh.data=8", "mesh.fsdp=1", "train.rows=8"), 8)
    assert copies["parameters"] == needed["parameters"]  # on each of them


def test_gradients_that_are_used_up_layer_by_layer_are_not_counted():
    layered = ("offload.level=gradients", "model.loop=unroll")
    assert indispensable(load(*layered), 1)["gradients"] > 0  # they wait for their norm
    assert indispensable(load(*layered, "optim.clip_rule=previous"), 1)["gradients"] == 0


def test_only_what_must_exist_is_compared():
    config = load()
    total = sum(indispensable(config, 1).values())
    assert estimate(config)[0].peak_device > total
    assert host_memory.lacking(config, 1, 1, total) == ""
    assert "needs 38.4 GiB" in host_memory.lacking(config, 1, 1, total - 1)
    # A host of 4 of 8 devices holds half.
    eight = load("mesh.fsdp=8", "train.rows=8")
    assert host_memory.lacking(eight, 8, 4, total * 3 // 5) == ""
    assert host_memory.lacking(eight, 8, 8, total * 3 // 5) != ""


@pytest.mark.parametrize("limit", [23, 30, 36])
def test_what_is_said_to_fit_does_by_the_whole_account(limit):
    config = load("remat.policy=projections", "model.loop=unroll")
    line = host_memory.lacking(config, 1, 1, limit * GIB)
    layers = re.search(r"; model\.layers = (\d+)", line)
    deepest = int(layers[1])

    def peak(model=config.model, optim=config.optim) -> int:
        changed = dataclasses.replace(config, model=model, optim=optim, offload=OffloadConfig())
        return estimate(changed)[0].peak_device

    depths = [dataclasses.replace(config.model, layers=count) for count in (deepest, deepest + 1)]
    assert peak(depths[0]) <= limit * GIB < peak(depths[1])
    if state := re.search(r"optim\.state = '(\w+)' fits", line):
        assert peak(optim=dataclasses.replace(config.optim, state=state[1])) <= limit * GIB
    else:
        assert limit == 23


def test_where_nothing_fits_it_says_so():
    line = host_memory.lacking(load(), 1, 1, GIB)
    assert "neither fewer layers nor another optim.state fits" in line


def test_swap_and_a_larger_host_that_is_named_count(monkeypatch):
    config = load("precision.compute=float32")
    layout = validate(config, jax.devices()[:1])
    host_of(monkeypatch, 23)
    with pytest.raises(InputError, match=r"this host has 23\.0 GiB"):
        host_memory.check_host_memory(config, layout)
    host_of(monkeypatch, 23, swap=30)
    host_memory.check_host_memory(config, layout)
    host_of(monkeypatch, 23)
    host_memory.check_host_memory(load("offload.host_gib=60", "precision.compute=float32"), layout)
    host_of(monkeypatch, 60)
    host_memory.check_host_memory(load("offload.host_gib=1", "precision.compute=float32"), layout)


def test_processes_of_one_host_share_it(monkeypatch):
    one, two = "machine a", "machine b"
    monkeypatch.setattr(distributed, "gather_text", lambda text: [one, two, one])
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    assert distributed.sharing_memory() == {0, 2}
    monkeypatch.undo()
    assert distributed.sharing_memory() == {0}
    assert hardware.memory_limit_identity() == hardware.memory_limit_identity()


def test_a_notebook_is_told_too(monkeypatch):
    host_of(monkeypatch, 23)
    with pytest.raises(InputError, match=r"model\.layers = 8, .* needs"):
        build_step(load(), data=None, devices=jax.devices()[:1])
