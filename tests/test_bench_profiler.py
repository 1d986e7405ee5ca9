"""The profiler's own benchmark: that its rows can run, and what it makes of what it measures."""

import dataclasses
import json
import math
import subprocess
import sys
import types
from pathlib import Path

import pytest
from runs import ROOT, make_workplace

from jaxthru import config as configuration
from jaxthru import train
from jaxthru.build import compiled
from jaxthru.profile.account import ledger
from jaxthru.profile.collect import clocks
from jaxthru.profile.read.xplane import Event, Trace

sys.path.insert(0, str(ROOT / "tests" / "profile"))
import sample


@pytest.fixture
def setup(bench, tmp_path):
    return bench("suites.rows").Setup(
        "0" * 40, tmp_path, mix="quickstart", suite="profiler", records=tmp_path
    )


def test_each_row_has_a_configuration_that_is_possible(bench, setup):
    suite, planted, measure = map(bench, ("suites.profiler", "measure.planted", "measure.profiler"))
    assert len([row for row in suite.ROWS.values() if row.against]) == 6
    for name, row in suite.ROWS.items():
        words = row.command(name, setup)
        assert Path(words[words.index(sys.executable) + 1]).is_file()
        settings = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
        config = configuration.load(ROOT / "configs" / f"{row.config}.py", settings)
        if row.script:
            continue
        at, steps, total = row.steps
        assert config.profile.at == at and config.train.steps == total
        # Two passes, each with the step that ends it, and the steps behind a trace that do not count.
        others = (2 * row.turns + 1) * planted.Turns.STEPS if row.turns else 0
        assert total - others > at + 2 * (steps + 1) + 3 + 3
        assert row.cause in (*planted.CAUSES, "remat")
        if row.against:
            assert row.cause in measure.EXPECTED
            assert list(suite.ROWS).index(row.against) < list(suite.ROWS).index(name)
            clean = suite.ROWS[row.against]
            assert (row.gpus, row.steps[0], row.steps[2]) == (clean.gpus, clean.steps[0], clean.steps[2])
    assert {row.cause for row in suite.ROWS.values() if row.against} == set(measure.EXPECTED)


def test_what_is_asked_of_a_run_is_what_its_bars_need(bench, setup):
    suite = bench("suites.profiler")
    asked = {
        name: set(row.command(name, setup)) & {"--closes", "--split"} for name, row in suite.ROWS.items()
    }
    assert asked["8layer"] == {"--closes", "--split"} and asked["host_sync"] == set()
    assert (asked["slow_loader"], asked["zero_operands"]) == ({"--closes"}, {"--split"})
    words = suite.ROWS["cpu_quickstart_given_back"].command("cpu_quickstart_given_back", setup)
    assert words[:3] == ["env", "JAX_PLATFORMS=cpu", "MALLOC_PERTURB_=0"] and "--one-batch" not in words
    measured = bench("measure.profiler")
    bars = {bar.what for bar in suite.CLOSES + suite.SPLIT + suite.CAUSE}
    assert bars - {"named"} == set(measured.BARS), "each figure that has a bar is in the table"


def test_a_loop_without_hooks_calls_no_profiler(bench):
    off = bench("measure.profiler_off")
    loop = off.without_hooks(train.train)
    with_, without = train.train.__code__, loop.__code__
    assert "profile" in with_.co_cellvars
    assert "profile" not in (*without.co_varnames, *without.co_cellvars)
    assert {"compiled", "dispatched", "waiting"} <= set(without.co_names)
    assert set(with_.co_names) - set(without.co_names) <= {
        *(
            "PROFILE",
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
        *("between_steps", "note"),
    }


def product(start: int, end: int, name: str = "nvjet_tst_128x128") -> Event:
    return Event("0", "Stream #1", name, start, end)


def test_clock_of_products_is_counted_within_them(bench):
    counters = {
        "0": {"GPC Clock Frequency (Hz)": [(5, 1e9), (15, 1.5e9), (25, 1.9e9), (45, 1.7e9), (60, 1e9)]}
    }
    trace = Trace([product(10, 20), product(20, 30, "loop_add"), product(40, 50)], [], counters, 0)
    found = bench("measure.profiler").gemm_clock(trace)
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
    found = closed(bench("measure.profiler"), monkeypatch, wrong=wrong, tracing=tracing, turns=turns)
    bars = found["bars"]
    assert bars["same_steps"]["found"] == pytest.approx(wrong - 1)
    assert bars["same_steps"]["met"] is (wrong == 1)
    assert bars["closure"]["found"] == pytest.approx(wrong * tracing - 1, abs=0.005)
    assert bars["closure"]["met"] is (round(wrong * tracing, 6) == 1)
    assert found["profiled_loop_seconds"] == pytest.approx(drifting(254)[25] * tracing, rel=0.01)


def test_turns_that_are_slow_together_count_as_one(bench, monkeypatch):
    """Each half of a run agrees within itself; how far the halves are apart says how well both are known."""
    measure = bench("measure.profiler")
    monkeypatch.setattr(measure.Run, "slowed", lambda run: [0.01] * 10 + [0.05] * 10)
    found = closed(measure, monkeypatch, wrong=1, tracing=1, turns=0)
    assert found["standard_error"] == pytest.approx(0.02)
    monkeypatch.setattr(measure.Run, "slowed", lambda run: [0.01] * 10)
    assert closed(measure, monkeypatch, wrong=1, tracing=1, turns=0)["standard_error"] is None


def test_a_planted_run_keeps_memory_as_any_other_does(bench, monkeypatch, tmp_path):
    causes, ran = bench("measure.planted"), []
    for kind in (compiled.CompiledStep, compiled.DispatchedStep):
        monkeypatch.setattr(kind, "__call__", kind.__call__)  # which the script replaces
    monkeypatch.setattr(train.Build, "batches", train.Build.batches)
    monkeypatch.setattr(causes.allocator, "keep_freed", lambda: ran.append("keep_freed"))
    monkeypatch.setattr(causes.train, "main", lambda: ran.append(sys.argv[1:]) or 0)
    monkeypatch.setattr(sys, "argv", ["causes", "clean", str(tmp_path / "notes.json"), "--", "--config", "F"])
    assert causes.main() == 0
    assert ran == ["keep_freed", ["--config", "F"]]


def test_turns_are_traced_behind_the_profile(bench, monkeypatch, tmp_path):
    causes = bench("measure.planted")
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
    measure = bench("measure.profiler")
    clean, planted = run(measure, CLEAN), run(measure, sample.ledger(noise=0.002, **changes), isolated=0.06)
    gemms = {"clean": {"mhz": 1540.0}, "planted": {"mhz": 1980.0}}
    found = measure.cause(cause, clean, planted, gemms)
    assert found["met"] is met and found["size"]["met"] is met
    assert found["named"] is (cause != "loader" or "data_wait" in changes)
    assert abs(found["planted_seconds"]) == pytest.approx({"zeros": 0.0733}.get(cause, 0.1), rel=0.01)


def test_the_products_rate_is_its_factors(bench):
    """Counted in profiled steps, observed in others."""
    measure = bench("measure.profiler")
    found = measure.split(run(measure, CLEAN))
    assert found["clock"] == {"mhz": 1600.0, "watts": 700.0, "cap_reasons": {"power cap": 1.0}}
    of = CLEAN.window
    assert found["factors"]["found"] == pytest.approx(of.loop_seconds / of.step_seconds - 1)
    assert found["seconds_lost"] == {"frequency": 0.048, "inefficiency": 0.042, "recomputation": 0.025}


def test_a_levers_rate_is_its_factors(bench):
    """40 products of 2 ms each, at 1,464 MHz by both clocks, the device busy for half of the time."""
    clock = bench("measure.levers")
    gemm = {"kernels": 80, "seconds": 0.16, "span": 0.32, "mhz": 1464.0, "whole_mhz": 1464.0}
    flops = 0.4 * 989.5e12 * 0.080
    found = clock.factored({"tflops": 0.2 * 989.5, "mhz": 1464.0}, gemm, flops, 1.0, "NVIDIA H200")
    assert found["factors"] == pytest.approx({"frequency": 0.8, "cycles": 0.5, "busy": 0.5})
    assert found["product"]["found"] == pytest.approx(0) and found["product"]["met"]
    assert sum(found["seconds_of_a_call"].values()) == pytest.approx(0.080)
    assert clock.factored({"tflops": 1.0, "mhz": None}, gemm | {"mhz": None}, flops, 1.0, "NVIDIA H200") == {}


def test_samples_say_what_held_the_clock_down(bench):
    rows = [(0, 1500.0, 700.0, 0x4), (1, 1600.0, 690.0, 0)]
    found = bench("measure.profiler").capped(rows)
    assert found == {"mhz": 1550.0, "watts": 695.0, "cap_reasons": {"power cap": 0.5}}
    assert bench("measure.profiler").capped([])["mhz"] is None


def test_what_was_not_measured_is_neither_met_nor_missed(bench):
    judged = bench("measure.profiler").judged
    assert judged("closure", -0.03)["met"] is False and judged("closure", -0.01)["met"] is True
    assert judged("closure", None, "why")["met"] is None


def test_the_parsers_memory_is_not_the_benchmarks(bench):
    """Which a process takes over from whoever starts it, as far as Linux counts."""
    measure, own = bench("measure.profiler"), bytearray(512 << 20)
    own[::4096] = bytes(len(own[::4096]))  # all of it is there
    command = [sys.executable, "-c", measure.PEAK, sys.executable, "-c", "raise SystemExit(3)"]
    code, kibibytes = map(int, subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split())
    assert code == 3 and kibibytes < 200 << 10


def test_one_part_that_fails_costs_no_other(bench, monkeypatch):
    script = bench("measure.profiled_run")
    monkeypatch.setattr(script.measured, "closure", lambda run: 1 / 0)
    found = script.parts(run(script.measured, CLEAN), closes=True, split=True)
    assert found["closure"] == {"error": "ZeroDivisionError: division by zero"}
    assert "factors" in found["split"]


def told(row, setup, *lines: dict) -> dict:
    """Returns {what a bar is about: met} of a row whose blocks printed this."""
    found = row.found(setup, [{"contender": row.name, "round": 1, "line": line} for line in lines])
    return {bar.what: bar.met(found) for bar in row.bars}


def test_a_figure_is_held_to_its_bar_by_its_size(bench, setup):
    suite, judged = bench("suites.profiler"), bench("measure.profiler").judged
    bars = {"closure": judged("closure", -0.03), "other_idle": judged("other_idle", 0.001)}
    bars["peak_memory"] = judged("peak_memory", None, "why")
    line = {"closure": {"bars": bars}, "split": {"factors": judged("factors", 0.02)}}
    met = told(suite.ROWS["8layer"], setup, line)
    assert (met["closure"], met["other_idle"], met["peak_memory"], met["factors"]) == (
        False,
        True,
        None,
        True,
    )
    assert set(told(suite.ROWS["8layer"], setup).values()) == {None}
    failed = told(suite.ROWS["8layer"], setup, {"closure": {"error": "no trace"}, "split": {}})
    assert set(failed.values()) == {None}


def test_the_worst_lever_counts_and_hooks_are_held_to_noise(bench, setup):
    suite, judged = bench("suites.profiler"), bench("measure.profiler").judged
    levers = {name: {"product": judged("factors", of)} for name, of in (("bf16", 0.01), ("fp8", -0.05))}
    assert told(suite.ROWS["clock"], setup, {"levers": levers}) == {"factors": False}
    assert told(suite.ROWS["clock"], setup, {"levers": levers | {"zeros": {"error": "x"}}}) == {
        "factors": None
    }
    for change, met in ((-0.003, True), (0.005, False)):
        off = {"change": change, "spread": 0.002, "bar": 0.004}
        assert told(suite.ROWS["off"], setup, {"off": off}) == {"beyond_noise": met}


@pytest.mark.parametrize(
    ("named", "error", "met"), [(True, -0.1, [True, True]), (False, None, [False, None])]
)
def test_a_planted_run_is_compared_once_the_clean_one_is_there(bench, setup, monkeypatch, named, error, met):
    suite, row, opened = bench("suites.profiler"), bench("suites.profiler").ROWS["host_sync"], []
    judged = bench("measure.profiler").judged

    def cause(name, clean, planted, gemms):
        opened.append((name, clean.name, planted.name, gemms["clean"]["mhz"], gemms["planted"]["mhz"]))
        return {"named": named, "size": judged("planted", error, "not named")}

    monkeypatch.setattr(suite.measured, "opened", lambda path: path)
    monkeypatch.setattr(suite.measured, "cause", cause)
    assert list(told(row, setup, {}).values()) == [None, None], "the clean run is missing"
    clean = {"contender": "clean", "round": 1, "line": {"gemm": {"mhz": 1500.0}}}
    setup.path("clean").write_text(json.dumps({"blocks": [clean]}))
    assert list(told(row, setup, {}).values()) == met
    assert opened == [("sync", "profiler_clean", "profiler_host_sync", 1500.0, None)]


@pytest.mark.slow(minutes=2)
def test_rows_run_on_a_cpu(tmp_path):
    environment = make_workplace(tmp_path).environment() | {"PYTHONPATH": str(ROOT)}
    mix = tmp_path / "mix.toml"  # with as many tokens as the models have: FLOPs count those that there are
    mix.write_text(mix.read_text().replace("300\n", "8192\n").replace("00_000", "000_000"))
    script = str(ROOT / "scripts" / "bench" / "suite.py")

    def measured(rows: str) -> dict[str, dict]:
        """Returns the records of rows, once they have run."""
        command = [sys.executable, script, "profiler", "--tiny", "--commit", "0" * 40]
        command += ["--mix", str(mix)]
        command += ["--output", str(tmp_path), "--rows", rows]
        for setting in (
            "kernels.attention=xla",
            "precision.compute=float32",
            f"data.store={tmp_path / 'store'}",
        ):
            command += ["--set", setting]
        ended = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900
        )
        assert ended.returncode == 0, ended.stderr
        return {row: json.loads((tmp_path / f"profiler_{row}.json").read_text()) for row in rows.split(",")}

    records = measured("clean,slow_loader,clock,off")
    lines = {row: record["blocks"][0].get("line", record["blocks"][0]) for row, record in records.items()}
    assert not [of["error"] for of in lines.values() if "error" in of]
    assert all(record["device"]["kind"] == "cpu" and record["versions"] for record in records.values())
    found = {row: record["found"] for row, record in records.items()}
    assert found["slow_loader"]["named"] == 1  # how near its size is, a busy machine does not tell
    assert all("error" not in lever for lever in lines["clock"]["levers"].values())
    assert len(lines["off"]["off"]["step_seconds"]["none"]) == 2
    folder = tmp_path / "profiler_clean" / "profile" / "5"
    assert (folder / "report.html").is_file() and not list(folder.rglob("*.xplane.pb"))

    # Read again, a run is what it was, whatever became of its ledger.
    def once(*more: str) -> dict:
        words = [word for word in records["clean"]["blocks"][0]["command"].split() if word != "python"]
        words = words[next(at for at, word in enumerate(words) if word.endswith("profiled_run.py")) :]
        words[0] = str(ROOT / "scripts" / "bench" / "measure" / "profiled_run.py")
        ended = subprocess.run([sys.executable, *words, *more], env=environment, cwd=tmp_path,
                               capture_output=True, text=True, timeout=600)  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])

    before = once("--keep-traces")
    ledger = (folder / "ledger.json").read_text()
    assert "split" in before and list(folder.rglob("*.xplane.pb"))
    (folder / "ledger.json").write_text("{}")
    again = once("--read-again")
    assert again["split"] == before["split"] and list(folder.rglob("*.xplane.pb"))
    assert json.loads((folder / "ledger.json").read_text()) == json.loads(ledger)
