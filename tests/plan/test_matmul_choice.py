"""Float8 by `auto`: an account near what was measured, and numbers that a run keeps."""

import dataclasses
import logging
import re

import jax
import pytest
import tiny
from runs import ROOT

import jaxthru
from jaxthru import config as configuration
from jaxthru.build import choices, compiled, matmul_choice, proposals
from jaxthru.build.checks import validate
from jaxthru.build.compiled import compile_step, fit_here
from jaxthru.build.memory_estimate import Room, layout_of
from jaxthru.build.proposals import candidates
from jaxthru.plan.__main__ import main as plan
from jaxthru.runtime import aot
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.mesh import AXES

H200, HOPPER = "NVIDIA H200", (9, 0)


def load(name: str, *overrides: str) -> configuration.RunConfig:
    return configuration.load(ROOT / "configs" / f"{name}.py", ["precision.matmul=auto", *overrides])


def settled(config, kind=H200, capability=HOPPER, devices=1):
    config, why = matmul_choice.settled(config, layout_of(config, devices), kind, capability)
    return config.precision.matmul, why


QWEN3_4B = "model.layers=36 model.embed=2560 model.heads=32 model.mlp=9728 train.rows=4 data.sequence=2048"
SHORT = "train.rows=16 data.sequence=2048"
XLA = "kernels.cast_transpose=xla"


@pytest.mark.parametrize(
    ("name", "settings", "compute", "float8", "within", "of_step"),
    # Tokens/s measured on an H200, docs/results.md. By those of XLA its rate was taken.
    [
        ("llama3_8b_8layer", XLA, 38_045, 47_341, 0.005, 0.1),
        ("llama3_8b_one_gpu", XLA, 10_381, 13_375, 0.02, 0.1),
        ("qwen3_0_6b", f"{QWEN3_4B} {XLA}", 20_773, 25_095, 0.01, 0.1),
        ("llama3_2_1b", f"{SHORT} {XLA}", 73_341, 85_137, 0.025, 0.1),
        ("qwen3_0_6b", f"{SHORT} {XLA}", 114_040, 116_709, 0.01, 0.15),
        ("llama3_2_1b", SHORT, 73_341, 92_994, 0.025, 0.1),
        ("qwen3_0_6b", SHORT, 114_040, 126_951, 0.01, 0.15),
        ("llama3_8b_8layer", "", 38_203, 50_290, 0.015, 0.1),
    ],
)
def test_the_account_is_near_what_was_measured(name, settings, compute, float8, within, of_step):
    config = load(name, *settings.split())
    found = matmul_choice.account(config, layout_of(config, 1), H200, HOPPER)
    tokens = config.train.rows * config.data.sequence
    expected = tokens / (tokens / compute - found.gain * found.step)
    assert expected == pytest.approx(float8, rel=within)
    assert found.step == pytest.approx(tokens / compute, rel=of_step)


def test_under_adapters_frozen_weights_have_two_products():
    """Against 4 rows of 4,096 of all of Llama 3 8B, timed on an H200: results/tuning_lora_8b*.json."""
    config = load("llama3_8b_one_gpu", "lora.rank=16", "train.rows=4", "data.sequence=4096")
    found = matmul_choice.account(config, layout_of(config, 1), H200, HOPPER)
    compute, float8 = 16_384 / 16_504, 16_384 / 22_474
    assert found.step == pytest.approx(compute, rel=0.05)
    assert found.gain == pytest.approx(1 - float8 / compute, abs=0.03)


def test_a_large_model_takes_it_and_a_small_one_does_not():
    matmul, why = settled(load("llama3_8b_8layer"))
    assert matmul == "fp8" and re.search(r"133 ms in place of 249, quantising 16\.6: 22\.8% of the step", why)
    matmul, why = settled(load("quickstart", "precision.compute=bfloat16"))
    assert matmul == "compute" and "5% is the least" in why


def test_more_is_quantised_for_each_product_of_fewer_tokens():
    """Weights are quantised in each micro-batch; tokens are as many as before."""
    whole, split = (
        matmul_choice.account(config, layout_of(config, 1), H200, HOPPER)
        for config in (load("llama3_8b_8layer", f"train.microbatches={n}") for n in (1, 2))
    )
    assert split.float8 == pytest.approx(whole.float8)
    assert split.quantising - whole.quantising == pytest.approx(
        8 * 218.1e6 * (7 / 3.2e12 - 2 / 4.1e12), rel=0.01
    )


@pytest.mark.parametrize("mesh", ["mesh.fsdp=4", "mesh.tensor=4", "mesh.data=4"])
def test_devices_share_the_work(mesh):
    config, other = load("llama3_8b_8layer", "train.rows=8"), load("llama3_8b_8layer", "train.rows=8", mesh)
    one, four = (
        matmul_choice.account(each, layout_of(each, n), H200, HOPPER) for each, n in ((config, 1), (other, 4))
    )
    assert four.float8 == pytest.approx(one.float8 / 4) and four.step == pytest.approx(one.step / 4)
    assert one.quantising / 4 <= four.quantising * (1 + 1e-9) < one.quantising


@pytest.mark.parametrize(
    ("settings", "capability", "casts"),
    [
        ("", HOPPER, ("triton", "triton")),
        ("", (8, 9), ("xla", "xla")),
        ("", (10, 0), ("xla", "xla")),
        ("", None, ("xla", "xla")),
        ("kernels.cast_transpose=triton", (10, 0), ("triton", "triton")),
        ("kernels.cast_transpose=xla", HOPPER, ("xla", "xla")),
        ("kernels.cast_transpose=reference", HOPPER, ("xla", "xla")),
        ("lora.rank=16", HOPPER, ("triton", "xla")),
        ("mesh.fsdp=4", HOPPER, ("triton", "xla")),
        ("mesh.data=4", HOPPER, ("triton", "triton")),
        ("mesh.tensor=4", HOPPER, ("xla", "triton")),
    ],
)
def test_the_rate_of_casts_is_of_what_makes_them(settings, capability, casts):
    config = load("llama3_8b_8layer", "train.rows=8", *settings.split())
    layout = layout_of(config, 4 if "mesh" in settings else 1)
    expected = tuple(matmul_choice.TRANSPOSING[by] for by in casts)
    assert matmul_choice.transposing(config, layout, capability) == expected


@pytest.mark.parametrize(
    ("kind", "capability", "matmul", "why"),
    [
        ("NVIDIA L40S", (8, 9), "fp8", "of the step"),
        ("NVIDIA B200", (10, 0), "fp8", "of the step"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "compute", "Ada, Hopper or Blackwell, and here is NVIDIA A100"),
        ("TPU v5p", None, "compute", "and here is TPU v5p"),
        ("NVIDIA L4", (8, 9), "compute", "no data sheet of NVIDIA L4"),
    ],
)
def test_the_device_decides(kind, capability, matmul, why):
    found = settled(load("llama3_8b_8layer"), kind, capability)
    assert found[0] == matmul and why in found[1]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("remat.keep_parameters=true", "remat.keep_parameters = True"),
        ("mesh.transfers=copies", "mesh.transfers = 'copies'"),
        ("kernels.collective_matmul=ring", "kernels.collective_matmul = 'ring'"),
        ("precision.compute=float32", "precision.compute = 'float32'"),
        ("lora.rank=16 lora.base=int8", "lora.base = 'int8'"),
    ],
)
def test_a_setting_that_rules_it_out_is_named(setting, named):
    config = load("llama3_8b_8layer", "mesh.tensor=2", *setting.split())
    matmul, why = settled(config, devices=2)
    assert matmul == "compute" and why.startswith(named) and "\n" not in why


def test_what_is_asked_for_stays():
    for asked in ("compute", "fp8"):
        assert settled(load("quickstart", f"precision.matmul={asked}")) == (asked, "")
    assert jaxthru.RunConfig().precision.matmul == "compute"


def test_on_a_cpu_it_is_the_compute_dtype():
    assert choices.resolve(load("quickstart")).precision.matmul == "compute"


def test_a_run_keeps_its_own_on_any_device(monkeypatch):
    """Other numbers would begin without a word."""
    run = load("llama3_8b_8layer", "precision.matmul=fp8", "model.loop=auto")
    row = choices.Choice("precision.matmul", "auto", "fp8", "why", "8 × another")
    other = load("llama3_8b_8layer", "model.loop=auto", "train.rows=4")
    for config in (load("llama3_8b_8layer"), other):
        assert choices.resolve(config, run, (row,)).precision.matmul == "fp8"
    before = dataclasses.replace(run, precision=dataclasses.replace(run.precision, matmul="compute"))
    assert choices.resolve(load("llama3_8b_8layer"), before, ()).precision.matmul == "compute"
    # A device that cannot goes no further.
    monkeypatch.setattr("jaxthru.build.checks.nvidia_compute_capability", lambda: (8, 0))
    monkeypatch.setattr("jaxthru.build.checks.make_mesh", lambda *_: ampere())
    with pytest.raises(InputError, match=r"precision.matmul = 'fp8': needs .* here is NVIDIA A100"):
        validate(choices.resolve(load("llama3_8b_8layer", "optim.clip=1.0"), run, (row,)))


def ampere():
    """Returns a mesh of one GPU without float8."""
    import types

    import numpy as np

    device = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA A100")
    axes = dict.fromkeys(AXES, 1)
    return types.SimpleNamespace(
        devices=np.array([[[device]]], dtype=object), shape=axes, axis_names=(*axes,), size=1
    )


def test_a_config_json_of_other_devices_keeps_it(tmp_path):
    config = load("llama3_8b_8layer", "precision.matmul=fp8")
    configuration.dump(config, tmp_path / "config.json")
    rows = [choices.Choice("precision.matmul", "auto", "fp8", "why", "8 × another")]
    choices.write(tmp_path / "choices.json", rows)
    assert choices.resolve(configuration.load(tmp_path / "config.json")).precision.matmul == "fp8"


def small(**precision) -> configuration.RunConfig:
    config = jaxthru.RunConfig(
        train=dataclasses.replace(jaxthru.RunConfig().train, rows=2),
        model=dataclasses.replace(tiny.SHAPE, loop="auto"),
        data=dataclasses.replace(jaxthru.RunConfig().data, sequence=tiny.SEQUENCE),
    )
    return dataclasses.replace(config, precision=dataclasses.replace(config.precision, **precision))


def test_what_was_taken_is_said_and_recorded(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "jaxthru")
    config = small(compute="float32", matmul="auto")
    layout = validate(config, jax.devices()[:1])
    monkeypatch.setattr(choices, "room_here", lambda config: Room(2**30, 2**30))
    monkeypatch.setattr(matmul_choice, "_chosen", lambda *_: ("fp8", "because"))
    build = compile_step(config, layout, tiny.Data())
    assert "precision.matmul = 'auto' is 'fp8', because" in caplog.text
    (row,) = [each for each in build.choices if each.key == "precision.matmul"]
    assert (row.asked, row.chosen, row.reason) == ("auto", "fp8", "because")
    assert build.step.model.ops.float8 and build.config.precision.matmul == "fp8"


def test_one_start_searches_once(monkeypatch):
    """What `fit_here` has found is what `compile_step` begins with, unless the data is another."""
    config, searches = small(compute="float32"), []
    monkeypatch.setattr(choices, "room_here", lambda config: Room(2**30, 2**30))
    monkeypatch.setattr(choices, "documents", lambda config: choices.Documents(tiny.Data.segments, 1))

    def counted(config, room, devices, segments, *rest):
        searches.append(segments)
        return by_speed(config, room, devices, segments, *rest)

    monkeypatch.setattr(compiled, "fits_as_one_program", lambda *_, **how: False)
    by_speed = proposals._by_speed
    monkeypatch.setattr(proposals, "_by_speed", counted)
    layout = fit_here(config, jax.devices()[:1])
    build = compile_step(config, layout, tiny.Data())
    assert searches == [4] and not choices.open_keys(build.config)
    monkeypatch.setattr(choices, "documents", lambda config: choices.Documents(8, 1))
    fit_here(config, jax.devices()[:1])
    assert searches == [4, 8]


def test_where_a_step_of_one_program_fits_data_is_prepared_without_a_search(monkeypatch):
    config = small(compute="float32")
    monkeypatch.setattr(choices, "documents", lambda config: choices.Documents(tiny.Data.segments, 1))
    monkeypatch.setattr(choices, "room_here", lambda config: Room(2**30, 2**30))
    monkeypatch.setattr(choices, "proposed", lambda *_: pytest.fail("searched"))
    fit_here(config, jax.devices()[:1])
    monkeypatch.setattr(choices, "room_here", lambda config: Room(1000, 1000))
    with pytest.raises(pytest.fail.Exception, match="searched"):
        fit_here(config, jax.devices()[:1])


def test_an_interrupted_search_is_begun_anew(monkeypatch):
    config, room, by_speed = small(compute="float32"), Room(2**30, 2**30), proposals._by_speed
    monkeypatch.setattr(proposals, "_by_speed", lambda *_: (_ for _ in [0]).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        next(candidates(config, room))
    monkeypatch.setattr(proposals, "_by_speed", by_speed)
    assert room.holds(next(candidates(config, room)).plan)


def test_a_plan_is_of_what_a_run_would_take(capsys, monkeypatch):
    """By arithmetic, whatever compilers are here: to compile the three programs takes ten times as long."""
    monkeypatch.setattr(aot, "available", lambda: False)
    asked = ["memory", "--config", str(ROOT / "configs/llama3_8b_8layer.py"), "--segments", "1"]
    asked += ["--set", "remat.policy=none", "--set", "model.loop=unroll", "--set", "model.layers=4"]
    asked += ["--set", "offload.level=none"]
    sizes = {}
    for matmul in ("auto", "fp8", "compute"):
        assert plan([*asked, "--set", f"precision.matmul={matmul}"]) in (0, 1)
        text = capsys.readouterr().out
        sizes[matmul] = re.findall(r"fits: ([\d.]+) of", text)
        assert ("precision.matmul = auto is fp8, by arithmetic" in text) == (matmul == "auto")
    assert sizes["auto"] == sizes["fp8"] != sizes["compute"]
