"""The suite of benchmark rows: what is run, what goes on where it was cut short, and which bars are met."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from jaxthru import config as configuration
from jaxthru.models import llama
from jaxthru.runtime.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def line(rate: float, **more) -> dict:
    of_gemm = {"step_seconds": 1000 / rate, "steps_timed": 10, "tokens_per_step": 1000}
    device = {"device": {"kind": "cpu", "count": 1}, "versions": {"jax": "0"}}
    return of_gemm | device | {"tokens_per_second": rate, "attention_span_per_token": 8} | more


def block(name: str, turn: int, rate: float | None, **more) -> dict:
    told = {"error": "out of memory"} if rate is None else {"line": line(rate, **more)}
    return {"contender": name, "round": turn, "gpu": None} | told


def wanted(row, done: list[dict]) -> list[tuple[str, int]]:
    return [(each.name, each.turn) for each in row.left(done)]


@pytest.fixture
def rows(bench):
    return bench("suites.every_shape").ROWS


@pytest.fixture
def setup(bench, tmp_path):
    return bench("suites.rows").Setup(COMMIT, tmp_path, tiny=True)


def test_drawn_shapes_are_a_function_of_the_hash_alone(bench):
    shapes = bench("suites.drawn_shapes").shapes
    fitting, large = shapes(COMMIT)
    assert (fitting, large) == shapes(COMMIT) == shapes(COMMIT[:12]), "a short hash is the same commit"
    assert fitting != shapes("f" + COMMIT[1:])[0]
    assert (len(fitting), len(large)) == (6, 2) and len({each.settings for each in fitting}) == 6
    # As drawn on every machine and by every Python: 2 ** -64 of a hash, nothing of `random`.
    assert fitting[0].settings.startswith("model.layers=20 model.embed=6144 model.heads=48 ")


@pytest.mark.parametrize("commit", [f"{number:012x}" for number in range(0, 2**40, 2**36)])
def test_drawn_shapes_can_be_trained_and_have_the_size_that_is_asked_for(bench, commit):
    for group, (low, high) in zip(
        bench("suites.drawn_shapes").shapes(commit), ((9, 36), (55, 110)), strict=True
    ):
        for drawn in group:
            config = configuration.load(ROOT / "configs" / "llama3_8b_8layer.py", drawn.settings.split())
            assert config.train.rows % config.train.microbatches == 0
            assert llama.parameters(config.model) == pytest.approx(drawn.parameters, rel=1e-3)
            assert 0.94 * low < drawn.parameters / 1e9 < 1.06 * high


def test_a_peer_runs_again_if_it_is_nearly_the_fastest(bench):
    race = bench("suites.race").Race("", "llama3_8b_8layer", against=("hf", "hf_blocks", "hf_flash"))
    assert wanted(race, [])[:2] == [("gemm_bf16", 1), ("jaxthru", 1)]
    done = [block("gemm_bf16", 1, 1.0), block("jaxthru", 1, 1200.0), block("hf", 1, 990.0)]
    done += [block("hf_blocks", 1, 1000.0), block("hf_flash", 1, 970.0)]
    assert wanted(race, done) == [("jaxthru", 2), ("hf", 2), ("hf_blocks", 2)]
    # What the second round says takes no peer out of it, or the first could not be finished.
    assert wanted(race, [*done, block("jaxthru", 2, 1210.0), block("hf_blocks", 2, 500.0)]) == [("hf", 2)]


def test_a_slow_peer_has_one_block_and_the_record_and_the_table_say_so(bench, setup):
    race = bench("suites.race").Race("", "llama3_8b_8layer", against=("hf", "hf_blocks", "hf_flash"))
    done = [block("gemm_bf16", 1, 0.1, tflops=40.0), block("jaxthru", 1, 1200.0), block("hf", 1, 970.0)]
    assert race.once(done) == {}, "nothing is told while the fastest has not run"
    done += [block("hf_blocks", 1, 1000.0), block("hf_flash", 1, None)]
    assert race.once(done) == {"hf": 0.97}
    assert wanted(race, done) == [("jaxthru", 2), ("hf_blocks", 2)]
    found = race.found(setup, [*done, block("jaxthru", 2, 1204.0), block("hf_blocks", 2, 990.0)])
    assert found["once"] == {"hf": 0.97}
    assert race.details(found).endswith("\n\n1 block: hf (0.970 × the fastest)")


def test_what_times_no_step_is_in_the_record_and_no_peer(bench, setup):
    row = bench("suites.one_gpu").ROWS["packed"]
    kernels = {"causal_milliseconds": 7.0, "packed_milliseconds": 3.0}
    done = [block("attention", 1, 1000.0) | {"line": line(1000.0) | {"tokens_per_second": 0.0} | kernels}]
    done += [block("jaxthru_packed", 1, 1100.0), block("jaxthru", 1, 1000.0)]
    found = row.found(setup, done)
    assert found["saving"]["rate_over_causal"] == pytest.approx(1.1)
    assert "packed rows: 1.100 of the causal rate" in row.details(found)


def test_what_a_block_compiles_is_kept_for_the_next(bench, tmp_path, monkeypatch):
    suite = bench("suite")
    for variable in (*suite.CACHES, *suite.KEPT):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setenv("CUDA_CACHE_PATH", "own")
    suite.keep_compiled(tmp_path)
    found = {variable: os.environ[variable] for variable in suite.CACHES}
    assert found.pop("CUDA_CACHE_PATH") == "own"
    assert len(set(found.values())) == len(found) == 4
    assert all(Path(folder).is_relative_to(tmp_path) for folder in found.values())


def test_a_peer_recomputes_only_if_all_that_keep_everything_fail(bench):
    own = ("hf", "hf_blocks", "hf_flash")
    race = bench("suites.race").Race("", "llama3_8b_8layer", against=(*own, "hf_checkpointed"))
    done = [block("gemm_bf16", 1, 1.0), block("jaxthru", 1, 1200.0)]
    some = [block(name, 1, None if name != "hf" else 900.0) for name in own]
    assert ("hf_checkpointed", 1) not in wanted(race, [*done, *some])
    none = [block(name, 1, None) for name in own]
    left = wanted(race, [*done, *none])
    assert left[0] == ("hf_checkpointed", 1) and ("hf", 2) not in left, "what failed is not run again"


def test_a_race_is_judged_by_the_fastest_peer_that_ran_twice(bench, setup):
    rows, races = bench("suites.rows"), bench("suites.race")
    race = races.Race("", "llama3_8b_8layer", "", (rows.times(1.05),), against=("hf", "hf_blocks"))
    done = [block("gemm_bf16", 1, 0.1, tflops=40.0)]
    for name, first, second in (("jaxthru", 1100.0, 1104.0), ("hf", 1000.0, 1004.0)):
        done += [block(name, 1, first), block(name, 2, second)]
    found = race.found(setup, [*done, block("hf_blocks", 1, 950.0)])
    assert (found["fastest_peer"], found["claimed"]) == ("hf", True)
    assert found["ratio"] == pytest.approx(1102 / 1002) and found["spread"] == pytest.approx(4 / 1002)
    assert [bar.met(found) for bar in (rows.times(1.05), rows.times(1.2), rows.rate(1102))] == [
        True,
        False,
        True,
    ]
    assert rows.times(1.05).met(race.found(setup, [])) is None
    # Beside the ratio's peers stand others, which it does not count.
    beside = dataclasses.replace(race, against=("hf",), beside=("hf_blocks",))
    assert beside.found(setup, [*done, block("hf_blocks", 1, 2000.0)])["fastest_peer"] == "hf"


def test_auto_is_held_to_the_fastest_point_and_every_point_has_to_fit(bench, setup):
    grid = bench("suites.grid").Grid("", "llama3_8b_8layer", bars=bench("suites.every_shape").GRID)
    assert len(wanted(grid, [])) == 1 + 2 + 10
    done = [block("auto", 1, 970.0, chosen={"remat.policy": "none"}), block("auto", 2, 990.0)]
    done += [block("none_unroll", 1, 1000.0), block("full_scan", 1, 800.0)]
    done += [{"contender": "none_scan", "round": 1, "line": {"fits": False, "reason": "too large"}}]
    found = grid.found(setup, done)
    assert (found["ratio"], found["fastest_point"], found["unfit"]) == (0.98, "none_unroll", 0)
    assert found["refused"] == {"none_scan": "too large"}, "which the plan did not let pass"
    assert [bar.met(found) for bar in grid.bars] == [False, True]
    failed = grid.found(setup, [*done, block("gate_unroll", 1, None)])
    shown = grid.details(failed).splitlines()[2:]
    assert shown[0] == "| none_unroll | 1,000 |" and shown[2:] == [
        "| none_scan | refused: too large |",
        "| gate_unroll | failed |",
    ]
    assert failed["unfit"] == 1 and not grid.bars[1].met(failed)


@pytest.mark.parametrize(
    ("level", "compiled", "says"),
    [
        ("optimizer", None, "by arithmetic it fits with offload alone"),
        (None, None, "nothing fits"),
        ("none", "optimizer", "as compiled it fits with offload alone"),
        ("none", None, "nothing fits as compiled"),
        ("none", "none", ""),
    ],
)
def test_a_point_that_takes_offload_is_not_timed(bench, monkeypatch, level, compiled, says):
    """level: of the first proposal; compiled: of what was built. None of both where there is none."""
    step, config = bench("measure.step"), configuration.load(ROOT / "configs" / "quickstart.py", [])

    def with_level(level: str, reason: str):
        if level is None:
            raise InputError(reason)
        of = dataclasses.replace(config, offload=dataclasses.replace(config.offload, level=level))
        return types.SimpleNamespace(config=of)

    def proposed(*_):
        yield with_level(level, "nothing fits")

    monkeypatch.setattr(step.choices, "resolve", lambda config: config)
    monkeypatch.setattr(step.choices, "proposed", proposed)
    monkeypatch.setattr(step, "build_step", lambda *_: with_level(compiled, "nothing fits as compiled"))
    built, why = step.resident_step(config, types.SimpleNamespace(segments=8))
    assert why == says and (built is not None) == (says == "")


def test_the_slower_of_two_starts_counts(bench, setup):
    row = bench("suites.every_shape").ROWS["starts_llama_1b"]
    done = [
        {"contender": "starts", "round": turn, "line": {"seconds_to_first_step": {"first": of, "second": 11}}}
        for turn, of in ((1, 44.0), (2, 46.0))
    ]
    assert [bar.met(row.found(setup, done)) for bar in row.bars] == [False, True]
    assert [bar.met(row.found(setup, [])) for bar in row.bars] == [None, None]


def test_a_shape_that_does_as_it_should_not_misses_the_bar(bench, setup):
    row = bench("suites.every_shape").ROWS["offload_runs"]
    done = [
        {"contender": f"shape_{number}", "round": 1, "line": {"as_it_should": True}} for number in range(1, 7)
    ]
    assert row.bars[0].met(row.found(setup, done)) and row.bars[0].met(row.found(setup, [])) is None
    done[3] = block("shape_4", 1, None)
    found = row.found(setup, done)
    assert found["as_they_should"] == 5 and not row.bars[0].met(found)
    assert 9e9 < found["shapes"]["shape_1"]["parameters"] < 14e9


@pytest.mark.parametrize(
    ("code", "said", "good"),
    [
        (2, "jaxthru: too large", True),
        (2, "preparing data: mix quickstart ...\njaxthru: too large", False),
        (1, "jaxthru: out of memory", False),
    ],
)
def test_a_refusal_is_one_line_before_data_is_prepared(bench, monkeypatch, tmp_path, code, said, good):
    first_steps = bench("measure.first_steps")
    ended = subprocess.CompletedProcess([], code, "", said)
    monkeypatch.setattr(first_steps.subprocess, "run", lambda *_, **__: ended)
    assert first_steps.refusal([], tmp_path)["as_it_should"] is good


@pytest.fixture
def suite(bench, monkeypatch, tmp_path):
    """Runs suite.py with rates in place of processes; returns what ran."""
    suite = bench("suite")
    ran = []

    def block_of(name, turn, command, gpu, limit):
        ran.append((name, turn))
        more = {"tflops": 700.0} if "gemm" in name else {}
        return block(name, turn, 12_000.0 + turn, **more)

    monkeypatch.setattr(suite.blocks, "block_of", block_of)
    monkeypatch.setattr(suite, "corpus", lambda: "quickstart")
    for variable in (*suite.CACHES, *suite.KEPT):  # or they would be set for all tests that come
        monkeypatch.setenv(variable, "")

    def run(*words: str) -> list[tuple[str, int]]:
        ran.clear()
        given = ["suite.py", "every_shape", "--output", str(tmp_path / "records"), *words]
        if "--commit" not in words:
            given += ["--commit", COMMIT]
        monkeypatch.setattr(sys, "argv", given)
        monkeypatch.setattr(bench("suites.rows").Setup, "file", lambda *_, **__: tmp_path / "rows.npy")
        assert suite.main() == 0
        return [*ran]

    return run


def test_a_row_goes_on_where_it_was_cut_short_and_is_not_run_again(suite, bench, tmp_path, capsys):
    row, harness = ("--rows", "layers_32"), bench("harness")
    assert suite(*row, "--stop-after", "60") == [("gemm_bf16", 1)], "no block that would end later is begun"
    said = capsys.readouterr().out
    assert "layers_32: 2 blocks left: run the same command again" in said and "| not run |" in said
    assert suite(*row) == [("jaxthru_packed", 1), ("jaxthru_packed", 2)]
    assert harness.commit() == COMMIT, "blocks say what the suite was told"
    said = capsys.readouterr().out
    assert "| ≥ 10,500 tokens/s | 12,002 tokens/s | 0.01% | met |" in said
    record = json.loads((tmp_path / "records" / "every_shape_layers_32.json").read_text())
    assert all(record[key] for key in ("device", "versions", "commit", "command"))
    assert "| jaxthru_packed | 12,002 |" in said, "a row that is named is shown whole"
    assert record["sustained_tflops"] == {"gemm_bf16": 700.0} and record["blocks_left"] == 0
    assert suite(*row) == suite(*row, "--commit", "f" * 40) == [], "it has its record"


def test_a_block_that_the_end_of_the_command_cuts_short_has_not_failed(suite, bench, monkeypatch, tmp_path):
    def cut_short(name, turn, command, gpu, limit):
        return {"contender": name, "round": turn, "gpu": None, "error": f"took more than {limit:.0f} s: step"}

    row, path = ("--rows", "layers_32"), tmp_path / "records" / "every_shape_layers_32.json"
    suite(*row, "--stop-after", "60")
    with monkeypatch.context() as slow:
        slow.setattr(bench("suite").blocks, "block_of", cut_short)
        slow.setattr(sys, "argv", ["suite.py", "every_shape", *row, "--output", str(path.parent)])
        slow.setattr(sys, "argv", [*sys.argv, "--commit", COMMIT, "--stop-after", "300"])
        assert bench("suite").main() == 0
        assert json.loads(path.read_text())["blocks_left"] == 2
        slow.setattr(sys, "argv", sys.argv[:-2])  # with all the time that a block may have it has failed
        assert bench("suite").main() == 0
    record = json.loads(path.read_text())
    assert record["blocks_left"] == 0 and "took more than 560 s" in record["blocks"][1]["error"]


def test_blocks_of_two_commits_are_never_in_one_record(suite):
    suite("--rows", "layers_32", "--stop-after", "60")
    with pytest.raises(SystemExit, match="unfinished, and its commit is '0123"):
        suite("--rows", "layers_32", "--commit", "f" * 40)


def test_failed_blocks_run_again_if_asked_to(suite, tmp_path):
    suite("--rows", "layers_32")
    path = tmp_path / "records" / "every_shape_layers_32.json"
    record = json.loads(path.read_text())
    record["blocks"][2] = block("jaxthru_packed", 2, None)
    path.write_text(json.dumps(record))
    assert suite("--rows", "layers_32") == []
    assert suite("--rows", "layers_32", "--retry") == [("jaxthru_packed", 2)]


def test_the_table_says_what_is_missing(suite, bench, capsys, monkeypatch):
    suite("--rows", "layers_32_fp8")
    capsys.readouterr()
    assert suite("--table") == []
    lines = {each.split(" | ")[0]: each for each in capsys.readouterr().out.splitlines()}
    assert "**missed**" in lines["| all 32 layers in FP8, packed"]
    assert lines["| Qwen3-0.6B, 16 rows of 2,048, causal"].endswith("|  |  | not run |")


@pytest.mark.parametrize("commit", ["0123abc", "HEAD", "g" * 40])
def test_a_commit_that_is_none_is_one_line(suite, commit):
    with pytest.raises(SystemExit, match=f"^suite.py: --commit {commit}: must be the hash .*$"):
        suite("--commit", commit)


def test_a_commit_that_is_not_known_is_null_and_the_table_says_so(
    suite, bench, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(bench("harness"), "commit", lambda: None)
    assert suite("--rows", "layers_32,offload_runs", "--commit", "") == [
        ("gemm_bf16", 1),
        ("jaxthru_packed", 1),
        ("jaxthru_packed", 2),
    ]
    said = capsys.readouterr().out
    assert "| met, of a commit that is not known |" in said
    assert (
        "offload_runs: left out, its shapes are drawn from the commit's hash: give it with --commit" in said
    )
    record = json.loads((tmp_path / "records" / "every_shape_layers_32.json").read_text())
    assert record["commit"] is None


def test_settings_and_rows_to_be_named(suite, bench, tmp_path, monkeypatch):
    """--set is of all rows, under their own; a row that is to be named runs only then."""
    setup = bench("suites.rows").Setup(COMMIT, tmp_path, overrides=("train.rows=3", "train.seed=7"))
    config = setup.config(bench("suites.every_shape").ROWS["qwen3_0_6b"])
    assert (config.train.rows, config.train.seed) == (16, 7)
    module = bench("suites.every_shape")
    named = {"layers_32_fp8": dataclasses.replace(module.ROWS["layers_32_fp8"], named=True)}
    monkeypatch.setattr(module, "ROWS", {"layers_32": module.ROWS["layers_32"]} | named)
    assert [name for name, _ in suite()] == ["gemm_bf16", "jaxthru_packed", "jaxthru_packed"]
    assert [name for name, _ in suite("--rows", "layers_32_fp8")][2:] == ["jaxthru_packed"] * 2


def test_every_row_is_listed_with_its_bars_and_fits_two_commands(bench, rows, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["suite.py", "every_shape", "--list"])
    assert bench("suite").main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "A ratio is one of tokens per second" in "\n".join(lines[len(rows) + 3 :])
    for (name, row), said in zip(rows.items(), lines[2:], strict=False):
        assert said.startswith(f"| {name} | {row.about} | ") and row.bars
        assert all(bar.asked() in said for bar in row.bars)
        assert all(each.seconds < 580 for each in row.left([])), "a command on a GPU machine has 600 s"


def test_rows_take_what_is_auto_and_their_peers_the_same_shape(bench, rows, tmp_path, monkeypatch):
    of_rows, races = bench("suites.rows"), bench("suites.race")
    harness = bench("harness")
    monkeypatch.setattr(of_rows.Setup, "file", lambda *_, **__: tmp_path / "rows.npy")
    setup = of_rows.Setup(COMMIT, tmp_path)
    for name, row in rows.items():
        config = setup.config(row)
        assert (config.remat.policy, config.offload.level, config.kernels.attention) == ("auto",) * 3
        assert config.model.loop == ("unroll" if "unrolled" in name else "auto")
        for contender in {each.name for each in row.wanted([])}:
            words = row.command(contender, setup)
            assert all(isinstance(word, str) for word in words) and "{" not in " ".join(words)
        for peer in (*getattr(row, "against", ()), *getattr(row, "beside", ())):
            words = row.command(peer, setup)[3:]
            shape = harness.Shape.of(harness.peer_parser("").parse_known_args(words)[0])
            assert shape == harness.Shape.of(config.model)
            if shape.qk_norm:
                assert races.CONTENDERS[peer].peer != "torchtitan", "whose Llama has no qk_norm"
    shape = harness.Shape.of(setup.config(rows["qwen3_4b"]).model)
    assert (shape.qk_norm, shape.tied_embeddings, shape.rope_theta) == (1, 1, 1e6)
    assert llama.parameters(setup.config(rows["qwen3_4b"]).model) == pytest.approx(4.02e9, rel=0.01)
    assert llama.parameters(setup.config(rows["llama_1b"]).model) == pytest.approx(1.236e9, rel=0.01)


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("suite", ["data", "decode", "published"])
def test_contenders_start_programs_that_are_there(bench, monkeypatch, tmp_path, suite, tiny):
    monkeypatch.setattr(bench("data_corpus"), "make", lambda *_: None)
    setup = bench("suites.rows").Setup(COMMIT, tmp_path, tiny=tiny, torch_python="torch")
    for row in bench(f"suites.{suite}").ROWS.values():
        row.check(setup)
        for name in row.contenders:
            words = row.command(name, setup)
            assert "{" not in " ".join(words)
            program = next(word for word in words if "peers." in word or word.endswith(".py"))
            if program.startswith("peers."):
                assert words[:2] == ["torch", "-m"]
                program = ROOT / f"scripts/bench/{program.replace('.', '/')}.py"
            assert Path(program).is_file() and ("JAX_PLATFORMS=cpu" in words) <= tiny
            assert [each.name for each in row.wanted([])].count(name) == row.rounds


def test_a_peer_says_in_one_line_what_of_a_shape_it_lacks(bench):
    shape = bench("harness").Shape(tied_embeddings=1, qk_norm=1)
    with pytest.raises(SystemExit, match=r"^this.py: has no tied_embeddings and no qk_norm; run [^\n]+$"):
        shape.need_none_of("tied_embeddings", "qk_norm", peer="this.py")
    bench("harness").Shape(tied_embeddings=1).need_none_of("qk_norm", peer="this.py")


def test_only_named_packages_are_stood_in_for_where_maxtext_lacks_them(bench, monkeypatch):
    maxtext = bench("peers.maxtext")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, maxtext.StandIns()])
    for name in ("pathwaysutils", "pathwaysutils.elastic"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from pathwaysutils.elastic import manager

    class Own(manager.Manager):  # as MaxText subclasses, decorates and calls what it imports
        pass

    assert isinstance(Own("a", key=1)(lambda: 0), maxtext.Anything)
    with pytest.raises(ImportError):
        importlib.import_module("tensorflow_that_is_absent")
    for name in ("pathwaysutils", "pathwaysutils.elastic"):
        monkeypatch.delitem(sys.modules, name)


def test_maxtext_takes_the_same_shape_and_optimizer(bench):
    harness, maxtext = bench("harness"), bench("peers.maxtext")
    shape = harness.Shape(tied_embeddings=1, qk_norm=1, layers=3, rope_theta=1e6)
    parser = harness.peer_parser("")
    parser.add_argument("--loop", default="scan")
    parser.add_argument("--vocabulary-tiles", type=int, default=1)
    given = parser.parse_args([*shape.flags(), "--rows", "4", "--sequence", "64"])
    values = maxtext.settings(given, "minimal", "folder")
    assert (values["decoder_block"], values["logits_via_embedding"]) == ("qwen3", True)
    assert (values["base_num_decoder_layers"], values["rope_max_timescale"]) == (3, 1_000_000)
    assert (values["per_device_batch_size"], values["max_target_length"]) == (4, 64)
    assert (values["gradient_clipping_threshold"], values["adam_b2"]) == (1.0, 0.95)
    assert values["scan_layers"] and "none" not in maxtext.POLICIES["scan"], (
        "with which a scan recomputes all"
    )
    batch = next(maxtext.batches(given))
    assert batch["targets_segmentation"].sum() == 4 * 63, "the last token of a row has no target"


@pytest.mark.slow(minutes=0.5)
def test_a_tiny_row_runs_on_a_cpu(tmp_path):
    script = [sys.executable, str(ROOT / "scripts" / "bench" / "suite.py"), "every_shape", "--tiny"]
    rows = ("near_limit", "offload_refuses")
    one_device = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    ended = subprocess.run(
        [*script, "--rows", ",".join(rows), "--output", str(tmp_path), "--commit", COMMIT],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": one_device},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr
    records = {row: json.loads((tmp_path / f"every_shape_{row}.json").read_text()) for row in rows}
    assert all("line" in each for record in records.values() for each in record["blocks"]), ended.stderr
    assert all(record["device"]["kind"] == "cpu" for record in records.values())
    assert records["near_limit"]["found"]["slowest"] >= 1
    assert records["offload_refuses"]["bars"][0]["met"]
    assert "on a tiny shape" in ended.stdout
