"""What the comparison with peers may claim, and that it goes on where it was stopped."""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from runs import ROOT, Workplace, make_workplace

from jaxthru.profile.collect import clocks
from jaxthru.runtime import nvml


def block(contender: str, turn: int, rate: float, **more) -> dict:
    tokens = 1000
    line = {
        "tokens_per_second": rate,
        "step_seconds": tokens / rate,
        "steps_timed": 10,
        "tokens_per_step": tokens,
        "attention_span_per_token": 8,
    }
    return {"contender": contender, "round": turn, "line": line | more}


def rows_of(comparison, blocks: list[dict]) -> dict:
    precision = dict.fromkeys(("own", "peer", "gemm_bf16"), "bf16")
    return comparison.rows(blocks, precision, lambda tokens, span: 1e9 * (tokens + span), 100e12)


@pytest.mark.parametrize(
    ("second", "claimed"), [(1240.0, True), (1000.0, False)], ids=("steady", "as spread as the gain")
)
def test_ratio_is_claimed_only_above_twice_the_spread(bench, second, claimed):
    comparison = bench("comparison")
    blocks = [
        block("own", 1, 1200.0),
        block("peer", 1, 1000.0),
        block("own", 2, second),
        block("peer", 2, 990),
    ]
    found = rows_of(comparison, blocks)
    compared = comparison.ratio(found["own"], found["peer"])
    assert compared["ratio"] == pytest.approx((1200 + second) / 1990)
    assert compared["needed"] == pytest.approx(2 * abs(1200 - second) / ((1200 + second) / 2))
    assert compared["claimed"] is claimed


def test_one_block_claims_nothing(bench):
    comparison = bench("comparison")
    found = rows_of(comparison, [block("own", 1, 2000.0), block("peer", 1, 1000.0)])
    assert comparison.ratio(found["own"], found["peer"]) == {"ratio": 2.0, "needed": None, "claimed": False}


def test_two_equal_blocks_do_not_make_every_difference_a_claim(bench):
    comparison = bench("comparison")
    blocks = [
        block(name, turn, rate) for turn in (1, 2) for name, rate in (("own", 1000.5), ("peer", 1000.0))
    ]
    found = rows_of(comparison, blocks)
    compared = comparison.ratio(found["own"], found["peer"])
    assert found["own"]["spread"] == 0 and compared["needed"] == 2 * comparison.LEAST_SPREAD
    assert not compared["claimed"]


def test_nothing_is_claimed_where_blocks_failed_or_gpus_differ(bench):
    comparison = bench("comparison")
    blocks = [
        block(name, turn, rate) | {"gpu": "GPU-1"}
        for turn in (1, 2)
        for name, rate in (("own", 1500.0), ("peer", 1000.0))
    ]
    found = rows_of(comparison, blocks)
    assert comparison.ratio(found["own"], found["peer"])["claimed"]
    failed = {"contender": "peer", "round": 3, "gpu": "GPU-1", "error": "out of memory"}
    found = rows_of(comparison, [*blocks, failed])
    compared = comparison.ratio(found["own"], found["peer"])
    assert compared["doubts"] == ["1 blocks failed"] and not compared["claimed"]
    found = rows_of(comparison, [*blocks[:3], blocks[3] | {"gpu": "GPU-2"}])
    compared = comparison.ratio(found["own"], found["peer"])
    assert compared["doubts"] == ["different GPUs"] and not compared["claimed"]


def test_a_rate_of_zero_is_none_and_the_table_stands(bench):
    comparison = bench("comparison")
    blocks = [block("own", 1, 1500.0), block("own", 2, 1500.0)]
    nothing = {"tokens_per_second": 0.0, "step_seconds": 1.0}
    blocks += [block("peer", turn, 1.0, **nothing) for turn in (1, 2)]
    found = rows_of(comparison, blocks)
    assert comparison.best_peer(found, ["peer"], "bf16") is None
    lines = comparison.table(found, ["own", "peer"], "peer", ["peer"]).splitlines()
    assert len(lines) == 3 and lines[2].startswith("| own | 1,500 |")


def test_rows_count_needed_flops_and_the_share_of_the_sustained_product(bench):
    comparison = bench("comparison")
    gemm = block("gemm_bf16", 1, 0.0001, tflops=45.0)
    row = rows_of(comparison, [block("own", 1, 1000.0), gemm])["own"]
    # 1e9 × (1000 tokens + their span of 8 each) in one second
    assert row["tflops"] == pytest.approx(9.0)
    assert row["mfu"] == pytest.approx(0.09)
    assert row["share_of_gemm"] == pytest.approx(0.2)


def test_table_shows_claimed_ratios_in_bold(bench):
    comparison = bench("comparison")
    blocks = [
        block(name, turn, rate) for turn in (1, 2) for name, rate in (("own", 1500.0), ("peer", 1000.0))
    ]
    lines = comparison.table(rows_of(comparison, blocks), ["own", "peer"], "peer", ["peer"]).splitlines()
    assert len(lines) == 4
    assert lines[2].endswith("| **1.500** | **1.500** |")


def test_a_step_is_dispatched_before_the_last_is_waited_for(bench):
    timed_loop = bench("timed_loop")
    log = []

    def dispatch():
        log.append(("dispatch", sum(kind == "dispatch" for kind, _ in log)))
        return log[-1][1]

    def finish(number):
        log.append(("finish", number))
        return number

    timing = timed_loop.timed(dispatch, finish, 0.0, 0.0)
    assert log[:4] == [("dispatch", 0), ("dispatch", 1), ("finish", 0), ("dispatch", 2)]
    assert timing.values == list(range(timing.first, timing.first + 3))


def test_whole_cycles_of_batches_are_timed(bench):
    """Packed batches differ: whoever fits one more of the long ones into the seconds would seem slower."""
    timed = bench("timed_loop").timed
    timing = timed(lambda: 0, lambda value: value, 0.0, 0.0, cycle=5)
    assert len(timing.seconds) == 5
    timing = timed(lambda: 0, lambda _: time.sleep(0.02), 0.0, 0.15, cycle=4)
    assert len(timing.seconds) % 4 == 0


def test_the_first_timed_step_begins_where_the_one_before_ended(bench, monkeypatch):
    """What starts sampling the clocks takes time in which the device works."""
    timed_loop = bench("timed_loop")

    class Slow(timed_loop.Clocks):
        def __enter__(self):
            time.sleep(0.2)
            return super().__enter__()

    monkeypatch.setattr(timed_loop, "Clocks", Slow)
    timing = timed_loop.timed(lambda: time.perf_counter(), lambda began: began, 0.0, 0.0, (2, 2))
    assert timing.seconds[0] >= 0.2 > timing.seconds[1]


def test_a_rate_is_all_tokens_over_all_seconds(bench):
    line = bench("timed_loop").Timing([0.1, 0.1, 0.1, 0.3], [0] * 4, [0], 1500.0, None).line(60.0)
    assert line["tokens_per_second"] == 400.0, "of the median step it would be 600"
    assert (line["step_seconds"], line["step_seconds_mean"], line["step_seconds_max"]) == (0.1, 0.15, 0.3)
    assert (line["seconds"], line["steps_timed"]) == ([0.1, 0.1, 0.1, 0.3], 4)
    # So are FLOPs: a slow step is no reason to count fewer.
    block = {"contender": "own", "round": 1, "line": line | {"attention_span_per_token": 1}}
    (row,) = rows_of(bench("comparison"), [block]).values()
    assert row["tflops"] == pytest.approx(0.12 / 0.15) and row["step_milliseconds"] == 100
    assert row["mean_step_milliseconds"] == pytest.approx(150)


def test_what_packed_rows_save_is_of_mean_steps(bench):
    comparison = bench("comparison")
    attention = {"causal_milliseconds": 7.0, "packed_milliseconds": 3.0, "tokens_per_second": 0.0}
    blocks = [
        block("jaxthru", 1, 1000.0),
        block("jaxthru_packed", 1, 1000 / 0.9, step_seconds=0.8),
        block("attention", 1, 1.0, **attention),
    ]
    found = comparison.packed_saving(rows_of(comparison, blocks), blocks, 10)
    assert found["measured_milliseconds"] == pytest.approx(100)
    assert found["measured_over_predicted"] == pytest.approx(2.5)


def test_causal_rows_mask_what_has_no_target(bench):
    harness = bench("harness")
    rows = harness.np.arange(8, dtype="int32").reshape(1, 2, 4)
    tokens, targets, mask = next(harness.causal_batches(rows))
    assert tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert targets.tolist() == [[1, 2, 3, 0], [5, 6, 7, 0]]
    assert mask.tolist() == [[1, 1, 1, 0]] * 2


def test_fp8_is_judged_by_pairs_of_the_same_seed(bench):
    def run(level: float) -> dict:
        return {"losses": [level] * 45, "held_out_loss": level, "skipped_updates": 0}

    seeds = (4.0, 5.0)  # whose own spread is 20 %
    found = bench("measure.fp8_loss").compare([run(x) for x in seeds], [run(4.04), run(5.15)])
    assert found["all_steps"]["by_seed"] == [0.01, 0.03]
    assert found["last_50_steps"]["mean"] == found["held_out"]["mean"] == 0.02
    assert found["all_steps"]["standard_error"] == 0.01
    assert found["curve_of_20_step_means"] == [0.0211, 0.0211]  # of 9.19 over 9
    assert bench("measure.fp8_loss").compare([run(4.0)], [run(4.0)])["all_steps"]["standard_error"] is None


@pytest.mark.parametrize(
    ("words", "settings", "ratio"),
    [
        (
            ["--key", "lora.base", "--set", "lora.rank=2"],
            [("compute", "compute", "auto"), ("fp8", "compute", "auto")],
            "fp8_over_compute",
        ),
        (
            ["--set", "precision.matmul=fp8", "--key", "optim.state", "--values", "float32", "split_master"],
            [("compute", "fp8", "float32"), ("compute", "fp8", "split_master")],
            "split_master_over_float32",
        ),
    ],
)
def test_a_key_of_the_configuration_is_one_and_the_other_in_turn(
    words, settings, ratio, bench, monkeypatch, tmp_path
):
    script, asked = bench("measure.fp8_loss"), []

    def build_step(config, data):
        asked.append((config.lora.base, config.precision.matmul, config.optim.state))
        assert config.train.steps == 40
        return types.SimpleNamespace(evaluation=lambda: None)

    run = lambda *_: {"losses": [4.0] * 40, "held_out_loss": 4.0, "skipped_updates": 0}  # noqa: E731
    monkeypatch.setattr(script, "open_data", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(script, "build_step", build_step)
    monkeypatch.setattr(script, "run", run)
    words = [*words, "--steps", "40", "--seeds", "2"]
    monkeypatch.setattr(sys, "argv", ["fp8_loss.py", *words, "--output", str(tmp_path / "line.json")])
    assert script.main() == 0
    assert asked == settings
    line = json.loads((tmp_path / "line.json").read_text())
    assert line["key"] == words[words.index("--key") + 1] and line[ratio]["held_out"]["mean"] == 0.0


def test_steps_may_be_counted_in_place_of_seconds(bench):
    timing = bench("timed_loop").timed(lambda: 0, lambda value: value, 60.0, 60.0, (2, 5))
    assert (timing.first, len(timing.seconds)) == (2, 5)


class Library:
    """NVML of two GPUs that tell their clock and not their power."""

    NVMLError, NVML_CLOCK_SM = OSError, 1

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):
        return {"a3": 1, "19": 2}[bus_id]

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 1500, 2: 1700}[handle]

    def nvmlDeviceGetPowerUsage(self, handle):
        raise OSError("not supported")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return int(time.perf_counter() * 100) * 10 * (300 + 100 * handle)  # millijoules, in steps of 10 ms


def test_clocks_are_of_all_gpus_and_of_those_that_tell(bench, monkeypatch):
    monkeypatch.setattr(clocks, "nvml", Library)
    monkeypatch.setattr(nvml, "bus_ids", lambda: ("a3", "19"))
    timing = bench("timed_loop").timed(lambda: 0, lambda _: time.sleep(0.1), 0.0, 0.0, (1, 5), gpus=2)
    assert (timing.mhz, timing.watts) == (1600.0, None)
    monkeypatch.setattr(clocks, "nvml", lambda: None)
    timing = bench("timed_loop").timed(lambda: 0, lambda _: None, 0.0, 0.0, (1, 2))
    assert (timing.mhz, timing.watts) == (None, None)


def test_joules_are_those_of_the_counter_between_its_steps(bench, monkeypatch):
    monkeypatch.setattr(nvml, "nvml", Library)
    monkeypatch.setattr(nvml, "bus_ids", lambda: ("a3", "19"))
    with bench("gpu_joules").Energy(2) as used:
        time.sleep(0.5)
    assert used.watts == pytest.approx(450, rel=0.1)  # 400 and 500
    monkeypatch.setattr(nvml, "nvml", lambda: None)
    with bench("gpu_joules").Energy(2) as used:
        pass
    assert used.watts is None


def test_one_timed_step_is_too_few(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["step.py", "--config", "F", "--steps", "2", "1"])
    assert bench("measure.step").main() == 2
    assert "--steps 2 1: of one timed step there is no spread" in capsys.readouterr().err


def test_a_contender_has_two_calls_however_slow_it_is(bench):
    turns = bench("turns")
    times = turns.take({"slow": lambda: time.sleep(0.02), "quick": lambda: 0}, (), 0.01, turn_seconds=0.01)
    assert min(map(len, times.values())) >= 2
    memory = types.SimpleNamespace(temp_size_in_bytes=0)
    assert all(turns.told(of, memory)["milliseconds"] >= 0 for of in times.values())


@pytest.mark.parametrize(
    "script",
    [
        "suite one_gpu",
        "suite offload",
        "suite profiler",
        "measure.profiler_off",
        "measure.attention_saving",
        "measure.step",
    ],
)
def test_bad_settings_are_one_line(bench, script, monkeypatch, capsys, tmp_path):
    name, *words = script.split()
    config = ["--config", str(ROOT / "configs" / "quickstart.py")]
    more = ["--mix", "quickstart", "--output", str(tmp_path), "--commit", "0" * 40] if words else config
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words, *more, "--set", "model.layrs=1"])
    assert bench("harness").run(bench(name).main) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith(f"{name}.py: ") and "model.layrs" in said[0]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "scripts/bench/measure").glob("*.py")), ids=lambda path: path.stem
)
def test_what_measures_finds_the_harness_wherever_it_is_started(path):
    text = path.read_text()
    if "def main(" in text and "\nimport harness" in text:
        before = text.partition("\nimport harness")[0]
        assert "\nsys.path.insert(0, str(Path(__file__).resolve().parents[1]))\n" in before


def test_a_missing_package_is_one_line(bench):
    with pytest.raises(SystemExit, match=r"^\S+: not installed: no_such_package$"):
        bench("harness").need("json", "no_such_package")


def test_a_commit_is_that_of_the_tree_that_runs_or_unknown(tmp_path):
    def git(folder: Path, *words: str) -> str:
        known = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.check_output(["git", "-C", str(folder), *known, *words], text=True).strip()

    def told(tree: Path, package: Path, **environment: str) -> str:
        path = os.pathsep.join([str(tree / "scripts" / "bench"), str(package)])
        command = [sys.executable, "-c", "import harness; print(harness.commit())"]
        keys = {"env": os.environ | {"PYTHONPATH": path} | environment, "cwd": tmp_path, "text": True}
        return subprocess.check_output(command, **keys).strip()

    outer = tmp_path / "outer"
    tree, script = outer / "copy", outer / "copy" / "scripts" / "bench" / "harness.py"
    (tree / "jaxthru").mkdir(parents=True)
    (tree / "jaxthru" / "__init__.py").touch()
    script.parent.mkdir(parents=True)
    for name in (script.name, "gpu_clocks.py"):  # which it imports
        (script.parent / name).write_text((ROOT / "scripts" / "bench" / name).read_text())
    git(tmp_path, "init", str(outer))
    git(outer, "commit", "--allow-empty", "--message", "another project")
    assert told(tree, tree) == "None", "the commit of what a copy lies in"
    git(tree, "init")
    git(tree, "add", ".")
    git(tree, "commit", "--message", "this one")
    head = git(tree, "rev-parse", "HEAD")
    assert told(tree, tree) == head
    assert told(tree, ROOT) == "None", "another tree's jaxthru"
    script.write_text(script.read_text() + "# changed\n")
    assert told(tree, tree) == f"{head}-dirty"
    assert told(tree, tree, JAXTHRU_BENCH_COMMIT=f"0123456789ab {tree}") == "0123456789ab"
    assert told(tree, tree, JAXTHRU_BENCH_COMMIT=f"0123456789ab {ROOT}") == f"{head}-dirty"
    assert told(tree, ROOT, JAXTHRU_BENCH_COMMIT=f"0123456789ab {tree}") == "None"


def test_a_recorded_command_can_be_typed_again(bench, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_b=2")
    monkeypatch.setattr(sys, "argv", ["step.py", "--set", "data.mix=my mix.toml"])
    told = "XLA_FLAGS='--xla_a=1 --xla_b=2' python step.py --set 'data.mix=my mix.toml'"
    assert bench("harness").command() == told


def offloaded(bench, tmp_path, row: str, *done: dict) -> dict:
    """Returns {what a bar is about: met} of a row."""
    row = bench("suites.offload").ROWS[row]
    found = row.found(bench("suites.rows").Setup("0" * 40, tmp_path), [one | {"gpu": None} for one in done])
    return {bar.what: bar.met(found) for bar in row.bars}


def test_offloading_is_judged_by_its_partners(bench, tmp_path):
    def told(name: str, rate: float, gib: float = 64.0) -> dict:
        return block(name, 1, rate, peak_hbm_bytes=gib * 2**30, device={"kind": "NVIDIA H200"})

    own, eager = told("8layer_16k", 2500.0), told("deepspeed_eager_16k", 1250.0)
    # Of two settings of a peer the faster counts.
    assert offloaded(bench, tmp_path, "8layer_16k", own, told("deepspeed_16k", 1000.0)) == {"ratio": True}
    both = offloaded(bench, tmp_path, "8layer_16k", own, told("deepspeed_16k", 1000.0), eager)
    assert both == {"ratio": False}
    assert offloaded(bench, tmp_path, "8layer_16k", own) == {"ratio": None}
    resident = told("8b_16k_resident", 1100.0)
    met = offloaded(bench, tmp_path, "8b_16k", told("8b_16k", 1000.0, 66.0), resident)
    assert met == {"peak_hbm_gib": False, "slower": True}
    met = offloaded(bench, tmp_path, "8b_16k", told("8b_16k", 900.0), resident)
    assert met == {"peak_hbm_gib": True, "slower": False}
    full = {"host_gib": 101.0}
    assert offloaded(bench, tmp_path, "13b", told("13b", 1.0) | full)["host_gib"] is False


def test_one_slow_step_misses_the_bar_of_the_shipped_offload(bench, tmp_path):
    assert bench("suites.offload").ROWS["8b_64k"].steps[1] >= 40

    def judged(*slow: float) -> bool | None:
        done = [
            block("8b_64k", turn, 1.0, step_seconds=7.2, step_seconds_max=seconds)
            for turn, seconds in enumerate(slow, 1)
        ]
        for one in done:
            one["line"]["device"] = {"kind": "NVIDIA H200"}
        return offloaded(bench, tmp_path, "8b_64k", *done)["slowest"]

    assert judged(7.5) and not judged(7.2, 12.1)
    assert bench("suites.offload").slowest([{"step_seconds": 7.2}]) is None and judged() is None


def test_a_loss_falls_if_each_quarter_is_below_the_one_before(bench):
    falls = bench("suites.offload").falls
    assert falls([9.0, 7.0, 5.0, 7.0, 4.0, 4.0, 3.0, 3.0]) == pytest.approx(0.75)  # in a quarter it may rise
    assert falls([9.0, 7.0, 9.0, 8.0, 4.0, 4.0, 3.0, 3.0]) > 1


def test_a_block_that_takes_too_long_is_ended_with_what_it_started(bench):
    command = ["bash", "-c", "sleep 60 & echo waits >&2; wait"]
    found = bench("blocks").run_block(command, "0", limit=0.5)
    assert found["error"] == "took more than 0 s: waits", "what it said last tells where it was"


def test_a_block_ends_with_its_process_though_what_it_started_goes_on(bench):
    began = time.monotonic()
    found = bench("blocks").run_block(["bash", "-c", "sleep 60 & echo '{\"a\": 1}'"], "0", limit=30)
    assert found["line"] == {"a": 1} and time.monotonic() - began < 20


def test_what_ended_a_block_is_told_not_what_cuda_said_afterwards(bench):
    leaking = "E1 cuda_executor.cc:313] [1] Failed to unload module 0x7; leaking"
    gone = "E1127 800 cuda_event.cc:50] CUDA error: Error destroying CUDA event: UNKNOWN ERROR (4)"
    said = ["RESOURCE_EXHAUSTED", *[leaking, gone] * 40]
    found = bench("blocks").run_block(["bash", "-c", f"printf '%s\\n' {shlex.join(said)} >&2; exit 1"], "0")
    assert found["error"] == "exit code 1: RESOURCE_EXHAUSTED"
    found = bench("blocks").run_block(["bash", "-c", f"echo {shlex.quote(said[1])} >&2; exit 1"], "0")
    assert found["error"] == f"exit code 1: {said[1]}", "where it said nothing else"
    found = bench("blocks").run_block(["echo", json.dumps({"reason": said[1]})], "0")
    assert found["line"] == {"reason": said[1]}


def test_a_block_whose_last_line_is_no_result_is_one_that_failed(bench):
    found = bench("blocks").run_block(["echo", "Goodbye!"], "0")
    assert found["error"] == "exit code 0: its last line is not JSON: Goodbye!"


NESTED = """
import sys
import harness
with harness.session(["sh", "-c", 'echo $$ > "$0"; exec sleep 60', sys.argv[1]]) as inner:
    inner.wait()
"""


@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv")
def test_a_block_is_killed_with_the_sessions_that_it_began(bench, tmp_path):
    told = tmp_path / "pid"
    environment = os.environ | {"PYTHONPATH": str(Path(bench("harness").__file__).parent)}
    with bench("harness").session([sys.executable, "-c", NESTED, str(told)], env=environment):
        while not (told.exists() and told.read_text().strip()):
            time.sleep(0.02)
    status = Path(f"/proc/{int(told.read_text())}/status")
    ends = time.monotonic() + 60
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_rows_of_the_offload_benchmark_are_what_their_partners_are(bench, tmp_path):
    setup = bench("suites.rows").Setup("0" * 40, tmp_path)
    rows = bench("suites.offload").ROWS
    for row in rows.values():
        own = setup.config(row, *row.contender(row.own).settings.split())
        assert own.offload.level != "none", "what is measured is offloaded"
        for partner in (row.contender(name) for name in row.against):
            if not partner.peer:
                other = setup.config(row, *partner.settings.split())
                parts = ("train", "data", "model", "remat", "optim")
                assert all(getattr(own, part) == getattr(other, part) for part in parts)
                assert own.offload != other.offload
    assert sum(bool(row.against) for row in rows.values()) == 13
    assert {row.named for name, row in rows.items() if name.startswith("20layer")} == {True}


def test_what_a_peer_of_offload_is_given(bench, monkeypatch, tmp_path):
    rows = bench("suites.rows")
    monkeypatch.setattr(rows.Setup, "file", lambda *_, **__: tmp_path / "rows.npy")
    row, setup = bench("suites.offload").ROWS["8layer_64k"], rows.Setup("0" * 40, tmp_path)
    words = row.command("deepspeed_eager_64k", setup)
    assert words[1:3] == ["-m", "peers.deepspeed_offload"]
    assert words[words.index("--micro-rows") + 1] == "2" and words[words.index("--compile") + 1] == "none"
    assert "offload.level=optimizer" in row.command("8layer_64k", setup)
    assert "offload.level=none" in bench("suites.offload").ROWS["8b_16k"].command("8b_16k_resident", setup)
    steps = bench("suites.offload").ROWS["8b_64k"].command("8b_64k", setup)
    assert steps[steps.index("--steps") + 1 :][:2] == ["3", "40"]


def test_both_starts_are_given_one_cache(bench, monkeypatch, tmp_path, capsys):
    starts, started = bench("measure.starts"), []

    def start(words, environment, run_dir, steps):
        run_dir.mkdir()
        (run_dir / "environment.json").write_text("{}")
        run_dir.with_suffix(".log").write_text("12:00 loss 9\n12:01 start: python 1 s; 2 s in all\n")
        started.append((environment["JAX_COMPILATION_CACHE_DIR"], tuple(words), run_dir, steps))
        row = {"step_seconds": 0.5, "host_gap_seconds": 0.1, "data_wait_seconds": None}
        return 3.0 / len(started), [row | {"host_gap_seconds": 9.0}] * 10 + [row] * (steps - 10)

    monkeypatch.setattr(starts, "start", start)
    monkeypatch.setattr(sys, "argv", ["starts.py", "--config", "F.py", "--steps", "12"])
    assert starts.main() == 0
    (cache, words, first, once), (again, same, second, steps) = started
    assert (cache, words) == (again, same) and first != second and (once, steps) == (2, 12)
    line = json.loads(capsys.readouterr().out)
    assert line["seconds_to_first_step"] == {"first": 3.0, "second": 1.5}
    assert line["parts"] == dict.fromkeys(("first", "second"), "python 1 s; 2 s in all")
    assert (line["steps_counted"], line["host_gap"], line["data_wait"]) == (2, 0.2, 0)


def small_data(folder: Path) -> tuple[str, str]:
    """Returns the settings of data that is prepared in no time."""
    make_workplace(folder)
    return f"data.mix={folder / 'mix.toml'}", f"data.store={folder / 'store'}"


@pytest.mark.slow(minutes=0.3)
def test_two_starts_are_timed(tmp_path):
    settings = ("model.layers=1", "model.vocabulary=320", "train.rows=2", "evaluate.rows=0")
    settings += small_data(tmp_path)
    overrides = [word for text in settings for word in ("--set", text)]
    command = [
        sys.executable,
        str(ROOT / "scripts" / "bench" / "measure" / "starts.py"),
        "--steps",
        "12",
        *overrides,
    ]
    environment = Workplace(tmp_path).environment() | {"PYTHONPATH": str(ROOT)}
    config = ("--config", str(ROOT / "configs" / "quickstart.py"))
    ended = subprocess.run(
        [*command, *config], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    line = json.loads(ended.stdout)
    assert min(line["seconds_to_first_step"].values()) > 0
    assert line["steps_counted"] == 2 and 0 <= line["host_gap"] < 1 and 0 <= line["data_wait"] < 1


def test_a_turns_steps_count_once_warm(bench):
    kept = bench("measure.kept_memory")
    steps = [9.0, 0.5, 0.5, 0.3, 0.2, 0.1]  # the first compiles
    assert kept.warmed_up(steps, 1.0) == [0.3, 0.2, 0.1]
    turns = [{"step_seconds": steps, "page_faults": 7, "peak_bytes": 11}] * 2
    turns += [{"step_seconds": [9.0, 1.0, 0.3, 0.3, 0.4], "page_faults": 8, "peak_bytes": 12}]
    found = kept.told(turns, 1.0)
    assert found["step_seconds_by_turn"] == [0.2, 0.2, 0.3] and found["spread"] == pytest.approx(0.5)
    assert found["page_faults"] == [7, 7, 8] and found["peak_bytes"] == [11, 11, 12]
    with pytest.raises(SystemExit, match="too few"):
        kept.told(turns, 1.5)
