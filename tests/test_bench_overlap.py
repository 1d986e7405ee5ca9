"""The suite of overlapped collectives: what runs, what does not, and what its bars make of it."""

import dataclasses
import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxthru.build.attention_choice import mean_document

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def overlap(bench, monkeypatch, tmp_path):
    """Returns a function that runs the suite and returns which rows ran, on which GPUs."""
    suite = bench("suite")
    monkeypatch.setattr(suite, "corpus", lambda: "quickstart")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def drive(*arguments: str, fails=(), ending=560) -> list[tuple[str, str]]:
        ran = []

        def block_of(name, turn, command, gpus, limit):
            assert limit <= ending
            ran.append((name, gpus))
            told = {"error": "it hangs"} if name in fails else {"line": {}}
            return {"contender": name, "round": turn, "gpu": None} | told

        monkeypatch.setattr(suite.blocks, "block_of", block_of)
        module = importlib.import_module("suites.overlap")
        monkeypatch.setattr(module, "measured", lambda said, gpus: {})  # nothing is said here
        given = ["suite.py", "overlap", "--output", str(tmp_path), "--commit", "0" * 40, *arguments]
        monkeypatch.setattr(sys, "argv", given)
        assert suite.main() == 0
        return ran

    return drive


def commands(bench, tmp_path, gpus: int = 2) -> dict[str, str]:
    """Returns what each row runs, as one types it in bash."""
    setup = bench("suites.rows").Setup("0" * 40, tmp_path, overrides=("train.seed=3",), suite="overlap")
    rows = bench("suites.overlap").ROWS
    rows = {name: dataclasses.replace(row, gpus=min(row.gpus, 1) or gpus) for name, row in rows.items()}
    return {name: row.command(name, setup)[2].partition("0.9}; ")[2] for name, row in rows.items()}


def test_what_waits_for_peers_runs_behind_every_safety_row(overlap, tmp_path, bench):
    ran = [name for name, _ in overlap()]
    rows = bench("suites.overlap").ROWS
    last_check = max(ran.index(name) for name, row in rows.items() if row.safety and row.name != "check_all")
    for name, command in commands(bench, tmp_path).items():
        uses = re.search(r"mosaic_gpu|=fused|/(tune_)?collective_matmul(_check)?\.py", command)
        assert rows[name].waits == bool(uses), f"{name} has kernels that wait for peers"
        if rows[name].waits and not rows[name].safety:
            assert ran.index(name) > last_check
    assert "tensor_ring" not in ran
    assert overlap() == [], "finished rows do not run again"


def test_a_failed_check_leaves_out_what_waits_and_no_more(overlap, tmp_path, capsys):
    ran = {name for name, _ in overlap(fails=("check_tiny",))}
    assert {"check_first", "check_tiny", "tensor_ring", "one_gpu", "fsdp", "exposed", "losses_ring"} <= ran
    assert not {"forward", "tensor", "losses_tensor", "backward", "tune", "tuned", "check_all"} & ran
    (failed,) = json.loads((tmp_path / "overlap_check_tiny.json").read_text())["blocks"]
    assert (
        failed["error"] == "it hangs"
        and "forward: left out, check_tiny did not pass" in capsys.readouterr().out
    )
    again = {name for name, _ in overlap("--retry")}  # it passes now
    assert {"check_tiny", "forward", "tensor"} <= again and "fsdp" not in again


def test_a_row_that_hangs_stops_no_other(overlap):
    ran = {name for name, _ in overlap(fails=("tensor",))}
    assert {"forward", "tensor", "tensor_ring", "backward", "losses_tensor"} <= ran


def test_each_gpu_by_itself_or_all_together(overlap):
    ran = overlap()
    assert sorted(gpus for name, gpus in ran if name == "one_gpu") == ["0", "1"]
    assert {gpus for name, gpus in ran if name in ("losses_one", "losses_noise")} == {"0"}
    others = {gpus for name, gpus in ran if name not in ("one_gpu", "losses_one", "losses_noise")}
    assert others == {"0,1"}


def test_four_gpus_where_there_are_four(overlap):
    ran = overlap("--gpus", "4", "--rows", "one_gpu,exposed,losses_one")
    assert sorted(gpus for name, gpus in ran if name == "one_gpu") == ["0", "1", "2", "3"]
    assert ("exposed", "0,1,2,3") in ran and ("losses_one", "0") in ran


def test_nothing_starts_that_would_end_too_late(overlap):
    ran = {name for name, _ in overlap("--stop-after", "100", ending=100)}
    assert "check_first" in ran and "tensor" not in ran and "forward" not in ran


@pytest.mark.parametrize("gpus", [2, 4])
def test_every_command_can_be_typed(gpus, bench, tmp_path, capsys, monkeypatch):
    """Its script exists, and takes each of its options."""
    for command in commands(bench, tmp_path, gpus).values():
        assert "{" not in command.replace("'{}'", "")
        for words in re.findall(r"python (\S+\.py[^>&]*)", command):
            script, *words = shlex.split(words)
            name = ".".join(Path(script).relative_to(bench("blocks").HERE).with_suffix("").parts)
            monkeypatch.setattr(sys, "argv", [script, "--help"])
            with pytest.raises(SystemExit):
                bench(name).main()
            known = capsys.readouterr().out
            assert not [word for word in words if word.startswith("--") and word not in known], command


def test_tiles_that_were_found_are_kept_and_taken(bench, tmp_path):
    """Of an attempt that was cut short too; maybe in another copy of the tree, on another machine."""
    suite, setup = (
        bench("suites.overlap"),
        bench("suites.rows").Setup("0" * 40, tmp_path, suite="s", records=tmp_path),
    )
    table = tmp_path / "tile_table.json"
    suite.TABLE_FILE = table
    table.write_text("old")
    wanted = suite.tune("qkv")(setup, suite.ROWS["tune"])
    assert (
        subprocess.run(["bash", "-c", f"python() {{ echo new >{table}; return 1; }}; {wanted}"]).returncode
        == 1
    )
    assert (setup.kept("tune") / table.name).read_text() == "new\n"
    table.write_text("another machine's")
    taken = suite.ROWS["tuned"].shell(setup, suite.ROWS["tuned"])
    subprocess.run(["bash", "-c", f"python() {{ :; }}; {taken}"], check=True)
    assert table.read_text() == "new\n"


def contenders(**microseconds: float) -> dict:
    rows = {name: {"microseconds": value} for name, value in microseconds.items()}
    return {"contenders": rows, "in_bursts": rows}


def test_bars(bench):
    suite = bench("suites.overlap")
    bars = bench("suites.overlap_bars")
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
        "losses_one": [{"losses": [3.0, 2.0]}],
        "losses_noise": [{"losses": [3.0, 2.1]}],
        "losses_tensor": [{"losses": [3.0, 1.95]}],
    }
    found = suite.measured(said, 2)
    for how in ("in bursts", "without a pause"):
        assert found[f"qkv_forward, over plain, {how}"] == pytest.approx(440 / 300)
        assert found[f"qkv_forward, over JAX's kernel, {how}"] == pytest.approx(310 / 300)
    assert found["tensor"] == 1.1
    assert found["fsdp"] == pytest.approx(96 / 101)  # not in turns
    assert found["exposed"] == 0.04
    assert found["losses_tensor"] == pytest.approx(0.5)
    assert found["losses_ring"] is None
    met = {bar.what: bar.met(found) for row in suite.ROWS.values() for bar in row.bars}
    assert found.keys() == met.keys(), "each has its bar"
    assert (met["exposed"], met["tensor"], met["fsdp"], met["losses_tensor"]) == (False, True, False, True)
    assert met["down_backward, over plain, in bursts"] is False
    assert met["gate_forward, over plain, without a pause"] is None
    # What has been measured before it was tuned counts until then.
    untuned = {"forward": [{"cases": before}]}
    assert bars.kernel(untuned, "qkv_forward", "plain", "in_bursts") == pytest.approx(1.1)


def test_cases_of_a_benchmark_that_was_cut_short_count(bench, tmp_path):
    suite, setup = (
        bench("suites.overlap"),
        bench("suites.rows").Setup("0" * 40, tmp_path, suite="s", records=tmp_path),
    )
    cases = {"cases": {"qkv_forward": contenders(plain=440.0, fused=400.0)}}
    setup.kept("forward").mkdir()
    (setup.kept("forward") / "cases.json").write_text(json.dumps(cases))
    failed = {"contender": "forward", "round": 1, "error": "it hangs"}
    found = suite.ROWS["forward"].found(setup, [failed])
    assert found["qkv_forward, over plain, in bursts"] == pytest.approx(1.1)


def test_every_shape_has_to_be_no_slower_by_default(bench):
    suite = bench("suites.overlap")
    bars = bench("suites.overlap_bars")
    both = ("forward", "backward")
    assert {f"{n}_{way}" for n in suite.ISSUE + suite.NEW + suite.MODEL for way in both} == bars.EVERY

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


def contender(module, seen: list, taken: int = 0):
    """Returns a contender whose steps count, on batches that are numbers."""

    def step(state, batch):
        seen.append((int(state["at"]), batch))
        return {"at": state["at"] + 1}, {"skipped": jnp.int32(0), "loss": jnp.float32(1)}

    step.settled = lambda state: state
    abstract = {"at": jnp.int32(0)}
    of = types.SimpleNamespace(compiled=step, abstract=abstract, first_state=lambda: abstract)
    of.compile_seconds, of.layout = 0.0, MESH
    made = object.__new__(module.Contender)
    made.tree, made.builds, made.taken = module.Tree(module.harness.ROOT), [of], taken
    made.placed, made.tokens = [[number] for number in range(module.BATCHES)], [7] * module.BATCHES
    return made


MESH = types.SimpleNamespace(mesh=types.SimpleNamespace(devices=np.array(["a device"])))


def test_one_state_goes_through_the_steps_of_all_contenders(bench):
    module, seen = bench("measure.steps_in_turns"), []
    first, second = (contender(module, seen) for _ in range(2))
    assert first.layout == second.layout
    states, seconds, tokens, _ = first.turn(first.first_states(), 10)
    assert seen == [(n, n % module.BATCHES) for n in range(10)] and tokens == 70 and seconds > 0
    again, *_ = second.turn(states, 2)
    assert seen[10:] == [(10, 0), (11, 1)] and again[0]["at"] == 12, "from its own first batch on"
    turns = bench("turns")
    taken = zip(([0.5, 0.7], [0.6], [0.5]), (14, 7, 7), (1400.0, 1500.0, None), strict=True)
    line = turns.rated([turns.Turn(*each) for each in taken])
    assert (line["tokens_per_second"], line["steps_timed"]) == (pytest.approx(7 / 0.575, abs=0.1), 4)
    assert (line["step_seconds"], line["step_seconds_mean"]) == (0.55, 0.575)
    assert line["spread"] == pytest.approx((0.6 - 1.7 / 3) / 0.575, abs=1e-4)
    assert (line["sm_clock_mhz"], line["power_watts"]) == (1450.0, None)


def test_every_other_round_may_go_backwards_and_a_warm_up_counts_for_nothing(bench):
    order = []

    def run(name: str, seconds: float) -> tuple[list[float], int, int]:
        order.append(name)
        return [seconds], 10, len(order)

    runs = {name: lambda name=name, of=of: run(name, of) for name, of in (("a", 1.0), ("b", 3.0))}
    found = bench("turns").steps_in_turns(runs, 0.0, 4.0, backwards=True)
    assert order == ["a", "b", "b", "a", "b", "a", "a", "b"], "until the quicker one has its time too"
    assert [turn.last for turn in found["a"]] == [1, 4, 6, 7]
    order.clear()
    cut = bench("turns").steps_in_turns(runs, 0.0, 4.0, backwards=True, ends=time.monotonic())
    assert order == ["a", "b", "b", "a"] and [len(of) for of in cut.values()] == [2, 2], "a spread needs two"
    order.clear()
    waits = {"a": lambda: time.sleep(0.1) or run("a", 1.0)}
    found = bench("turns").steps_in_turns(waits, 0.15, 1.0)
    assert len(order) == 4 and [turn.last for turn in found["a"]] == [3, 4]


def test_who_goes_first_is_no_part_of_the_spread(bench):
    ran = []

    def run(name: str) -> tuple[list[float], int, None]:
        ran.append(name)
        return [1.1 if len(ran) % 2 else 1.0], 10, None  # whoever goes first is slower

    turns = bench("turns")
    found = turns.steps_in_turns(
        {name: lambda name=name: run(name) for name in "ab"}, 0.0, 4.5, backwards=True
    )
    assert [len(of) for of in found.values()] == [8, 8]
    assert all(turns.rated(of)["spread"] == 0 for of in found.values())


def test_a_spread_takes_turns_in_both_orders_and_a_commit_is_held_against_the_other(bench):
    module, seen = bench("measure.steps_in_turns"), []
    made = {name: contender(module, seen) for name in ("first", "way@old", "way")}
    how = {"warmup_seconds": 0.0, "timed_seconds": 0.0, "turn_seconds": 0.0, "steps": 3, "stop_after": 1e9}
    rows = module.measure(made, types.SimpleNamespace(**how))
    assert len(seen) == 3 * (2 + 4 * 3), "a first step, another, and four turns"
    assert all(len(row["turns"]) == 4 and row["steps_timed"] == 12 for row in rows.values())
    assert rows["first"]["ratio"] == 1 and rows["way"]["over_old"]["needed"] >= 0
    assert "over_old" not in rows["way@old"] and rows["way"]["first_step"] == {"loss": 1.0}


def test_a_state_goes_to_a_commit_whose_mesh_has_other_axes(bench):
    module, devices = bench("measure.steps_in_turns"), np.array(jax.devices()[:2])
    new = Mesh(devices.reshape(1, 2, 1, 1), ("data", "fsdp", "expert", "tensor"))
    old = Mesh(devices.reshape(1, 2, 1), ("data", "fsdp", "tensor"))
    leaf = jax.device_put(jnp.arange(8.0), NamedSharding(new, PartitionSpec("fsdp")))
    split, whole = (NamedSharding(old, PartitionSpec(*names)) for names in (("fsdp",), ()))
    wanted, other = (jax.ShapeDtypeStruct((8,), jnp.float32, sharding=of) for of in (split, whole))
    assert module.parts(leaf) == module.parts(wanted) != module.parts(other)
    step = jax.jit(lambda x: x + 1, donate_argnums=0).lower(wanted).compile()
    moved = module.like({"a": leaf}, {"a": wanted})["a"]
    assert moved.sharding == split
    np.testing.assert_array_equal(step(moved), np.arange(1, 9))
    with pytest.raises(AssertionError):
        module.like({"a": jax.device_put(jnp.arange(8.0), split)}, {"a": other})


def test_a_commit_from_before_jaxthru_build_is_built_by_its_own_names(bench, monkeypatch, tmp_path):
    module, tree = bench("commit_trees"), tmp_path / "jaxthru"
    monkeypatch.setattr(sys, "meta_path", module.without_editable(sys.meta_path))
    tree.mkdir()
    (tree / "__init__.py").touch()
    config = "SimpleNamespace(model=SimpleNamespace(vocabulary=9), data=SimpleNamespace(sequence=8), of=more)"
    load = f"from types import SimpleNamespace\ndef load(path, more=()):\n    return {config}\n"
    (tree / "config.py").write_text(load)
    (tree / "train.py").write_text("def build(config, data, devices):\n    return config.of, data.segments\n")
    settings = ["mesh.tensor=2", "kernels.collective_matmul=fused"]
    own, old = Path(module.__file__), module.Tree(tmp_path)
    with old():
        made = old.build(own, settings, 3)
    assert made == (["mesh.tensor=2", "mesh.collective_matmul=fused", "train.steps=1000000"], 3)


def test_random_data_says_how_long_its_documents_are(bench):
    """Attention's choice asks that, on a GPU alone."""
    config = types.SimpleNamespace(
        data=types.SimpleNamespace(sequence=4096), model=types.SimpleNamespace(vocabulary=9)
    )
    assert mean_document(bench("commit_trees").random_data(config, 4)) == 1024


def test_ratios_are_to_the_first_contender_or_to_none(bench, monkeypatch, capsys):
    module = bench("measure.steps_in_turns")
    words = ["--config", "F", "--contender", "none", "--contender", "ring=a.b=c"]
    monkeypatch.setattr(sys, "argv", ["steps_in_turns.py", *words])
    monkeypatch.setattr(sys, "meta_path", sys.meta_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(module.xla, "configure", lambda **_: None)
    monkeypatch.setattr(module, "build_all", lambda *_: ({"ring": None}, {"none": "no memory"}))
    assert module.main() == 2
    assert "--contender none: all ratios are to it, and it cannot run: no memory" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--contender", "ring@old"])
    assert module.main() == 2 and "NAME@old: needs --old" in capsys.readouterr().err


def test_a_suite_of_two_commits_needs_the_other_ones_files(bench, tmp_path):
    rows, setup = bench("suites.commits").ROWS, bench("suites.rows").Setup("0" * 40, tmp_path)
    assert all("--old" in row.refuses(setup) for row in rows.values())
    setup = dataclasses.replace(setup, old=tmp_path)
    words = rows["fsdp"].command("in_turns", setup)
    given = [word for before, word in itertools.pairwise(words) if before == "--contender"]
    assert not rows["fsdp"].refuses(setup) and words[words.index("--old") + 1] == str(tmp_path)
    assert [text.partition("=")[0] for text in given] == [
        *("alone@alone", "alone_kept@alone", "fsdp"),
        *("fsdp_kept@old", "fsdp_kept", "fsdp_copies@old", "fsdp_copies"),
    ]
    of = {"ratio": 1.0, "spread": 0.002, "tokens_per_second": 9.0}
    line = {"contenders": {"a": of | {"over_old": {"ratio": 0.98}}, "b": of | {"over_old": {"ratio": 1.1}}}}
    found = rows["fsdp"].found(setup, [{"contender": "in_turns", "round": 1, "line": line}])
    assert (found["of_old"], found["spread"]) == (0.98, 0.002) and not rows["fsdp"].bars[0].met(found)
    seconds = {"old": (9.0, 8.0), "new": (9.0, 8.4)}
    done = [
        {"contender": side, "round": turn, "line": {"compile_seconds": of, "peak_device": 100}}
        for side, both in seconds.items()
        for turn, of in enumerate(both, 1)
    ]
    found = rows["compile_8layer"].found(setup, done)
    assert (found["compile_seconds_ratio"], found["peak_device_ratio"]) == (1.05, 1.0)


@pytest.mark.slow(minutes=0.3)
def test_rows_run_on_a_cpu(tmp_path):
    command = [sys.executable, "scripts/bench/suite.py", "overlap", "--output", str(tmp_path), "--tiny"]
    rows = ["--rows", "check_first,check_tiny,forward", "--commit", "0" * 40]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, *rows], cwd=ROOT, env=environment, check=True)
    (forward,) = json.loads((tmp_path / "overlap_forward.json").read_text())["blocks"]
    assert {"ring", "plain"} <= set(forward["line"]["cases"]["tiny_gather_forward"]["contenders"])
    assert (tmp_path / "overlap_forward" / "cases.json").exists()
