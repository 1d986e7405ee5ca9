"""The driver of what GPUs have to show: what runs, what does not, and what its bars make of it."""

import json
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def overlap(bench, monkeypatch):
    """Returns a function that runs the driver with some arguments and returns which rows ran."""
    module, blocks, rows_for = bench("overlap"), bench("blocks"), bench("overlap_rows").rows_for
    real, limits = module.run, []

    def drive(folder: Path, *arguments: str, fails=(), ending=600) -> list[tuple[str, str]]:
        ran, rows = [], rows_for(2, False, "F", [], folder)

        def run(row, devices, tiny, limit):
            limits.append(limit)
            (name,) = [name for name, of in rows.items() if of == row]

            def run_block(command, gpus, limit):
                ran.append((name, gpus))
                return {"error": "it hangs"} if name in fails else {"line": {}}

            monkeypatch.setattr(blocks, "run_block", run_block)
            return real(row, devices, tiny, limit)

        monkeypatch.setattr(module, "run", run)
        monkeypatch.setattr(module, "table", lambda said, devices: "")  # nothing is said here
        arguments = ["overlap.py", "--output", str(folder), "--config", "F", *arguments]
        monkeypatch.setattr(sys, "argv", arguments)
        assert module.main() == 0
        assert max(limits, default=0) <= ending
        return ran

    return drive


def test_what_waits_for_peers_runs_behind_every_safety_row(overlap, tmp_path, bench):
    ran = [name for name, _ in overlap(tmp_path)]
    rows = bench("overlap_rows").rows_for(2, False, "F", [], tmp_path)
    last_check = max(ran.index(name) for name, row in rows.items() if row.safety)
    for name, row in rows.items():
        uses = re.search(r"mosaic_gpu|=fused|/(tune_)?collective_matmul(_check)?\.py", " ".join(row.commands))
        assert row.waits == bool(uses), f"{name} has kernels that wait for peers"
        if row.waits and not row.safety:
            assert ran.index(name) > last_check
    assert "tensor_ring" not in ran
    assert overlap(tmp_path) == [], "finished rows do not run again"


def test_a_failed_check_leaves_out_what_waits_and_no_more(overlap, tmp_path):
    ran = {name for name, _ in overlap(tmp_path, fails=("check_tiny",))}
    assert {"check_first", "check_tiny", "tensor_ring", "one_gpu", "fsdp", "exposed", "losses_ring"} <= ran
    assert not {"forward", "tensor", "losses_tensor", "backward", "tune", "tuned", "check_all"} & ran
    assert json.loads((tmp_path / "check_tiny.json").read_text())["error"] == "it hangs"
    again = {name for name, _ in overlap(tmp_path)}  # it passes now
    assert {"check_tiny", "forward", "tensor"} <= again and "fsdp" not in again


def test_a_row_that_hangs_stops_no_other(overlap, tmp_path):
    ran = {name for name, _ in overlap(tmp_path, fails=("tensor",))}
    assert {"forward", "tensor", "tensor_ring", "backward", "losses_tensor"} <= ran


def test_each_gpu_by_itself_or_all_together(overlap, tmp_path):
    ran = overlap(tmp_path)
    assert sorted(gpus for name, gpus in ran if name == "one_gpu") == ["0", "1"]
    assert sorted(gpus for name, gpus in ran if name == "losses_one") == ["0", "1"]
    assert {gpus for name, gpus in ran if name not in ("one_gpu", "losses_one")} == {"0,1"}


def test_nothing_starts_that_would_end_too_late(overlap, tmp_path):
    ran = {name for name, _ in overlap(tmp_path, "--stop-after", "100", ending=100)}
    assert "check_first" in ran and "tensor" not in ran and "forward" not in ran


@pytest.mark.parametrize("devices", [2, 4])
def test_every_command_can_be_typed(devices, bench, tmp_path, capsys, monkeypatch):
    """Its script exists, and takes each of its options."""
    for row in bench("overlap_rows").rows_for(devices, False, "F", ["a.b=c"], tmp_path).values():
        for command in row.commands:
            for words in re.findall(r"python (\S+\.py[^>&]*)", command):
                script, *words = shlex.split(words)
                monkeypatch.setattr(sys, "argv", [script, "--help"])
                with pytest.raises(SystemExit):
                    bench(Path(script).stem).main()
                known = capsys.readouterr().out
                assert not [word for word in words if word.startswith("--") and word not in known], command


def contenders(**microseconds: float) -> dict:
    rows = {name: {"microseconds": value} for name, value in microseconds.items()}
    return {"contenders": rows, "in_bursts": rows}


def test_bars(bench):
    bars = bench("overlap_bars")
    before, after = {"qkv_forward": contenders(plain=440.0, fused=400.0)}, {}
    after["qkv_forward"] = contenders(plain=440.0, fused=300.0, jax=310.0)
    after["down_backward"] = contenders(plain=100.0, fused=100.0)
    turns = {"none": {"ratio": 1.0}, "ring": {"ratio": 1.05}, "mosaic_gpu": {"ratio": 1.1}}
    rates = {"collectives": 180.0, "copies": 200.0}
    exposed = {"GPU:0": {"exposed_collectives": 0.02}, "GPU:1": {"exposed_collectives": 0.04}}
    said = {
        "forward": [{"cases": before}],
        "tuned": [{"cases": after}],
        "tensor": [{"contenders": turns}],
        "one_gpu": [{"tokens_per_second": 100.0}, {"tokens_per_second": 102.0}],
        "fsdp": [{"contenders": {way: {"tokens_per_second": rate} for way, rate in rates.items()}}],
        "fsdp_few": [{"tokens_per_second": 190.0}],
        "fsdp_copies": [{"tokens_per_second": 192.0}],
        "exposed": [{"devices": exposed}],
        "losses_one": [{"losses": [3.0, 2.0]}, {"losses": [3.0, 2.1]}],
        "losses_tensor": [{"losses": [3.0, 1.95]}],
        "losses_ring": None,
    }
    found = {what: value for what, _, _, value in bars.bars(said, 2)}
    for how in ("in bursts", "without a pause"):
        assert found[f"qkv_forward, over plain, {how}"] == pytest.approx(440 / 300)
        assert found[f"qkv_forward, over JAX's kernel, {how}"] == pytest.approx(310 / 300)
    assert found["step with tensor=2, over the unfused one"] == 1.1
    assert found["tokens/s per GPU with fsdp=2, over one GPU"] == pytest.approx(96 / 101)  # not in turns
    assert found["exposed communication with fsdp=2"] == 0.04
    assert found["losses with tensor=2, fused, over noise"] == pytest.approx(0.5)
    assert found["losses with tensor=2, ring, over noise"] is None
    told = bars.table(said, 2)
    assert "| exposed communication with fsdp=2 | ≤ 0.03 | 0.040 | **missed** |" in told
    assert "| down_backward, over plain, in bursts | ≥ 1.15 | 1.000 | **missed** |" in told
    assert "| gate_forward, over plain, without a pause | ≥ 1.2 |  | not measured |" in told
    # What has been measured before it was tuned counts until then.
    untuned = {"forward": [{"cases": before}]}
    assert bars.kernel(untuned, "qkv_forward", "plain", "in_bursts") == pytest.approx(1.1)


def test_every_shape_has_to_be_no_slower_by_default(bench):
    bars, rows = bench("overlap_bars"), bench("overlap_rows")
    both = ("forward", "backward")
    assert {f"{n}_{way}" for n in rows.ISSUE + rows.UNTUNED + rows.MODEL for way in both} == bars.EVERY

    def said(microseconds: float, left_out: str = "") -> dict:
        cases = {case: contenders(plain=100.0, dispatched=microseconds) for case in bars.EVERY - {left_out}}
        for of in cases.values():
            for one in of["contenders"].values():
                one["a_a_spread"] = 0.005
        return {"tuned": [{"cases": cases}]}

    assert bars.never_slower(said(100.5)) > 1
    assert bars.never_slower(said(102.0)) < 1
    assert bars.never_slower(said(90.0, "qkv_forward")) is None
    assert bars.never_slower(said(102.0, "qkv_forward")) < 1
    assert bars.never_slower({}) is None


def test_one_state_goes_through_the_steps_of_all_contenders(bench):
    module = bench("steps_in_turns")
    batches = iter(range(10**9))
    seen = []

    def step(state, batch):
        seen.append((state, batch))
        return state + 1, {"tokens": jnp.int32(7), "skipped": jnp.int32(0)}

    state, took, values = module.turn(step, 0, batches, 0.0)
    assert seen == [(n, n) for n in range(state)] and len(took) == len(values) == 2
    again, *_ = module.turn(step, state, batches, 0.0)
    assert again == len(seen) == 2 * state
    clocks = [types.SimpleNamespace(mhz=mhz, watts=None) for mhz in (1400.0, 1500.0, None)]
    line = module.told([[0.5, 0.7], [0.6], [0.5]], values, clocks)
    assert (line["tokens_per_second"], line["steps_timed"]) == (pytest.approx(7 / 0.575, abs=0.1), 4)
    assert (line["step_seconds"], line["step_seconds_mean"]) == (0.55, 0.575)
    assert line["spread"] == pytest.approx((0.6 - 1.7 / 3) / 0.575, abs=1e-4)
    assert (line["sm_clock_mhz"], line["power_watts"]) == (1450.0, None)


def test_a_spread_takes_two_turns_however_long_one_is(bench, monkeypatch):
    module = bench("steps_in_turns")
    metrics = {"tokens": jnp.int32(7), "skipped": jnp.int32(0), "loss": jnp.float32(1)}
    of = types.SimpleNamespace(
        compiled=lambda state, batch: (state, metrics), first_state=lambda: 0, compile_seconds=0.0
    )
    monkeypatch.setattr(module, "packed_batches", lambda built: iter(int, 1))
    turns = []
    monkeypatch.setattr(
        module, "turn", lambda *_: (0, [1.0 + 0.1 * len(turns)] * 2, [turns.append(1) or metrics])
    )
    rows = module.measure({"none": of, "ring": of}, 0.0, 0.5, 0.1)
    assert len(turns) == 4 and rows["ring"]["spread"] > 0 and not rows["ring"]["claimed"]


def test_ratios_are_to_the_first_contender_or_to_none(bench, monkeypatch, capsys):
    module = bench("steps_in_turns")
    words = ["--config", "F", "--contender", "none", "--contender", "ring=a.b=c"]
    monkeypatch.setattr(sys, "argv", ["steps_in_turns.py", *words])
    monkeypatch.setattr(module.xla, "configure", lambda **_: None)
    monkeypatch.setattr(module, "build_all", lambda *_: ({"ring": None}, {"none": "no memory"}))
    monkeypatch.setattr(module, "measure", lambda built, *_: {name: {"ratio": 1.0} for name in built})
    assert bench("harness").run(module.main) == 2
    assert "--contender none: all ratios are to it, and it cannot run: no memory" in capsys.readouterr().err


@pytest.mark.slow
def test_rows_run_on_a_cpu(tmp_path):
    command = [sys.executable, "scripts/bench/overlap.py", "--output", str(tmp_path), "--tiny"]
    subprocess.run([*command, "--rows", "check_first,check_tiny,forward"], cwd=ROOT, check=True)
    forward = json.loads((tmp_path / "forward.json").read_text())
    assert {"ring", "plain"} <= set(forward["said"][0]["cases"]["tiny_gather_forward"]["contenders"])
    assert (tmp_path / "collective_matmul_forward.json").exists()
