"""The profiler's own benchmark: that its rows can run, and what it makes of what it measures."""

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from jaxthru import config as configuration
from jaxthru import train
from jaxthru.build import compiled
from jaxthru.profile.account import ledger
from jaxthru.profile.collect import clocks
from jaxthru.profile.read.xplane import Event, Trace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "profile"))
import sample  # noqa: E402 - the ledger that the profiler's own tests share


def test_each_row_has_a_configuration_that_is_possible(bench, tmp_path):
    profiler, causes, measure = map(bench, ("profiler", "profiler_causes", "profiler_measure"))
    arguments = profiler.parse(["--output", str(tmp_path / "found.json")])
    run = profiler.Bench.__new__(profiler.Bench)
    run.arguments, run.work = arguments, tmp_path
    for name, row in profiler.ROWS.items():
        words = run.command(name)
        assert Path(words[1]).is_file()
        settings = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
        config = configuration.load(ROOT / "configs" / f"{row.config}.py", settings)
        if row.script:
            continue
        at, steps, total = row.steps
        assert config.profile.at == at and config.train.steps == total
        # Two passes, each with the step that ends it, and the steps behind a trace that do not count.
        others = (2 * row.turns + 1) * causes.Turns.STEPS if row.turns else 0
        assert total - others > at + 2 * (steps + 1) + 3 + 3
        assert row.cause in (*causes.CAUSES, "remat")
        if row.against:
            assert row.cause in measure.EXPECTED
            clean = profiler.ROWS[row.against]
            assert (row.devices, row.steps[0], row.steps[2]) == (
                clean.devices,
                clean.steps[0],
                clean.steps[2],
            )
    assert {row.cause for row in profiler.ROWS.values() if row.against} == set(measure.EXPECTED)
    assert len(profiler.CAUSES) == 6


def test_a_loop_without_hooks_calls_no_profiler(bench):
    off = bench("profiler_off")
    loop = off.without_hooks(train.train)
    with_, without = train.train.__code__, loop.__code__
    assert "profile" in with_.co_cellvars
    assert "profile" not in (*without.co_varnames, *without.co_cellvars)
    assert {"compiled", "dispatched", "waiting"} <= set(without.co_names)
    assert set(with_.co_names) - set(without.co_names) <= {
        *(
            "open_profile",
            "present",
            "profile",
            "program",
            "recompile",
            "begins",
            "begin",
            "span",
            "after",
            "close",
            "finish",
        ),
        *("apart", "note"),
    }


def product(start: int, end: int, name: str = "nvjet_tst_128x128") -> Event:
    return Event("0", "Stream #1", name, start, end)


def test_clock_of_products_is_counted_within_them(bench):
    counters = {
        "0": {"GPC Clock Frequency (Hz)": [(5, 1e9), (15, 1.5e9), (25, 1.9e9), (45, 1.7e9), (60, 1e9)]}
    }
    trace = Trace([product(10, 20), product(20, 30, "loop_add"), product(40, 50)], [], counters, 0)
    found = bench("profiler_measure").gemm_clock(trace)
    assert found == {"kernels": 2, "seconds": 20e-9, "span": 40e-9, "mhz": 1600.0, "whole_mhz": 1700.0}


CLEAN = sample.ledger(noise=0.002)
"""Of which the products took 330 ms at 1,540 MHz."""


def run(measure, ledger, **notes):
    """Returns a run of which all steps but the profiled ones took 10 ns, the clock 1,600 MHz in the last."""
    found = measure.Run.__new__(measure.Run)
    found.ledger, found.config, found.steps = ledger, sample.config(), [1, 2, 3]
    found.notes = {"dispatched": [0, 10, 20, 30], "idle": [0.0, 0.1, 0.1, 9.0], "isolated": None} | notes
    found.samples = clocks.Samples(
        {"0": [(5, 1500.0, 700.0, 4), (25, 1700.0, 700.0, 4), (35, 100.0, 70.0, 0)]}
    )
    return found


def drifting(steps: int) -> list[float]:
    """Returns how long each step takes on a machine that slows by half and recovers."""
    return [0.2 + 0.1 * math.sin(math.pi * step / steps) for step in range(steps + 1)]


def closed(measure, monkeypatch, *, wrong: float, tracing: float, turns: int) -> dict:
    """Returns the closure of a run whose steps 20 to 29 were profiled; one of those took three times as long.

    wrong: by which factor the ledger's steps are too long. tracing: by which traced steps took longer.
    """
    taken = {"production": {"first_step": 20, "steps": 10}}
    taken |= {f"turn_{turn}": {"first_step": 45 + 10 * turn, "steps": 5} for turn in range(turns)}
    loop = dict(enumerate(drifting(254)))
    for one in taken.values():
        loop |= {step: loop[step] * tracing for step in range(one["first_step"], sum(one.values()))}
    loop[24] *= 3
    steps = tuple(ledger.DeviceStep(step, 0.0, loop[step] * wrong, {}) for step in range(20, 30))
    found = run(measure, dataclasses.replace(CLEAN, devices=(ledger.Device("0", steps),)))
    found.loop, found.taken, found.path = loop, taken, None
    found.steps = [*range(10, 20), *range(34, 44)]
    monkeypatch.setattr(measure, "counted", lambda run: {})
    monkeypatch.setattr(measure, "parse_cost", lambda path, steps: {})
    return measure.closure(found)


@pytest.mark.parametrize("turns", [0, 20])
@pytest.mark.parametrize(("wrong", "tracing"), [(1, 1), (1.03, 1), (0.97, 1), (1, 1.03), (0.97, 1 / 0.97)])
def test_a_ledger_closes_if_it_is_right(bench, monkeypatch, turns, wrong, tracing):
    """However the machine's speed drifts, and one step is disturbed; and not because two errors cancel."""
    found = closed(bench("profiler_measure"), monkeypatch, wrong=wrong, tracing=tracing, turns=turns)
    bars = found["bars"]
    assert bars["same_steps"]["found"] == pytest.approx(wrong - 1)
    assert bars["same_steps"]["met"] is (wrong == 1)
    assert bars["closure"]["found"] == pytest.approx(wrong * tracing - 1, abs=0.005)
    assert bars["closure"]["met"] is (round(wrong * tracing, 6) == 1)
    assert found["profiled_loop_seconds"] == pytest.approx(drifting(254)[25] * tracing, rel=0.01)


def test_turns_that_are_slow_together_count_as_one(bench, monkeypatch):
    """Each half of a run agrees within itself; how far the halves are apart says how well both are known."""
    measure = bench("profiler_measure")
    monkeypatch.setattr(measure.Run, "slowed", lambda run: [0.01] * 10 + [0.05] * 10)
    found = closed(measure, monkeypatch, wrong=1, tracing=1, turns=0)
    assert found["standard_error"] == pytest.approx(0.02)
    monkeypatch.setattr(measure.Run, "slowed", lambda run: [0.01] * 10)
    assert closed(measure, monkeypatch, wrong=1, tracing=1, turns=0)["standard_error"] is None


def test_a_planted_run_keeps_memory_as_any_other_does(bench, monkeypatch, tmp_path):
    causes, ran = bench("profiler_causes"), []
    for kind in (compiled.CompiledStep, compiled.DispatchedStep):
        monkeypatch.setattr(kind, "__call__", kind.__call__)  # which the script replaces
    monkeypatch.setattr(train.Build, "batches", train.Build.batches)
    monkeypatch.setattr(causes.allocator, "keep_freed", lambda: ran.append("keep_freed"))
    monkeypatch.setattr(causes.train, "main", lambda: ran.append(sys.argv[1:]) or 0)
    monkeypatch.setattr(sys, "argv", ["causes", "clean", str(tmp_path / "notes.json"), "--", "--config", "F"])
    assert causes.main() == 0
    assert ran == ["keep_freed", ["--config", "F"]]


def test_turns_are_traced_behind_the_profile(bench, monkeypatch, tmp_path):
    causes = bench("profiler_causes")
    ran = []
    monkeypatch.setattr(causes.jax.profiler, "start_trace", lambda *_, **__: ran.append("start"))
    monkeypatch.setattr(causes.jax.profiler, "stop_trace", lambda: ran.append("stop"))
    (tmp_path / "collected.json").write_text('{"passes": {"production": {"first_step": 3, "steps": 2}}}')
    profile = types.SimpleNamespace(
        folder=tmp_path,
        begins=lambda step: step == 3,
        begin=lambda: ran.append("own"),
        finish=lambda: ran.append("finish"),
    )
    turns = causes.Turns(profile, 40, 2)  # from step 16: five not traced, five traced, and so on
    began = []
    for step in range(1, 41):
        if turns.begins(step):
            turns.begin()
            began.append(step)
    turns.finish()
    assert began == [3, 16, 21, 26, 31, 36]
    assert ran == ["own", "start", "stop", "start", "stop", "finish"]
    assert json.loads((tmp_path / "collected.json").read_text())["passes"] == {
        "production": {"first_step": 3, "steps": 2},
        "turn_0": {"first_step": 21, "steps": 5},
        "turn_1": {"first_step": 31, "steps": 5},
    }


@pytest.mark.parametrize(
    ("cause", "changes", "met"),
    [
        ("loader", {"data_wait": 0.012 + 0.09}, True),
        ("loader", {"data_wait": 0.012 + 0.13}, False),
        ("loader", {"host_gap": 0.1}, False),
        ("sync", {"host_gap": 0.004 + 0.1}, True),
        ("gather", {"exposed_communication": 0.018 + 0.1}, True),
        ("zeros", {"frequency": 0.048 - 0.0635}, True),
    ],
)
def test_a_cause_is_met_if_it_is_named_with_its_size(bench, cause, changes, met):
    measure = bench("profiler_measure")
    clean, planted = run(measure, CLEAN), run(measure, sample.ledger(noise=0.002, **changes), isolated=0.06)
    gemms = {"clean": {"mhz": 1540.0}, "planted": {"mhz": 1980.0}}
    found = measure.cause(cause, clean, planted, gemms)
    assert found["met"] is met and found["size"]["met"] is met
    assert found["named"] is (cause != "loader" or "data_wait" in changes)
    assert abs(found["planted_seconds"]) == pytest.approx({"zeros": 0.0733}.get(cause, 0.1), rel=0.01)


def test_the_products_rate_is_its_factors(bench):
    """Counted in profiled steps, observed in others."""
    measure = bench("profiler_measure")
    found = measure.split(run(measure, CLEAN))
    assert found["clock"] == {"mhz": 1600.0, "watts": 700.0, "cap_reasons": {"power cap": 1.0}}
    of = CLEAN.window
    assert found["factors"]["found"] == pytest.approx(of.loop_seconds / of.step_seconds - 1)
    assert found["seconds_lost"] == {"frequency": 0.048, "inefficiency": 0.042, "recomputation": 0.025}


def test_a_levers_rate_is_its_factors(bench):
    """40 products of 2 ms each, at 1,464 MHz by both clocks, the device busy for half of the time."""
    clock = bench("profiler_clock")
    gemm = {"kernels": 80, "seconds": 0.16, "span": 0.32, "mhz": 1464.0, "whole_mhz": 1464.0}
    flops = 0.4 * 989.5e12 * 0.080
    found = clock.factored({"tflops": 0.2 * 989.5, "mhz": 1464.0}, gemm, flops, 1.0, "NVIDIA H200")
    assert found["factors"] == pytest.approx({"frequency": 0.8, "cycles": 0.5, "busy": 0.5})
    assert found["product"]["found"] == pytest.approx(0) and found["product"]["met"]
    assert sum(found["seconds_of_a_call"].values()) == pytest.approx(0.080)
    assert clock.factored({"tflops": 1.0, "mhz": None}, gemm | {"mhz": None}, flops, 1.0, "NVIDIA H200") == {}


def test_samples_say_what_held_the_clock_down(bench):
    rows = [(0, 1500.0, 700.0, 0x4), (1, 1600.0, 690.0, 0)]
    found = bench("profiler_measure").capped(rows)
    assert found == {"mhz": 1550.0, "watts": 695.0, "cap_reasons": {"power cap": 0.5}}
    assert bench("profiler_measure").capped([])["mhz"] is None


def test_what_was_not_measured_is_neither_met_nor_missed(bench):
    judged = bench("profiler_measure").judged
    assert judged("closure", -0.03)["met"] is False and judged("closure", -0.01)["met"] is True
    assert judged("closure", None, "why")["met"] is None


def test_the_parsers_memory_is_not_the_benchmarks(bench):
    """Which a process takes over from whoever starts it, as far as Linux counts."""
    measure, own = bench("profiler_measure"), bytearray(512 << 20)
    own[::4096] = bytes(len(own[::4096]))  # all of it is there
    command = [sys.executable, "-c", measure.PEAK, sys.executable, "-c", "raise SystemExit(3)"]
    code, kibibytes = map(int, subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split())
    assert code == 3 and kibibytes < 200 << 10


def test_what_failed_in_part_is_run_again_behind_what_never_ran(bench):
    profiler = bench("profiler")
    run = profiler.Bench.__new__(profiler.Bench)
    failed = {"closure": {"bars": {}}, "gemm": {"error": "no trace"}}
    levers = {"levers": {"bf16": {"tflops": 700.0}, "fp8": {"error": "no kernel"}}}
    compared = {"gemm": {}, "compared": {"error": "no ledger"}}
    skipped = {"skipped": "needs 2 GPUs"}
    rows = {"8layer": failed, "clock": levers, "host_sync": compared, "8layer_fsdp2": skipped, "clean": {}}
    run.record = {"rows": rows}
    names = [*rows, "off"]
    assert run.left(names) == ["8layer_fsdp2", "off", "8layer", "clock"]


def test_gpus_take_each_row_once(bench, monkeypatch):
    """Also where two have looked for another row before either takes it."""
    profiler, both = bench("profiler"), threading.Barrier(2)
    run, ran = profiler.Bench.__new__(profiler.Bench), []
    run.arguments, run.record = types.SimpleNamespace(cpu=False, gpus=2), {"rows": {}}

    def time_left() -> float:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1)
        return 1000.0

    monkeypatch.setattr(profiler, "visible", lambda count: ["0", "1"])
    monkeypatch.setattr(run, "time_left", time_left)
    monkeypatch.setattr(run, "run", lambda name, gpus: ran.append(name))
    monkeypatch.setattr(run, "write", lambda: None)
    run.all(["clean", "host_sync", "off"])
    assert sorted(ran) == ["clean", "host_sync", "off"]


def test_rows_of_several_commits_have_none_in_common(bench, tmp_path):
    profiler = bench("profiler")
    run = profiler.Bench.__new__(profiler.Bench)
    run.output = tmp_path / "found.json"
    for commits, common in ((("a", "a"), "a"), (("a", "b"), None)):
        rows = dict(zip(("clock", "off"), ({"commit": one} for one in commits), strict=True))
        run.record = {"rows": rows}
        run.write()
        assert json.loads(run.output.read_text())["commit"] == common


def test_the_table_has_all_that_has_a_bar(bench):
    bar = {"found": 0.005, "bar": 0.01, "met": True}
    record = {
        "rows": {
            "8layer": {"closure": {"bars": {"other_idle": bar}}},
            "8layer_fsdp2": {"skipped": "needs 2 GPUs, found 1"},
            "host_sync": {"compared": {"top": None, "expected": "host_gap", "size": bar | {"met": False}}},
        },
        "causes": {"met": 0, "of": 6},
    }
    text = bench("profiler_table").table(record)
    assert "| 8layer | other idle | 0.005 | 0.01 | met |" in text
    assert "needs 2 GPUs, found 1" in text and "nothing named for host_gap" in text
    assert text.endswith("Planted causes: 0 of 6.")


def test_causes_that_did_not_run_are_neither_met_nor_missed(bench, tmp_path):
    profiler = bench("profiler")
    run = profiler.Bench.__new__(profiler.Bench)
    run.output = tmp_path / "found.json"
    compared = {"host_sync": {"met": False}, "slow_loader": {"met": True}}
    run.record = {"rows": {name: {"compared": of} for name, of in compared.items()}}
    run.write()
    found = json.loads(run.output.read_text())["causes"]
    assert found["met"] == 1 and found["of"] == 6
    assert found["by_row"] == dict.fromkeys(profiler.CAUSES) | {"host_sync": False, "slow_loader": True}


@pytest.mark.slow
def test_rows_run_on_a_cpu(tmp_path):
    shape = "embed=64 heads=4 kv_heads=2 head_dim=16 mlp=128 vocabulary=8192 layers=1"
    settings = [f"model.{pair}" for pair in shape.split()]
    settings += ["kernels.attention=xla", "data.sequence=64", "precision.compute=float32", "train.rows=4"]
    words = [word for text in settings for word in ("--set", text)]
    words += ["--steps", "5", "2", "16", "--store", str(tmp_path / "store")]

    def measured(name: str, rows: str, *more: str) -> dict:
        """Returns the rows of the record with this name, once the script has run."""
        output = tmp_path / f"{name}.json"
        command = [sys.executable, str(ROOT / "scripts" / "bench" / "profiler.py"), "--cpu", *words]
        command += ["--output", str(output), "--rows", rows, *more]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0, ended.stderr
        record = json.loads(output.read_text())
        assert record["device"]["kind"] == "cpu" and record["versions"] and record["command"]
        return record["rows"]

    rows = measured("found", "clean,slow_loader,8layer_fsdp2,extra_all_gather,8layer_offload,clock,off")
    errors = {name: row["error"] for name, row in rows.items() if "error" in row}
    assert not errors
    assert rows["slow_loader"]["compared"]["named"]  # how near its size is, a busy machine does not tell
    assert rows["extra_all_gather"]["compared"]["planted_seconds"] > 0
    assert rows["8layer_fsdp2"]["closure"]["bars"]["matmul_flops"]["met"]
    assert all("error" not in lever for lever in rows["clock"]["levers"].values())
    assert len(rows["off"]["off"]["step_seconds"]["none"]) == 2
    assert (tmp_path / "found" / "clean" / "profile" / "5" / "report.html").is_file()
    assert not list((tmp_path / "found").rglob("*.xplane.pb"))

    # Read again, a row is what it was, whatever became of the record and the ledger.
    before = measured("kept", "clean", "--keep-traces")["clean"]
    folder, record = tmp_path / "kept" / "clean" / "profile" / "5", tmp_path / "kept.json"
    assert "split" in before and list(folder.rglob("*.xplane.pb"))
    changed = json.loads(record.read_text())
    del changed["rows"]["clean"]["split"]
    changed["rows"]["clean"]["error"] = "no ledger"
    record.write_text(json.dumps(changed))
    ledger = json.loads((folder / "ledger.json").read_text())
    (folder / "ledger.json").write_text("{}")
    assert measured("kept", "clean", "--read-again")["clean"] == before
    assert json.loads((folder / "ledger.json").read_text()) == ledger
    assert list(folder.rglob("*.xplane.pb"))
