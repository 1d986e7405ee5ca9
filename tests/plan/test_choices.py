"""What `auto` stands for: proposed by arithmetic, confirmed by a compile, kept by the run."""

import dataclasses
import itertools
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from runs import ROOT

import jaxthru
from jaxthru import config as configuration
from jaxthru.build import choices, confirmed, resuming
from jaxthru.build.checks import validate
from jaxthru.build.compiled import compile_step
from jaxthru.build.defaults import get, plain, replaced
from jaxthru.build.least_offload import LEVELS
from jaxthru.build.memory_estimate import Room, estimate
from jaxthru.build.proposals import OVER, PCIE_ALONE, POLICIES, candidates
from jaxthru.build.refusal import nothing_fits
from jaxthru.data.loading.batch import BATCH_FIELDS
from jaxthru.runtime.errors import InputError

GIB = 2**30
OPEN_KEYS = "remat.policy", "model.loop", "offload.level"
OPEN = tuple(f"{key}=auto" for key in OPEN_KEYS)


def load(name: str, *overrides: str):
    return configuration.load(ROOT / "configs" / f"{name}.py", list(overrides))


def eight_layers(*more: str):
    return load("llama3_8b_8layer", *OPEN, "optim.state=split_master", "model.layers=4", *more)


def test_auto_is_the_default_and_on_a_cpu_what_it_was():
    config = jaxthru.RunConfig()
    searched = ["model.loop", "remat.policy", "offload.level"]
    assert choices.open_keys(config) == [*searched, "optim.state", "train.loss_chunk", "mesh.transfers"]
    ready = choices.resolve(config)
    assert (ready.model.loop, ready.remat.policy, ready.offload.level) == ("scan", "none", "none")
    assert plain(eight_layers("offload.activations=inputs")).model.loop == "unroll"


def test_candidates_come_the_fastest_first_and_fit():
    config = eight_layers()
    for size in (60, 40, 30, 24):
        room = Room(size * GIB, 100 * GIB)
        found = [*itertools.islice(candidates(config, room), 3)]
        assert found and [each.seconds for each in found] == sorted(each.seconds for each in found)
        assert all(room.holds(each.plan) and not choices.open_keys(each.config) for each in found)
    wide = next(candidates(config, Room(130 * GIB, 100 * GIB))).config
    assert (wide.remat.policy, wide.model.loop, wide.offload.level) == ("none", "unroll", "none")
    # Where it is tight, copies that products hide cost less than products that are made again.
    tight = next(candidates(config, Room(20 * GIB, 100 * GIB))).config
    assert tight.offload.layered and 0 < tight.offload.fraction <= 1


def test_less_room_never_makes_a_faster_step():
    config, seconds = eight_layers(), []
    for size in (130, 50, 35, 25, 20, 16):
        found = next(candidates(config, Room(size * GIB, 100 * GIB)), None)
        seconds.append(found.seconds if found else float("inf"))
    assert seconds == sorted(seconds) and seconds[0] < seconds[-2]


def test_one_stage_at_a_time_where_what_that_spares_makes_the_faster_step():
    """Few layers and a large vocabulary: with two stages on their way, all would have to be on the host."""
    room = Room(20 * GIB, 100 * GIB)
    found = next(candidates(eight_layers(), room))
    assert found.config.offload.prefetch == 0 and found.said.endswith(", one stage at a time")
    assert found.seconds == found.matmuls + found.moved / PCIE_ALONE  # a device that waits hides nothing
    named = eight_layers("offload.level=optimizer", "offload.fraction=0.5")
    assert {each.config.offload.prefetch for each in candidates(named, Room(40 * GIB, GIB << 7))} == {2}
    # With room for those on their way, it is what comes next where a compile finds that too large.
    wide = candidates(eight_layers("remat.policy=full", "model.loop=unroll"), Room(30 * GIB, 100 * GIB))
    found = [each for each in wide if each.config.offload.layered]
    assert [each.config.offload.prefetch for each in found] == [2, 0]
    assert found[0].seconds < found[1].seconds and not any(each.near for each in found)
    near = candidates(eight_layers("remat.policy=full"), Room(round(17.5 * GIB), 100 * GIB))
    assert [(each.near, each.config.offload.prefetch) for each in near][:2] == [(False, 0), (True, 2)]


def test_a_run_that_goes_on_with_another_prefetch_is_searched_for_anew():
    """It is asked for, and is chosen: kept is what was chosen for the same."""
    asked = eight_layers(
        "optim.state=split_master_float32", "train.loss_chunk=small", "mesh.transfers=collectives"
    )
    run = replaced(
        asked, dict(zip(OPEN_KEYS, ("full", "unroll", "optimizer"), strict=True)) | {"offload.fraction": 0.5}
    )
    tight = replaced(run, {"offload.prefetch": 0})
    made = {chosen: choices.made(asked, chosen, "it fits", jax.devices()[:1]) for chosen in (run, tight)}

    def level(config, run):
        here = [dataclasses.replace(each, device=choices.device_name(jax.devices())) for each in made[run]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choices, "plain", lambda config: config)
            found = choices.resolve(config, run, here).offload
        return found.level, found.prefetch

    assert level(asked, run) == ("optimizer", 2) and level(asked, tight) == ("optimizer", 0)
    fewer = configuration.changed(asked, ["offload.prefetch=1"])
    assert level(fewer, run) == level(fewer, tight) == ("auto", 1)


def test_what_was_chosen_with_the_level_of_offload_is_kept_with_it(tmp_path):
    asked = eight_layers()
    chosen = next(candidates(asked, Room(20 * GIB, 100 * GIB))).config
    made = choices.made(asked, chosen, "it fits", jax.devices()[:1])
    assert {"offload.level", "offload.fraction", "offload.prefetch"} <= {each.key for each in made}
    here = choices.device_name(jax.devices())
    recorded = [dataclasses.replace(each, device=here) for each in made]
    with_gpu = [types.SimpleNamespace(platform="gpu", device_kind="cpu", process_index=0)] * len(
        jax.devices()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices.hardware, "devices", lambda: with_gpu)
        assert choices.resolve(asked, chosen, recorded).offload == chosen.offload


def test_what_is_asked_for_stays():
    room = Room(130 * GIB, 100 * GIB)
    asked = eight_layers("remat.policy=full", "model.loop=scan")
    assert {(c.config.remat.policy, c.config.model.loop) for c in candidates(asked, room)} == {
        ("full", "scan")
    }
    assert not any(c.config.offload.layered for c in candidates(asked, Room(20 * GIB, 100 * GIB)))
    # A loop copies what is kept into stacks: where it is asked for, `none` is not the fastest.
    assert next(candidates(eight_layers("model.loop=scan"), room)).config.remat.policy == "projections"
    asked = eight_layers("offload.level=optimizer", "offload.fraction=0.5")
    found = [c.config for c in candidates(asked, room)]
    assert {(c.offload.level, c.offload.fraction) for c in found} == {("optimizer", 0.5)}
    assert [c.remat.policy for c in found] == [*POLICIES[1:]]
    on_tpu = [c.config.model.loop for c in candidates(eight_layers(), room, gpu=False)]
    assert on_tpu[0] == "scan"


def test_what_fits_nowhere_is_one_line_with_what_would():
    config = eight_layers("optim.state=split_master_float32")
    room = Room(13 * GIB, 20 * GIB)
    assert next(candidates(config, room), None) is None
    said = nothing_fits(config, room)
    assert "offload.level = 'auto'" in said and "split_master_float32" in said and "\n" not in said
    assert "GiB on the device" in said and " fits" in said
    assert "no narrower optim.state fits" in nothing_fits(config, Room(GIB, GIB))
    assert "clip_rule" not in said


def test_clipping_by_the_norm_before_is_named_where_it_makes_room():
    """Gradients that wait for their own norm are 2 bytes a parameter."""
    room, asked = Room(10 * GIB, 24 * GIB), eight_layers()
    said = nothing_fits(asked, room)
    assert "with optim.clip_rule = 'previous' it fits" in said and "\n" not in said
    assert not any(room.holds(each.plan) for each in candidates(asked, room))
    assert next(candidates(eight_layers("optim.clip_rule=previous"), room)).config.offload.layered
    assert "it fits" not in nothing_fits(eight_layers("optim.clip=0"), room)


@pytest.mark.parametrize(
    ("named", "what", "instead"),
    [
        ("remat.policy=none", "remat.policy = 'none'", "remat.policy = 'auto'"),
        ("remat.keep_parameters=true", "remat.keep_parameters = True", "remat.keep_parameters = False"),
    ],
)
def test_what_rules_offload_out_is_named_with_the_size_without_it(named, what, instead):
    room, config = Room(18 * GIB, 100 * GIB), eight_layers(named)
    assert next(candidates(config, room), None) is None
    said = nothing_fits(config, room)
    assert f"without offload, which {what} rules out" in said and f"with {instead} it fits" in said
    assert "and 0.0 on the host" in said and "\n" not in said
    least = float(re.search(r"needs ([\d.]+) GiB", said)[1])
    assert least > 18
    alone = nothing_fits(eight_layers(named, "offload.level=none"), room)
    assert f"{least} GiB on the device" in alone and "rules out" not in alone


@pytest.fixture
def small(monkeypatch):
    """A configuration of a tiny model with what `auto` decides left open, and its data."""
    shape = {field.name: getattr(tiny.SHAPE, field.name) for field in dataclasses.fields(tiny.SHAPE)}
    model = dataclasses.replace(tiny.SHAPE, loop="auto")
    config = jaxthru.RunConfig(
        train=dataclasses.replace(jaxthru.RunConfig().train, rows=2),
        model=model,
        data=dataclasses.replace(jaxthru.RunConfig().data, sequence=tiny.SEQUENCE),
        precision=dataclasses.replace(jaxthru.RunConfig().precision, compute="float32"),
    )
    assert shape["vocabulary"]
    monkeypatch.setattr(choices, "room_here", lambda config: Room(GIB, GIB))
    return config, tiny.Data()


def built(small):
    config, data = small
    return compile_step(config, validate(config, jax.devices()[:1]), data)


def test_what_does_not_fit_as_compiled_makes_room_for_the_next(small, monkeypatch, caplog):
    caplog.set_level("INFO", "jaxthru")
    tried = []

    def sizes(stats):
        tried.append(stats)
        return confirmed.Sizes(2 * GIB if len(tried) < 2 else GIB // 2, 0, 0)

    monkeypatch.setattr(confirmed.Sizes, "of", staticmethod(sizes))
    build = built(small)
    assert len(tried) == 2
    assert build.config.remat.policy == "projections" and build.config.model.loop == "scan"
    assert not choices.open_keys(build.config)
    keys = {choice.key: choice for choice in build.choices}
    assert keys["remat.policy"].asked == "auto" and keys["remat.policy"].chosen == "projections"
    assert "0.5 of 1.0 GiB as compiled" in keys["remat.policy"].reason
    assert keys["kernels.attention"].chosen == build.config.kernels.attention == "xla"
    assert "too much" in caplog.text


@pytest.mark.slow
def test_where_nothing_fits_as_compiled_the_run_is_refused(small, monkeypatch, caplog):
    caplog.set_level("INFO", "jaxthru")
    config, data = small
    config = choices.replaced(config, {"remat.policy": "full"})  # in a loop, and offloaded
    monkeypatch.setattr(confirmed.Sizes, "of", staticmethod(lambda stats: confirmed.Sizes(0, 0, 2 * GIB)))
    with pytest.raises(InputError, match="nothing fits"):
        built((config, data))
    assert "too much" in caplog.text and "as compiled it does not fit" in caplog.text


def test_what_arithmetic_alone_finds_too_large_is_compiled_before_it_is_refused(small, monkeypatch):
    config, data = small
    config = choices.replaced(config, {"offload.level": "none"})
    found = [*candidates(config, Room(GIB, GIB), gpu=False)]
    sizes = {each.config.remat.policy: each.plan.peak_device for each in found}
    least = min(sizes.values())

    def room(times: float) -> Room:
        return Room(round(least / times), 0)

    monkeypatch.setattr(confirmed.Sizes, "of", staticmethod(lambda stats: confirmed.Sizes(least // 2, 0, 0)))
    monkeypatch.setattr(choices, "room_here", lambda config: room(1.05))
    assert sizes[built((config, data)).config.remat.policy] == least, "the smallest"
    (near,) = candidates(config, room(1.05), gpu=False)
    assert near.near and room(1.05).device < near.plan.peak_device <= OVER * room(1.05).device
    forms = [one.config.model.loop for one in candidates(config, room(1.05))]
    assert sorted(forms) == ["scan", "unroll"], "for one that does not fit says as much of the others"
    monkeypatch.setattr(choices, "room_here", lambda config: room(1.3))
    with pytest.raises(InputError, match="nothing fits"):
        built((config, data))


def test_the_least_offload_is_that_of_the_compiled_programs(small, monkeypatch):
    config, data = small
    config = dataclasses.replace(config, remat=dataclasses.replace(config.remat, policy="full"))
    monkeypatch.setattr(jaxthru.build.memory_estimate, "FULL", 1.0)
    step = dataclasses.replace(config, offload=dataclasses.replace(config.offload, level="optimizer"))
    whole = estimate(plain(step))[0].peak_device
    # So narrow that one program does not fit, whatever XLA says of it.
    monkeypatch.setattr(choices, "room_here", lambda config: Room(whole + (1 << 20), GIB))
    build = built((config, data))
    if build.config.offload.layered:
        assert build.config.offload.level in LEVELS and build.config.model.loop == "unroll"
    state = build.first_state()
    assert jax.tree.leaves(state)[0] is not None


def test_a_run_keeps_what_it_chose_on_such_devices(tmp_path):
    config = eight_layers()
    chosen = next(candidates(config, Room(24 * GIB, 100 * GIB))).config
    here = choices.device_name(jax.devices())
    made = choices.made(config, chosen, "why", jax.devices())
    choices.write(tmp_path / "choices.json", made)
    kept = choices.read(tmp_path / "choices.json")
    assert kept == made and {
        each["device"] for each in json.loads((tmp_path / "choices.json").read_text())
    } == {here}
    again = choices.resolve(config, chosen, kept)
    for key in choices.open_keys(config):
        assert get(again, key) == get(chosen, key)
    assert again.offload.fraction == chosen.offload.fraction
    # Another step, or other devices: chosen anew, which on a CPU is what the default was.
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, rows=4))
    assert choices.resolve(other, chosen, kept).offload.level == "none"
    away = [dataclasses.replace(each, device="8 × another") for each in kept]
    assert choices.resolve(config, chosen, away).offload.level == "none"
    # What was chosen beside a level that had been named is no choice of where it is open.
    beside = [each for each in kept if each.key != "offload.level"]
    assert choices.resolve(config, chosen, beside).remat.policy == plain(config).remat.policy
    assert chosen.remat.policy != plain(config).remat.policy


def test_a_config_json_of_other_devices_is_open_again(tmp_path):
    config = plain(eight_layers())
    configuration.dump(config, tmp_path / "config.json")
    made = (choices.Choice("remat.policy", "auto", "none", "why", "8 × another"),)
    made += (choices.Choice("kernels.attention", "auto", "xla", "why", "8 × another"),)
    choices.write(tmp_path / "choices.json", made)
    loaded = configuration.load(tmp_path / "config.json", ["kernels.attention=xla"])
    ready = choices.resolve(loaded)
    assert ready.kernels.attention == "xla", "who sets a key has it so"
    assert choices.resolve(configuration.load(tmp_path / "config.json")).kernels.attention == "auto"


@pytest.mark.parametrize("text", ["[{", "[1]", "3", '[{"key": "remat.policy"}]', "[" * 100_000])
def test_choices_that_are_damaged_are_one_line(tmp_path, text):
    (tmp_path / "choices.json").write_text(text)
    with pytest.raises(InputError, match=r"cannot be read as choices .*; delete it, and start with"):
        choices.read(tmp_path / "choices.json")
    assert choices.read(tmp_path / "none.json") == ()
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(InputError, match="cannot be read as choices"):
        choices.read(tmp_path / "folder.json")


def test_a_choice_that_its_key_cannot_have_names_the_file(tmp_path):
    row = {"key": "model.loop", "asked": "auto", "chosen": "banana", "reason": "why", "device": "1 × another"}
    (tmp_path / "choices.json").write_text(json.dumps([row]))
    with pytest.raises(InputError, match=r"choices.json: .*loop = 'banana': must be one of .*delete it"):
        choices.read(tmp_path / "choices.json")


@pytest.mark.parametrize("key", ["kernels.gone", "remat", "train.rows", None])
def test_choices_of_keys_that_are_no_more_or_never_chosen_are_passed_over(tmp_path, key):
    kept = choices.Choice("remat.policy", "auto", "none", "why", "8 × another")
    rows = [dataclasses.asdict(dataclasses.replace(kept, key=key)), dataclasses.asdict(kept) | {"more": 1}]
    (tmp_path / "choices.json").write_text(json.dumps(rows))
    assert choices.read(tmp_path / "choices.json") == (kept,)


def test_what_is_left_open_is_no_change_of_a_run(tmp_path):
    asked = eight_layers()
    chosen = next(candidates(asked, Room(20 * GIB, 100 * GIB))).config
    assert configuration.check_change(chosen, asked, tmp_path) == []


def test_what_a_run_chooses_anew_is_said():
    """Of keys that were asked for, `check_change` tells."""
    asked = choices.replaced(jaxthru.RunConfig(), {"train.rows": 4})
    before = {"model.loop": "unroll", "remat.policy": "gate", "train.rows": 2, "offload.fraction": 0.5}
    before = choices.replaced(asked, before)
    chosen = choices.replaced(asked, {"model.loop": "scan", "remat.policy": "gate"})
    said = resuming.chosen_anew(before, asked, chosen)
    assert "model.loop ('unroll' → 'scan')" in said and "offload.fraction (0.5 → 1.0)" in said
    assert not any("remat" in line or "rows" in line for line in said)
    assert resuming.chosen_anew(None, asked, chosen) == []


def test_a_run_keeps_the_choices_that_its_configuration_still_shows():
    asked = jaxthru.RunConfig()
    chosen = choices.replaced(asked, {"remat.policy": "gate", "model.loop": "unroll"})
    recorded = choices.made(asked, chosen, "fits", jax.devices()[:1])
    assert [each.key for each in recorded] == ["model.loop", "remat.policy"]
    assert choices.still_true(recorded, chosen, ()) == recorded  # started again by its config.json
    other = choices.replaced(chosen, {"model.loop": "scan"})
    assert choices.still_true(recorded, other, ()) == recorded[1:]
    anew = dataclasses.replace(recorded[1], device="8 × TPU v5p")
    assert choices.still_true(recorded, chosen, (anew,)) == (recorded[0], anew)
    settled = choices.made(asked, chosen, "", jax.devices()[:1])
    assert {each.reason for each in settled} == {choices.RECORDED}
    assert choices.still_true(recorded, chosen, settled) == recorded, "with the reasons of then"
    default = choices.still_true((), chosen, settled)
    assert {each.reason for each in default} == {"the default of this device"}
    assert choices.still_true((anew,), chosen, settled) == default, "of another device"
    split = choices.replaced(asked, {"optim.state": "split_master"})
    (settled,) = choices.made(asked, split, "", jax.devices()[:1])
    elsewhere = dataclasses.replace(settled, reason="it fits", device="8 × TPU v5p")
    assert choices.still_true((elsewhere,), split, (settled,)) == (elsewhere,), "which all devices keep"


def test_the_first_evaluation_finds_its_program_compiled(small, caplog):
    build = built(small)
    state, rows = build.first_state(), build.config.train.rows_at_once
    field = np.ones((rows, tiny.SEQUENCE), np.int32)
    whole = build.layout.sharding(("batch", "sequence"))
    batch = {name: jax.device_put(field.astype(dtype), whole) for name, dtype in BATCH_FIELDS.items()}
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        terms = build.compiled.terms_of(build.step.objective)
        terms(state["params"], batch, jnp.ones((), jnp.float32))
    assert "jit(terms)" not in caplog.text, caplog.text
