"""The data plane's benchmarks on devices: what they predict, what they count, and that they run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "scripts" / "bench"


def run(script: str, *words: str, devices: int = 1, code: int = 0) -> tuple[dict, str]:
    """Returns what a script printed, as JSON, and what it said beside."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
    }
    config = ("--config", str(ROOT / "configs" / "quickstart.py"), "--set", "model.layers=1")
    seconds = ("--warmup-seconds", "0", "--timed-seconds", "0")
    command = [sys.executable, str(BENCH / script), *config, *seconds, *words]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert ended.returncode == code, ended.stderr
    return json.loads(ended.stdout or "{}"), ended.stderr


def test_coefficients_are_found_and_predict(bench):
    costs = bench("measure.row_costs").Costs
    constant, linear, attention, sequence = 0.02, 1e-5, 2e-10, 32_768
    points = [
        {
            "microbatches": parts,
            "documents": number,
            "seconds": constant + parts * (linear * sequence + attention * sequence**2 / number),
        }
        for parts in (2, 8)
        for number in (1, 2, 16)
    ]
    found = costs.fit(points, sequence)
    values = (found.constant, found.linear, found.attention)
    assert values == pytest.approx((constant, linear, attention), rel=1e-6) and found.residual < 1e-9
    spans = np.array([[1e9, 3e8], [1e8, 2e8]])  # [micro-batches, devices]
    expected = constant + 2 * linear * sequence + attention * (1e9 + 2e8)
    assert found.predict(spans, sequence) == pytest.approx(expected)


@pytest.mark.parametrize("groups", (2, 4, 8))
def test_rows_are_counted_where_the_step_puts_them(bench, groups):
    by_device = bench("measure.row_costs").by_device
    built = tiny.make((2, 1, 1), microbatches=4, groups=groups)
    values = np.arange(tiny.ROWS, dtype=np.int32) ** 2
    rows = np.broadcast_to(values[:, None], (tiny.ROWS, tiny.SEQUENCE))
    placed = jax.device_put(rows, built.layout.sharding(("batch", "sequence")))
    parts = jax.jit(built.step.split)(placed)  # [micro-batches, rows, T]
    found = np.zeros((4, 2), int)
    for shard in parts.addressable_shards:
        device = shard.index[1].indices(parts.shape[1])[0] * 2 // parts.shape[1]
        found[:, device] = np.asarray(shard.data)[:, :, 0].sum(axis=1)
    assert by_device(values, groups, 4, 2).tolist() == found.tolist()


def test_equal_documents_have_their_span_and_no_target_at_their_ends(bench):
    steps = bench("measure.row_costs")
    batch = steps.equal_documents(tiny.batch(0), 4)
    assert batch.keys() == tiny.batch(0).keys()
    assert steps.spans(batch["segment_ids"]).tolist() == [4 * 16**2] * tiny.ROWS
    ends = batch["positions"][0] == 15
    assert ends.sum() == 4 and not batch["loss_mask"][0][ends].any() and batch["loss_mask"].sum() == 60 * 8
    assert np.all(batch["targets"][:, :-1][:, ~ends[:-1]] == batch["tokens"][:, 1:][:, ~ends[:-1]])


def test_summary_counts_the_gain_over_the_predicted(bench):
    steps = bench("measure.balance_steps")
    came, balanced = steps.ORDERS
    predicted = {came: np.array([1.2, 1.2]), balanced: np.array([1.0, 1.0])}
    turn = bench("turns").Turn
    found = {
        came: [turn([1.18, 1.18], 0), turn([1.18, 1.18], 0)],
        balanced: [turn([1.0, 1.0], 0), turn([1.01, 0.99], 0)],
    }
    line = steps.summary(predicted, found)
    assert line["gain"] == 0.18 and line["predicted_gain"] == 0.2 and line["claimed"]
    assert line["gain_over_predicted"] == 0.9
    assert line["prediction_error"] == pytest.approx(0.0169, abs=1e-4)
    row = bench("suites.data").ROWS["balanced_steps"]
    assert [bar.met(line) for bar in row.bars] == [True, True]
    assert not row.bars[0].met(line | {"gain_over_predicted": 0.7})
    done = [{"contender": "steps", "round": 1, "gpu": None, "line": line}]
    found = row.found(bench("suites.rows").Setup(None, Path()), done)
    assert (
        found["contenders"].keys() == {came, balanced}
        and found["prediction_error"] == line["prediction_error"]
    )
    assert f"| {came} | 1.1800 |" in row.details(found)


def test_pieces_go_round_the_text(bench):
    pieces = bench("measure.balance_corpus").pieces
    assert list(pieces("abcde", np.array([3, 4, 0.2, 7]))) == ["abc", "deab", "c", "deabcde"]


def test_grain_rows_become_batches(bench):
    starved = bench("measure.starved")
    tokens = np.arange(12).reshape(2, 6) + 1
    segment_ids = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
    packed = {"tokens": tokens, "tokens_segment_ids": segment_ids, "tokens_positions": np.zeros_like(tokens)}
    batch = starved.complete(packed)
    assert batch["targets"].tolist() == [[2, 3, 0, 5, 0, 0], [8, 9, 10, 11, 12, 0]]
    assert np.array_equal(batch["loss_mask"] > 0, batch["targets"] > 0)


def test_a_starved_run_claims_a_ratio_above_twice_the_spread(bench):
    row, setup = bench("suites.data").ROWS["starved"], bench("suites.rows").Setup(None, Path())
    rates = {"jaxthru": (1000, 1020), "grain": (500, 600), "grain-mp": (990, 1000)}
    done = [
        {
            "contender": name,
            "round": turn,
            "gpu": "0",
            "line": {"tokens_per_second": rate, "data_wait": 0.004},
        }
        for name, both in rates.items()
        for turn, rate in enumerate(both, 1)
    ]
    found = row.found(setup, done)
    ratios = found["ratios"]
    assert ratios["jaxthru / grain"]["claimed"] and not ratios["jaxthru / grain-mp"]["claimed"]
    assert found["data_wait"] == 0.004 and row.bars[0].met(found)
    once = row.found(setup, [block for block in done if block["round"] == 1])
    assert not once["ratios"]["jaxthru / grain"]["claimed"], "one round says nothing of its spread"


def test_one_device_has_nothing_to_balance(tmp_path):
    _, told = run("measure/balance_steps.py", "--folder", str(tmp_path), code=2)
    assert told.splitlines()[-1].startswith("balance_steps.py: 1 device takes all rows: nothing to balance")


@pytest.mark.slow(minutes=0.2)
def test_balanced_steps_are_predicted_and_timed(tmp_path):
    small = ("--set", "data.sequence=256", "--set", "model.vocabulary=2048", "--set", "train.seed=1")
    small += ("--set", "data.packing=best_fit")
    words = ("--tokens", "40000", "--steps", "2", "--microbatches", "4", "--rounds", "5", *small)
    line, _ = run("measure/balance_steps.py", "--folder", str(tmp_path), *words, devices=2)
    assert line["orders"].keys() == {"as they come", "balanced"}
    assert line["predicted_gain"] >= 0 and line["costs"]["linear_cost"] > 0
    assert line["rows"] == 8 and len(line["costs"]["points"]) == 6


@pytest.mark.slow(minutes=0.2)
@pytest.mark.parametrize("of", ("jaxthru", "grain-mp"))
def test_a_starved_run_is_timed(tmp_path, of):
    words = ("--sources", "2", "--pages", "8", "--vocabulary", "1000", "--milliseconds", "1", "--input", of)
    words += ("--set", "model.vocabulary=1024", "--set", "train.rows=2")
    line, _ = run("measure/starved.py", "--folder", str(tmp_path), *words)
    assert line["tokens_per_second"] > 0 and line["input"] == of
    assert 0 <= line["data_wait"] < 1
