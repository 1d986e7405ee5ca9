"""The bench of experts: what its rows run and find, and the table of tiles that is made of a record."""

import argparse
import contextlib
import itertools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import hopper_tiles

COMMIT = "0" * 40


@pytest.fixture
def suite(bench):
    return bench("suites.experts")


@pytest.fixture
def setup(bench, tmp_path):
    return bench("suites.rows").Setup(
        COMMIT, tmp_path, suite="experts", records=tmp_path, torch_python="torch"
    )


def block(contender, line):
    return {"contender": contender, "round": 1, "line": line}


def test_calls_stand_beside_dense_ones(suite, setup):
    row = suite.ROWS["calls"]
    of = {
        "mosaic_gpu": {"tflops": 600.0},
        "triton": {"tflops": 500.0},
        "dense": {"tflops": 690.0},
        "tokamax": {"failed": "no kernel"},
        "sizes": {"rows": 1},
        "tokamax_missing": None,
    }
    by_torch = {"torch": {"tflops": 610.0}, "dense": {"tflops": 700.0}}
    done = [
        block("ours", {"contenders": {"up_product": of}}),
        block("torch", {"calls": {"up_product": by_torch, "up_sum": {"failed": "no grouped sum"}}}),
    ]
    found = row.found(setup, done)
    assert found["up_product"] == 600.0 and found["up_product / dense"] == 600 / 690
    assert found["up_product / torch"] == 600 / 610 and "up_product / tokamax" not in found
    assert found["rates"]["up_product"]["torch_dense"] == 700.0
    met = {bar.what: bar.met(found) for bar in row.bars}
    assert met["up_product / dense"] is True and met["up_product / tokamax"] is None
    assert "| up_product | 600.0 | 500.0 | 690.0 | 610.0 | 700.0 |" in row.details(found)


def test_a_layer_takes_the_faster_form_of_each(suite, setup):
    row = suite.ROWS["layers"]

    def rate(forward, both):
        return {"forward": {"tflops": forward}, "both": {"tflops": both}}

    fast, slow = rate(500.0, 450.0), rate(400.0, 350.0)
    fast["both"]["milliseconds"], slow["both"]["milliseconds"] = 16.0, 20.0
    rest = {"router": {"milliseconds": 1.0}, "around": {"milliseconds": 1.6}}
    ours = {"qwen3_30b": {"mosaic_gpu": fast, "triton": slow, "around": rest, "sizes": {}}}
    layers = {"gather": rate(240.0, 210.0), "scatter": {"failed": "…"}}
    found = row.found(
        setup, [block("ours", {"contenders": ours}), block("torch", {"layers": {"qwen3_30b": layers}})]
    )
    assert found["qwen3_30b"] == 450.0 and found["qwen3_30b_forward"] == 500.0
    assert found["qwen3_30b / torch"] == 450 / 210
    assert found["qwen3_30b_around"] == 0.1 and "qwen3_30b / around" not in found
    assert [bar.met(found) for bar in row.bars] == [True, None, True]


def test_balance_is_of_one_state_and_one_text(suite, setup):
    row = suite.ROWS["balance"]
    command = row.command("in_turns", setup)
    named = [after for word, after in itertools.pairwise(command) if word == "--contender"]
    assert named == ["natural", "forced=model.force_load_balancing=true"]
    assert command[command.index("--documents") + 1] == "0" and "--old" not in command
    assert row.refuses(setup) == "" and [each.name for each in row.wanted([])] == ["in_turns"]
    of = {"tokens_per_second": 50_000.0, "spread": 0.002, "expert_load_max": 1.5}
    line = {"contenders": {"natural": of | {"ratio": 1.0}, "forced": of | {"ratio": 1.02}}}
    found = row.found(setup, [block("in_turns", line)])
    assert found["apart"] == pytest.approx(0.02) and [bar.met(found) for bar in row.bars] == [True]
    assert "| forced | 50,000 | 1.0200 | 1.50 | 0.20% |" in row.details(found)
    line["contenders"]["forced"]["ratio"] = 0.96
    assert [bar.met(row.found(setup, [block("in_turns", line)])) for bar in row.bars] == [False]
    assert row.bars[0].met(row.found(setup, [])) is None


def test_states_are_compared_by_pairs_of_runs_of_a_seed(bench, suite, setup, monkeypatch):
    script, ran = bench("measure.experts_state_loss"), []

    def run(built, evaluation, seed):
        ran.append((built, seed))
        loss = 4.0 + seed + (0.001 * (4.0 + seed) if built == "int8" else 0.0)
        return {"losses": [loss] * 40, "held_out_loss": loss, "skipped_updates": 0}

    class Build(str):
        evaluation = staticmethod(lambda: None)

    def build_step(config, data):
        assert config.train.steps == 40 and config.offload.layered == ("int8" in config.optim.state)
        return Build("int8" if "int8" in config.optim.state else "float32")

    monkeypatch.setattr(script, "open_data", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(script, "build_step", build_step)
    monkeypatch.setattr(script.fp8_loss, "run", run)
    options = {"config": script.__file__, "overrides": [], "steps": 40, "seeds": 4}
    line = script.measure(argparse.Namespace(**options, stop_after=float("inf")))
    assert ran == [(name, seed) for seed in range(4) for name in ("float32", "int8")]
    assert 0.3e9 < line["active_parameters"] < 0.5e9 and line["seeds"] == 4
    row = suite.ROWS["state_loss"]
    found = row.found(setup, [block("seeds", line)])
    assert found["apart"] == pytest.approx(0.001) and row.bars[0].met(found) and row.named
    assert "| held_out | +0.10% | 0.00% |" in row.details(found)
    remarks = bench("comparison").remarks
    assert remarks([block("seeds", line) | {"gpu": "GPU-1"}]) == []
    line["skipped_updates"]["int8"] = [0, 1]
    assert remarks([block("seeds", line) | {"gpu": "GPU-1"}]) == [
        "seeds skipped updates: a loss or a gradient was not finite."
    ]
    assert script.measure(argparse.Namespace(**options, stop_after=0.0))["seeds"] == 1, "whole pairs"
    assert row.command("seeds", setup)[2:] == ["--set", "data.mix=quickstart", "--stop-after", "400"]


def test_rows_take_the_tiles_that_were_found(suite, setup, bench):
    command = suite.ROWS["calls"].command("ours", setup)
    assert command[1:] == [
        str(bench("blocks").HERE / "measure" / "kernel.py"),
        "grouped_matmul",
        "--shape",
        "qwen3_30b",
    ]
    table = sys.modules["suites.expert_products"].table_of(setup)
    table.parent.mkdir()
    table.write_text("{}")
    assert suite.ROWS["layers"].command("ours", setup)[-2:] == ["--table", str(table)]
    assert suite.ROWS["layers"].command("torch", setup) == [
        "torch",
        "-m",
        "peers.torch_experts",
        "--part",
        "layers",
    ]
    assert suite.ROWS["tiles"].refuses(setup) == ""
    shell = suite.ROWS["tiles"].command("ours", setup)[-1]
    assert "kernel.py grouped_matmul --shape qwen3_30b --tiles" in shell and shell.endswith(
        f"--table {table}"
    )


@pytest.mark.slow
def test_every_call_lowers_for_hopper_and_has_tiles_to_try(bench):
    grouped, struct = bench("measure.kernels.grouped_matmul"), jax.ShapeDtypeStruct
    for name in grouped.GROUPS["qwen3_30b"]:
        case = grouped.SHAPES[name]
        (rows, columns, results, groups), bfloat16 = case.of[:4], jnp.bfloat16
        x, dy = (struct((rows, width), bfloat16) for width in (columns, results))
        w = struct((groups, columns, results), bfloat16)
        into = struct(w.shape, jnp.float32) if case.call == "into" else None
        with dispatch.assumed("gpu"):
            traced = jax.jit(grouped.call(case, "mosaic_gpu")).trace(
                into, x, w, dy, struct((groups,), jnp.int32)
            )
            assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 1
        assert len(grouped.tiles(case)) == len(hopper_tiles.candidates(grouped.problem_of(case))) >= 3


def record_of(bench, shape="up_product"):
    grouped = bench("measure.kernels.grouped_matmul")
    first, second, third, *_ = hopper_tiles.candidates(grouped.problem_of(grouped.SHAPES[shape]))
    found = {
        "triton": {"milliseconds": 1.5, "apart_from_triton": 0.0},
        "dense": {"milliseconds": 1.1},
        grouped.name_of(first): {"milliseconds": 1.3, "apart_from_triton": 1e-3},
        grouped.name_of(second): {"milliseconds": 1.2, "apart_from_triton": 0.3},  # wrong
        grouped.name_of(third): {"failed": "no room"},
        "sizes": {"rows": 1},
    }
    record = {"benchmark": "grouped_matmul", "shape": "qwen3_30b", "contenders": {shape: found}}
    return record | {"device": {"kind": "NVIDIA H200", "count": 1}}, first, grouped


def test_the_fastest_tiles_that_are_right_make_the_table(bench, monkeypatch, capsys, tmp_path):
    script = bench("measure.experts_tiles")
    record, first, grouped = record_of(bench)
    (tmp_path / "cases.json").write_text(json.dumps(record))
    table = tmp_path / "tile_table.json"
    monkeypatch.setattr(
        sys, "argv", ["experts_tiles.py", str(tmp_path / "cases.json"), "--table", str(table)]
    )
    assert script.main() == 0
    ((key, entry),) = json.loads(table.read_text())["NVIDIA H200"].items()
    assert hopper_tiles.Tiles(**entry.pop("tiles")) == first
    assert entry == {"microseconds": 1300.0, "others": {"triton": 1500.0}, "faster": True}
    assert key == "matmul/128/131072x2048x1536"
    line = json.loads(capsys.readouterr().out)
    assert line["entries"] == json.loads(table.read_text()) and line["device"] == record["device"]
    # What was written is what the kernel then follows.
    monkeypatch.setattr(hopper_tiles, "TABLE", {})
    grouped.use_table(table)
    problem = grouped.problem_of(grouped.SHAPES["up_product"])
    assert hopper_tiles.choose(problem, "NVIDIA H200") == (first, True)


@pytest.mark.parametrize(
    "record, said",
    [
        ({"benchmark": "attention"}, "no record of `kernel.py grouped_matmul`"),
        (
            {"benchmark": "grouped_matmul", "shape": "qwen3_30b", "contenders": {"up_sum": {"triton": {}}}},
            "has no tiles that ran; measure it with --tiles",
        ),
    ],
)
def test_other_records_are_refused(bench, monkeypatch, tmp_path, record, said):
    script = bench("measure.experts_tiles")
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(record))
    monkeypatch.setattr(sys, "argv", ["experts_tiles.py", str(path), "--table", str(tmp_path / "t.json")])
    with pytest.raises(bench("measure.experts_tiles").InputError, match=said):
        script.main()
    assert not Path(tmp_path / "t.json").exists()


def test_float8_is_set_beside_bfloat16_by_model(suite, setup):
    rates = {
        f"float8_mixtral_{way}_{call}": {"mosaic_gpu": 500.0, "triton": 400.0, "dense": 900.0}
        | ({"float8 a": 800.0, "float8 b": 1000.0} if call != "sum" else {})
        for way in ("up", "down")
        for call in ("product", "turned", "sum")
    }
    contenders = {shape: {name: {"tflops": rate} for name, rate in of.items()} for shape, of in rates.items()}
    row = suite.ROWS["float8"]
    found = row.found(setup, [block("ours", {"contenders": contenders})])
    assert found["mixtral"] == pytest.approx(1.5)  # 1 + 1 + 1 over 1/2 + 1/2 + 1: sums stay as they are
    assert {bar.what: bar.met(found) for bar in row.bars} == {"mixtral": True, "qwen3_30b": None}


def test_float8_lowers_in_all_its_tiles(bench):
    bench("measure")  # else its namespace, which another test imported, has no parent
    grouped, struct = bench("measure.kernels.grouped_matmul"), jax.ShapeDtypeStruct
    assert len(grouped.GROUPS["float8"]) == 12
    case = grouped.SHAPES["float8_mixtral_down_turned"]
    (rows, columns, results, groups), bfloat16 = case.of[:4], jnp.bfloat16
    x, dy = (struct((rows, width), bfloat16) for width in (columns, results))
    w, sizes = struct((groups, columns, results), bfloat16), struct((groups,), jnp.int32)
    functions = grouped.in_float8(case)
    assert len(functions) >= 3 and not grouped.in_float8(case._replace(call="sum"))
    *_, function = functions.values()
    with dispatch.assumed("gpu"):
        text = jax.jit(function).trace(None, x, w, dy, sizes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1 and "f8E5M2" in text
