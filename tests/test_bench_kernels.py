"""The bench that times the implementations of an operation: every operation's, and what it says of them."""

import argparse
import dataclasses
import json
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from cases import named, slow_but_for

SMALL = {
    "adamw_8bit": "one_a_row",
    "attention": "cpu_window_5",
    "cast_transpose": "even",
    "experts": "cpu",
    "grouped_matmul": "cpu_into",
    "linear_cross_entropy": "benchmark",
    "rms_norm": "cpu_heads",
    "router": "cpu",
    "routing": "three",
    "weighted_swiglu": "odd",
}
UNLIKE = ("dense", "around")
"""Contenders that compute something else."""
OPTIONS = argparse.Namespace(tiles=False, warmup_seconds=0.0, timed_seconds=0.0)


@pytest.fixture(autouse=True)
def short_turns(bench, monkeypatch, workload):
    monkeypatch.setattr(bench("turns").take, "__kwdefaults__", {"turn_seconds": 0.01, "calls": 1})
    for name in bench("measure.kernel").OPERATIONS:
        monkeypatch.setattr(bench(f"measure.kernels.{name}"), "PACE", workload.Pace(0.0, 0.0, 0.01, 1))


@pytest.fixture
def workload(bench):
    return bench("measure.workload")


@pytest.fixture
def tokamax(bench):
    return bench("measure.tokamax_beside_jax")


def measured(workload, work, **options):
    pace = workload.Pace(0.0, 0.0, 1e-3, 1)
    return workload.measured(work, pace, argparse.Namespace(**vars(OPTIONS) | options))[0]


def test_every_operation_has_a_small_shape_here(bench):
    assert sorted(SMALL) == bench("measure.kernel").OPERATIONS


@slow_but_for(*(name for name in SMALL if name not in ("experts", "router")), name=named(*SMALL))
def test_an_operation_is_timed_and_its_contenders_agree(bench, monkeypatch, capsys, name):
    kernel = bench("measure.kernel")
    seconds = ["--warmup-seconds", "0", "--timed-seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["kernel.py", name, "--shape", SMALL[name], *seconds])
    monkeypatch.setattr(kernel.harness, "keep_stdout", lambda: None)
    assert kernel.main() == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["benchmark"], line["shape"]) == (name, SMALL[name]) and {"commit", "command"} <= line.keys()
    assert len(line["contenders"]) > 1
    for contender, each in line["contenders"].items():
        differs = [value for key, value in each.items() if key.startswith("apart_from_")]
        assert len(differs) == (contender not in UNLIKE) and all(value < 5e-3 for value in differs)
        passes = [each] if "milliseconds" in each else [of for of in each.values() if isinstance(of, dict)]
        assert passes and all(of["milliseconds"] > 0 and of["calls"] >= 2 for of in passes)


def test_all_shapes_are_in_one_record(bench, monkeypatch, capsys):
    kernel, norm = bench("measure.kernel"), bench("measure.kernels.rms_norm")
    monkeypatch.setitem(norm.GROUPS, "all", ("cpu", "cpu_heads"))
    seconds = ["--warmup-seconds", "0", "--timed-seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["kernel.py", "rms_norm", *seconds])
    monkeypatch.setattr(kernel.harness, "keep_stdout", lambda: None)
    assert kernel.main() == 0
    line = json.loads(capsys.readouterr().out)
    assert line["contenders"].keys() == line["clocks"].keys() == {"cpu", "cpu_heads"}
    assert line["contenders"]["cpu_heads"].keys() == {"xla", "reference", "sizes"}


def test_a_result_that_is_wrong_and_a_contender_that_cannot_run_are_said(workload):
    def refuses(x):
        raise ValueError("needs another GPU")

    contenders = {name: {"forward": jnp.sin, "both": run} for name, run in {
        "right": lambda x: (x, x), "wrong": lambda x: (x, 2 * x), "refuses": refuses}.items()}  # fmt: skip
    found = measured(workload, workload.Workload((jnp.ones(4),), contenders, base="right"))
    assert found["right"]["apart_from_right"] == 0 and found["wrong"]["apart_from_right"] == 1
    assert found["refuses"] == {"failed": "ValueError('needs another GPU')"}


def test_tokamax_s_kernels_say_what_jax_has_renamed(tokamax):
    kernel = tokamax.by_old_names(lambda body, *, out_type, grid=(): (body, out_type, grid))
    assert (
        kernel("body", out_shape=4, grid=(2,)) == kernel("body", out_type=4, grid=(2,)) == ("body", 4, (2,))
    )


def test_locations_say_of_what_kind_they_are_as_tokamax_asks(tokamax):
    """It reads what it is to tune from a lowered program's."""
    from jaxlib.mlir import ir

    tokamax.tell_locations(ir)
    with ir.Context(), ir.Location.unknown():
        file = ir.Location.file("a.py", 1, 2)
        found = {
            "file": file,
            "name": ir.Location.name("a", childLoc=file),
            "callsite": ir.Location.callsite(file, [file]),
            "fused": ir.Location.fused([file, ir.Location.name("b")]),
        }
        for kind, location in found.items():
            told = [other for other in tokamax.LOCATIONS if getattr(location, f"is_a_{other}")()]
            assert told == [kind]


def test_what_is_kept_of_an_error_is_its_last_line(tokamax):
    error = RuntimeError("Exception raised in callback: Traceback:\n  File\nAttributeError: is_a_name\n")
    assert tokamax.reason(error) == "RuntimeError: AttributeError: is_a_name"
    assert (
        tokamax.reason(ExceptionGroup("all failed", [ValueError("no room"), error])) == "ValueError: no room"
    )
    assert tokamax.reason(ValueError()) == "ValueError: "


def test_what_tokamax_is_tuned_to_is_what_is_timed(bench, workload):
    """It chooses while it is traced, and JAX keeps what it has traced of a function."""
    kernels, traced = bench("measure.kernels.grouped_matmul"), []
    fields = ["block_m", "block_k", "num_stages", "persistent", "grid_tile_width"]
    config = dataclasses.make_dataclass("Config", fields, frozen=True)
    untuned, best = config(64, 128, 2, False, 1), config(128, 128, 4, True, 8)
    others = config(256, 128, 4, True, 8), config(128, 512, 2, True, 8), config(128, 128, 4, False, 8)

    class Bound:
        heuristics_config, autotuning_configs = untuned, (untuned, best, *others)
        chosen, cached_autotuning_data = untuned, None

        def __init__(self, residuals):
            self.arguments = {"return_residuals": residuals}

        def autotune(self, configs):
            assert configs == {untuned, best} and not self.arguments["return_residuals"]
            Bound.chosen = best
            return types.SimpleNamespace(fastest_config=best)

    def ragged_dot(x, w, sizes, implementation):
        traced.append(Bound.chosen.block_m)
        return x @ w[0]

    def get_bound_args(function, *arguments):
        jax.jit(function).lower(*arguments)
        return Bound(True), Bound(False)

    autotuning = types.SimpleNamespace(get_bound_args=get_bound_args)
    tokamax = types.SimpleNamespace(ragged_dot=ragged_dot, autotuning=autotuning)
    case = kernels.SHAPES["cpu_product"]
    x, w, dy = kernels.arrays(case.of, jnp.float32)
    arguments = None, x, w, dy, kernels.multinomial(case.of)
    call = kernels.of_tokamax(tokamax, case)
    assert kernels.tuned_by_tokamax(tokamax, call, arguments) is None
    workload.programs(workload.Workload(arguments, {"tokamax": {"call": call}}, base="tokamax"), False)
    assert traced == [64, 128]
    tokamax.autotuning = None
    assert "AttributeError" in kernels.tuned_by_tokamax(tokamax, call, arguments)


def test_lighter_contenders_take_turns_behind_the_others(workload, monkeypatch):
    turns_of = []

    def take(runs, *_, **__):
        turns_of.append([name for name, _ in runs])
        return {key: [1.0, 1.0] for key in runs}

    monkeypatch.setattr(workload.turns, "take", take)
    contenders = {name: {"forward": jnp.sin} for name in ("one", "light", "other")}
    work = workload.Workload((jnp.ones(4),), contenders, base="one", lighter=("light",))
    assert measured(workload, work).keys() == {"one", "light", "other"}
    assert turns_of[1::2] == [["one", "other"], ["light"]], "timed behind the warm-up of each"
    alone = workload.Workload((jnp.ones(4),), contenders, base="one", lighter=tuple(contenders))
    assert measured(workload, alone).keys() == contenders.keys()


def test_each_contender_updates_a_state_of_its_own(workload):
    seen = []

    def update(state, by):
        jax.debug.callback(lambda value: seen.append(float(value)), state[0])
        return state + by

    contenders = {name: {"update": update} for name in ("one", "other")}
    work = workload.Workload((jnp.zeros(3), jnp.ones(3)), contenders, base="one", updates=True)
    found = measured(workload, work)
    jax.effects_barrier()
    assert {each["apart_from_one"] for each in found.values()} == {0.0}
    calls = found["one"]["calls"] + 1 + 1  # the comparison, and one turn of warm-up at the least
    assert sorted(seen)[:2] == [0.0, 0.0] and max(seen) >= calls - 1


def test_tiles_contend_under_their_own_names(workload):
    tuned = types.SimpleNamespace(BY=1.0)

    @jax.jit
    def scaled(x):
        return x * tuned.BY

    more = {"tiles": {"twice": {"BY": 2.0}}, "tuned": tuned, "tuned_passes": {"forward": scaled}}
    work = workload.Workload((jnp.ones(4),), {"own": {"forward": scaled}}, base="own", **more)
    assert measured(workload, work).keys() == {"own"}
    found = measured(workload, work, tiles=True)
    assert found["twice"]["apart_from_own"] == 1 and tuned.BY == 1.0
