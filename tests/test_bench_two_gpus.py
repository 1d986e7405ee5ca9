"""The suite of two GPUs: what each row runs, what its bars are about, and how a router is skewed."""

import dataclasses
import json
import re
import shlex
import sys
import threading
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def suite(bench):
    return bench("suites.two_gpus")


@pytest.fixture
def prepared(bench, tmp_path):
    rows = bench("suites.rows")
    made = rows.Setup("0" * 40, tmp_path, suite="two_gpus", records=tmp_path, old=tmp_path)
    (tmp_path / "two_gpus_check.json").write_text(
        json.dumps({"blocks": [{"contender": "check", "round": 1, "line": {}}]})
    )
    return made


def test_every_command_can_be_typed_and_ends_in_time(suite, prepared, bench, monkeypatch):
    """Its scripts exist and take each of its options; what takes turns ends before its row's seconds."""
    monkeypatch.setattr(type(prepared), "file", lambda *_, **__: Path("batches.npz"))
    for name, row in suite.ROWS.items():
        assert not row.refuses(prepared), name
        for contender in dict.fromkeys(block.name for block in row.wanted([])):
            command = shlex.join(row.command(contender, prepared))
            assert "{gpus}" not in command and "{rows}" not in command
            for script in re.findall(r"scripts/bench/(\S+)\.py", command):
                assert (bench("blocks").HERE / f"{script}.py").exists(), script
            if "--stop-after" in command:
                assert 0 < float(command.split("--stop-after ")[1].split()[0].strip("'")) < row.seconds
    assert all(block.seconds <= 560 for row in suite.ROWS.values() for block in row.wanted([]))


def test_kernels_that_wait_for_peers_need_a_check_that_passed(suite, prepared, bench, tmp_path):
    (tmp_path / "two_gpus_check.json").unlink()
    refused = {name for name, row in suite.ROWS.items() if row.refuses(prepared)}
    assert refused == {"tune_model", "tensor", "tune", "tuned", "tuned_scatter"}
    assert {"fsdp"} == {
        n for n, r in suite.ROWS.items() if r.refuses(dataclasses.replace(prepared, old=None))
    } - refused


def test_ratios_are_of_contenders(suite):
    of_pairs = [row for row in suite.ROWS.values() if isinstance(row, suite.Pairs)]
    for row in of_pairs:
        names = {contender.partition("=")[0] for contender in row.contenders}
        assert row.ratios and {name for _, *pair in row.ratios for name in pair} <= names


def test_bars_are_about_what_rows_find(suite, prepared):
    rate = {"tokens_per_second": 90.0, "ratio": 1.0, "spread": 0.001}
    of = {
        "alone@alone": rate | {"tokens_per_second": 100.0},
        "fsdp": rate | {"tokens_per_second": 98.0, "over_old": {"ratio": 1.01}},
        "tensor": rate,
        "tensor_fused": rate | {"tokens_per_second": 99.0, "over_old": {"ratio": 0.98}},
    }
    line = {"contender": "in_turns", "round": 1, "line": {"contenders": of}}
    found = suite.ROWS["fsdp"].found(prepared, [line])
    assert (found["of_one"], found.get("fused")) == (0.98, None)
    assert suite.ROWS["tensor"].found(prepared, [line])["fused"] == pytest.approx(1.1)
    assert [bar.met(found) for bar in suite.ROWS["fsdp"].bars] == [True, False]
    pair = {"contender": "pair", "round": 1, "line": {"tokens_per_second": 190.0}}
    alone = [
        {"contender": "alone", "round": turn, "line": {"tokens_per_second": of}}
        for turn, of in ((1, 99.0), (2, 101.0))
    ]
    found = suite.ROWS["experts_12"].found(prepared, [*alone, pair])
    assert found == {"of_a_gpu": 95.0, "of_one": 0.95, "spread": pytest.approx(0.02)}
    assert suite.ROWS["experts_whole"].found(prepared, [pair]) == {"of_a_gpu": 95.0, "spread": None}
    failed = {"contender": "pair", "round": 1, "error": "out of memory"}
    (less,) = suite.ROWS["experts_whole"].left([failed])
    assert less.name == "smaller" and not suite.ROWS["experts_whole"].left([pair])
    exposed = {"devices": {"GPU:0": {"exposed_collectives": 0.02}}}
    done = [{"contender": "exposed", "round": 1, "line": exposed}]
    assert suite.ROWS["exposed"].bars[0].met(suite.ROWS["exposed"].found(prepared, done))


def test_single_gpus_are_timed_together_and_resident_as_the_pair_is(bench, monkeypatch, tmp_path):
    """Both read one file of batches, which one thread writes."""
    suite, threads, ran = bench("suite"), set(), []

    def file(*_, **__) -> Path:
        threads.add(threading.current_thread())
        return tmp_path / "batches.npz"

    def block_of(name, turn, command, gpu, limit):
        ran.append((name, gpu))
        assert "offload.level=none" in command and "offload.level=auto" not in command
        return {"contender": name, "round": turn, "gpu": None, "line": {"tokens_per_second": 1.0}}

    monkeypatch.setattr(suite.Setup, "file", file)
    monkeypatch.setattr(suite.blocks, "block_of", block_of)
    monkeypatch.setattr(suite, "corpus", lambda: "quickstart")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = ["suite.py", "two_gpus", "--rows", "experts_12", "--output", str(tmp_path), "--commit", "0" * 40]
    monkeypatch.setattr(sys, "argv", words)
    assert suite.main() == 0
    assert sorted(ran) == [("alone", "0"), ("alone", "1"), ("pair", "0,1")]
    assert threads == {threading.main_thread()}


def test_a_router_is_skewed_by_a_bias_on_the_first_devices_experts(bench):
    import jax.numpy as jnp

    module = bench("measure.experts_skew")
    layer = {"moe": {"router": {"weight": jnp.ones((2, 4)), "bias": jnp.zeros(4)}, "bias": jnp.zeros(4)}}
    state = {"step": jnp.int32(3), "params": {"layers": (layer,)}}
    made = module.favoured(state, 2, 0.5)["params"]["layers"][0]["moe"]
    np.testing.assert_array_equal(made["router"]["bias"], [0.5, 0.5, 0, 0])
    assert not made["bias"].any() and (made["router"]["weight"] == 1).all()
    assert module.busiest(np.array([[3, 5, 1, 1], [2, 2, 2, 2]]), 2) == pytest.approx((1.6 + 1.0) / 2)
    tried = []
    share = lambda bias: tried.append(bias) or 1 + np.tanh(40 * bias)  # noqa: E731
    bias, got = module.bias_for(1.6, share)
    assert abs(got - 1.6) < module.NEAR and bias > 0 and len(tried) < 18
