"""The command, end to end, in processes of its own: training, stopping, killing, resuming, refusing."""

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from processes import finish
from runs import ROOT, compiled, kill, make_workplace, resumed_from

from jaxthru.config import dump
from jaxthru.config import load as load_config
from jaxthru.runtime.errors import InputError
from jaxthru.train import check_resumable, main, schedule_changed
from jaxthru.training.checkpoint import TEMPORARY
from jaxthru.training.run_directory import EVAL_FIELDS, METRICS_FIELDS, RunDirectory


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_workplace(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def quick(place):
    """The same folder, whose runs begin sooner."""
    return dataclasses.replace(place, forks=True)


@pytest.fixture(scope="module")
def whole(place):
    """A run that nothing disturbed, and what it printed."""
    return place.run("whole")


def test_a_run_learns_and_leaves_what_the_contract_names(place, whole):
    directory = place.folder / "whole"
    rows = place.metrics("whole")
    assert len(rows) == 40 and all(tuple(row) == METRICS_FIELDS for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert all(row["step_seconds"] > 0 and 448 < row["tokens"] <= 8 * 64 for row in rows)
    assert rows[0]["loss_by_source"].keys() == {"python_stdlib", "prose"}
    evaluations = [json.loads(line) for line in (directory / "eval.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evaluations] == [0, 40]
    assert all(tuple(row) == EVAL_FIELDS for row in evaluations)
    first, last = evaluations
    assert all(last["loss_by_source"][name] < loss - 0.3 for name, loss in first["loss_by_source"].items())
    assert json.loads((directory / "config.json").read_text())["train"]["steps"] == 40
    assert json.loads((directory / "environment.json").read_text())["versions"]["jax"]
    assert place.checkpoints("whole") == [35, 40]
    assert "kernels: attention uses xla" in whole and whole.count("attention uses") == 1
    for part in ("held-out loss", "prose", "tokens/s", "run directory", "train longer: "):
        assert part in whole
    assert re.search(r"start: .*, state \d+ s, evaluation \d+ s, first step \d+ s; ", whole)
    assert "the tokenizer uses 300 of model.vocabulary = 320" in whole


def test_a_finished_run_started_again_prints_its_table(place, whole):
    before = (place.folder / "whole" / "metrics.jsonl").read_bytes()
    output = place.run("whole")
    table = whole[whole.index("┌") :]
    assert output[output.index("┌") :] == table
    assert (place.folder / "whole" / "metrics.jsonl").read_bytes() == before


def test_the_second_start_of_a_configuration_compiles_nothing(place):
    settings = {"train__steps": 3, "model__mlp": 160}
    assert compiled(place.run("cold", "--verbose", **settings)) > 0
    assert compiled(place.run("warm", "--verbose", **settings)) == 0


@pytest.mark.slow
def test_no_program_is_kept_in_a_run_directory_or_run_from_one(place, whole):
    """Programs are kept in the user's own cache; a run directory may be handed on."""
    settings = {"train__deterministic": "true", "checkpoint__every": 20}
    place.run("deterministic", **settings)
    directory, cache = place.folder / "deterministic", place.folder / "compiled"
    programs = [path for path in cache.iterdir() if path.is_file()]
    names = {path.name for path in programs}
    assert any(name.startswith("jit_") for name in names)
    assert not [path for path in directory.rglob("*") if path.name in names or "xla" in path.name]
    for folder in ("xla_cache", "autotune"):  # as a stranger may leave it, and as runs once did
        shutil.copytree(cache, directory / folder)
        for path in (directory / folder).iterdir():
            path.is_file() and path.write_bytes(b"whoever loads this fails")
    shutil.rmtree(directory / "checkpoints" / "40")
    output = place.run("deterministic", **settings)
    assert resumed_from(output) == 20 and "fails" not in output and "cache" not in output
    assert place.losses("deterministic") == place.losses("whole")


def test_killed_and_run_again_the_losses_are_the_same(place, whole):
    process = place.start("killed")
    place.wait_for_step(process, "killed", 16)  # the save at 15 has waited for the one at 10
    kill(process)
    output = place.run("killed")
    assert 10 <= resumed_from(output) <= 20
    assert place.losses("killed") == place.losses("whole")
    assert [row["step"] for row in read_eval(place, "killed")] == [0, 40]
    assert read_eval(place, "killed") == read_eval(place, "whole")


def read_eval(place, run_dir):
    return [json.loads(line) for line in (place.folder / run_dir / "eval.jsonl").read_text().splitlines()]


def kill_at_random(place, run_dir: str, times: int, apart: int, **settings) -> int:
    """Kills a run `times` times, some `apart` steps after it resumed, every other time within a save, and
    lets it end. Returns how many kills fell into a save."""
    seed = int(os.environ.get("JAXTHRU_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"JAXTHRU_TEST_SEED={seed}")
    draw, last, in_save = random.Random(seed), 0, 0
    for number in range(times):
        process = place.start(run_dir, **settings)
        place.wait_for_step(process, run_dir, last + 1 + draw.randrange(apart))
        if number % 2:
            in_save += wait_for_a_save(process, place.folder / run_dir / "checkpoints")
        time.sleep(draw.random() * 0.02)
        assert resumed_from(kill(process)) == last
        last = max(place.checkpoints(run_dir), default=0)
        # The step computed first after a resume comes after all that was saved, and nothing is missing.
        assert place.metrics(run_dir)[-1]["step"] >= last
    assert resumed_from(place.run(run_dir, **settings)) == last
    return in_save


def wait_for_a_save(process, checkpoints) -> bool:
    """Returns whether a checkpoint is half written now; gives up when the run ends."""
    while process.poll() is None:
        if any(not path.name.isdecimal() for path in checkpoints.glob("*")):
            return True
    return False


@pytest.mark.slow(minutes=2)  # with the tests beside it
def test_killed_again_and_again(quick, whole):
    """`scripts/faults.py endings` does so two hundred times."""
    settings = {"train__steps": 50, "checkpoint__every": 2, "model__loop": "unroll"}
    quick.run("long_whole", **settings)
    in_save = kill_at_random(quick, "long", 2, apart=12, **settings)
    assert in_save == 1
    assert quick.losses("long") == quick.losses("long_whole")


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_signal_finishes_the_step_saves_and_says_how_to_resume(place, whole, number):
    name = f"stopped{number}"
    process = place.start(name, checkpoint__every=0)
    place.wait_for_step(process, name, 7)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == (143 if number == signal.SIGTERM else 130), output
    (saved,) = place.checkpoints(name)
    assert saved == place.metrics(name)[-1]["step"] < 40
    assert f"stopped after step {saved}" in output and "resume: " in output
    assert resumed_from(place.run(name, checkpoint__every=0)) == saved
    assert place.losses(name) == place.losses("whole")


@pytest.mark.slow
@pytest.mark.parametrize("after", ["", "preparing data", "kernels: attention uses"])
def test_sigterm_before_the_steps_ends_it_soon_with_the_code_of_a_stop(place, quick, whole, after):
    """While modules are imported, data is prepared, and the step is compiled or its state made."""
    if after:
        place = quick
    store = place.folder / f"stopped_store_{len(after)}"
    process = place.start("stopped_early", data__store=store, train__stopped_exit_code=75 if after else 143)
    time.sleep(0 if after else 0.3)
    while after and after not in (line := process.stdout.readline()):
        assert line, "ended too early"
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == (75 if after else 143) and time.monotonic() - asked < 20, output
    (line,) = (line for line in output.splitlines() if line.startswith("jaxthru: "))
    assert "told to stop (SIGTERM) while there was nothing to save" in line and "Traceback" not in output
    assert not list(store.rglob("*.partial")) and not place.checkpoints("stopped_early")


@pytest.mark.slow
def test_a_second_signal_exits_at_once(quick, whole):
    """Whatever is not saved then is lost: after the first signal alone the run would save."""
    process = quick.start("twice")
    quick.wait_for_step(process, "twice", 6)
    process.send_signal(signal.SIGSTOP)  # so that both signals are there when it looks
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output  # Python looks at SIGINT, the lower number, first
    assert output.count("stopping after this step; again to exit at once") == 1
    assert "stopped after step" not in output
    assert all(step % 5 == 0 for step in quick.checkpoints("twice")), "it saved where it was stopped"
    assert quick.metrics("twice")[-1]["step"] < 40
    quick.run("twice")
    assert quick.losses("twice") == quick.losses("whole")


@pytest.mark.slow
def test_batches_and_losses_are_the_same_on_another_mesh(quick, whole):
    """Stopped on one device and resumed on four, in two micro-batches."""
    process = quick.start("moved")
    quick.wait_for_step(process, "moved", 12)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    saved = max(quick.checkpoints("moved"))
    elsewhere = {"mesh__fsdp": 2, "mesh__data": 2, "train__microbatches": 2, "remat__policy": "full"}
    output = quick.run("moved", devices=4, **elsewhere)
    assert resumed_from(output) == saved and "mesh.data (1 → 2)" in output
    moved, one = quick.losses("moved"), quick.losses("whole")
    assert all(moved[step] == one[step] for step in range(1, saved + 1))
    assert all(moved[step] == pytest.approx(one[step], abs=1e-3) for step in one)
    for new, old in zip(quick.metrics("moved"), quick.metrics("whole"), strict=True):
        assert new["tokens"] == old["tokens"]
        for name, loss in old["loss_by_source"].items():  # the same tokens of the same sources
            assert new["loss_by_source"][name] == pytest.approx(loss, abs=2e-3)


@pytest.mark.slow
def test_a_run_moves_to_tensor_parallelism_and_back(quick):
    """Ended on one device, resumed on four, two of them along `tensor`, and resumed on one; evaluated at each
    end. The learning rate is one that does not know of the end."""
    settings = {"model__kv_heads": 2, "optim__schedule": "constant", "optim__warmup_ratio": 0}
    settings |= {"checkpoint__every": 6, "evaluate__every": 6}
    quick.run("still", **settings, train__steps=18)
    over_tensor = {"mesh__tensor": 2, "mesh__fsdp": 2}
    for steps, devices, mesh in ((6, 1, {}), (12, 4, over_tensor), (18, 1, {})):
        output = quick.run("there_and_back", devices=devices, train__steps=steps, **settings, **mesh)
        assert resumed_from(output) == steps - 6
    moved, still = quick.losses("there_and_back"), quick.losses("still")
    assert moved.keys() == still.keys()
    assert all(moved[step] == pytest.approx(still[step], abs=1e-3) for step in still)
    evaluations = [
        [json.loads(line) for line in (quick.folder / run / "eval.jsonl").read_text().splitlines()]
        for run in ("there_and_back", "still")
    ]
    for one, other in zip(*evaluations, strict=True):
        assert one["step"] == other["step"] and one["loss"] == pytest.approx(other["loss"], abs=1e-3)


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(quick, whole):
    outputs = finish(quick.start_job("pair", 2, mesh__fsdp=2), timeout=300)
    assert sum("held-out loss" in output for output in outputs) == 1
    pair, one = quick.losses("pair"), quick.losses("whole")
    assert pair.keys() == one.keys()
    assert all(pair[step] == pytest.approx(one[step], abs=1e-3) for step in one)


def test_a_longer_run_goes_on_from_the_old_end(place, whole):
    shutil.copytree(place.folder / "whole", place.folder / "longer")
    output = place.run("longer", train__steps=44)
    assert resumed_from(output) == 40
    assert "changed since the run was started: train.steps (40 → 44)\n" in output
    (line,) = (line for line in output.splitlines() if line.startswith("the cosine schedule is stretched: "))
    assert line.endswith("at step 41; optim.schedule_steps=40 holds it")
    assert len(place.metrics("longer")) == 44


@pytest.mark.slow
def test_changed_weights_change_only_later_steps(quick, whole):
    process = quick.start("reweighed")
    quick.wait_for_step(process, "reweighed", 12)
    kill(process)
    mix = quick.folder / "mix.toml"
    text = mix.read_text()
    try:
        mix.write_text(text.replace("0.7", "[[0, 0.1], [30, 0.2]]").replace("0.3", "0.9"))
        output = quick.run("reweighed")
    finally:
        mix.write_text(text)
    resumed = resumed_from(output)
    assert "the mix is now" in output
    new, old = quick.losses("reweighed"), quick.losses("whole")
    assert all(new[step] == old[step] for step in range(1, resumed + 1))
    assert any(new[step] != old[step] for step in range(resumed + 1, 41))


@pytest.mark.slow
def test_a_run_ends_where_a_source_is_to_end_it(quick, whole):
    mix = quick.folder / "ending.toml"
    capped = 'weight = 0.7\nmax_tokens = 4000\nexhausted = "stop"\n'
    mix.write_text((quick.folder / "mix.toml").read_text().replace("weight = 0.7\n", capped))
    output = quick.run("ending", data__mix=mix)
    end = len(quick.metrics("ending"))
    assert 10 < end < 14 and quick.checkpoints("ending")[-1] == end
    assert f"source python_stdlib is exhausted after step {end} of 40: the run ends there" in output
    assert resumed_from(quick.run("ending", data__mix=mix)) == end
    mix.write_text((quick.folder / "mix.toml").read_text())
    quick.run("ending", data__mix=mix)
    assert len(quick.losses("ending")) == 40


@pytest.mark.slow
def test_a_run_whose_text_has_changed_goes_on_with_the_stores_it_began_with(quick, whole):
    process = quick.start("edited")
    quick.wait_for_step(process, "edited", 12)
    kill(process)
    mix = quick.folder / "mix.toml"
    text = mix.read_text()
    try:
        mix.write_text(text.replace("100_000", "90_000"))
        output = quick.run("edited")
    finally:
        mix.write_text(text)
    assert resumed_from(output) > 0 and "changed since the run was started: prose;" in output
    assert quick.losses("edited") == quick.losses("whole")


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(quick, whole):
    process = quick.start("damaged", checkpoint__keep=3)
    quick.wait_for_step(process, "damaged", 22)
    kill(process)
    *_, before, newest = quick.checkpoints("damaged")
    files = [p for p in (quick.folder / "damaged" / "checkpoints" / str(newest)).rglob("*") if p.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size // 2)
    output = quick.run("damaged", checkpoint__keep=3)
    assert resumed_from(output) == before
    assert f"checkpoint {newest}" in output and "damaged" in output
    assert quick.losses("damaged") == quick.losses("whole")


def test_a_trace_is_taken_and_where_so_told_nothing_saved(place, whole):
    kept = {"checkpoint__every": 0, "checkpoint__last": "false"}
    output = place.run("traced", profile__at=3, profile__steps=2, train__steps=6, **kept)
    assert not list((place.folder / "traced" / "checkpoints").glob("*")) and "resume:" not in output
    taken = place.folder / "traced" / "profile" / "3"
    assert "train_step" in (taken / "step.hlo.txt").read_text()
    assert list(taken.rglob("*.xplane.pb"))
    # It ends with a summary, and says where the page is.
    assert "part of the step" in output
    assert f"report: {taken / 'report.html'}" in output
    assert (taken / "ledger.json").is_file() and (taken / "report.html").is_file()


@pytest.mark.slow
def test_a_stopped_run_saves_its_state_before_it_reports(quick, whole):
    """Whoever stops it may not wait for the report."""
    process = quick.start("stopped_traced", profile__at=3, profile__steps=30, checkpoint__every=0)
    quick.wait_for_step(process, "stopped_traced", 7)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 143, output
    assert 0 < output.index("the state is saved") < output.index("part of the step")
    assert quick.checkpoints("stopped_traced") == [quick.metrics("stopped_traced")[-1]["step"]]


def refuse(capsys, place, run_dir: str, *arguments: str, **settings) -> str:
    """Returns the one line with which the command refuses, here with eight devices."""
    code = main(place.command(run_dir, *arguments, **settings)[3:])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("jaxthru: ")]
    assert code == 2 and len(errors) == 1
    return errors[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mesh__tensor": 2, "mesh__fsdp": 1}, "needs 2 devices, found 8"),
        ({"mesh__tensor": 2}, "model.kv_heads = 1: must be a multiple of mesh.tensor = 2"),
        (
            {"train__rows": 4},
            "train.rows / train.microbatches = 4: must be a multiple of mesh.fsdp = 8",
        ),
        ({"model__embed": 36}, "model.embed = 36: must be a multiple of mesh.fsdp = 8"),
        ({"model__vocabulary": 200}, "model.vocabulary = 200: smaller than the tokenizer's 300"),
        ({"data__mix": "nowhere.toml"}, "nowhere.toml"),
        ({"model__max_sequence": 32}, "data.sequence = 64: longer than model.max_sequence = 32"),
        (
            {"kernels__attention": "cudnn_packed"},
            "kernels.attention = 'cudnn_packed': attention: no implementation",
        ),
        (
            {"kernels__linear_cross_entropy": "triton"},
            "kernels.linear_cross_entropy = 'triton': linear_cross_entropy: no implementation",
        ),
        (
            {"kernels__adamw_8bit": "triton", "optim__state": "int8"},
            "kernels.adamw_8bit = 'triton': adamw_8bit: no implementation",
        ),
        (
            {"kernels__rms_norm": "triton"},
            "kernels.rms_norm = 'triton': rms_norm_residual: no implementation",
        ),
        (
            {"mesh__tensor": 2, "model__kv_heads": 2, "kernels__collective_matmul": "mosaic_tpu"},
            "kernels.collective_matmul = 'mosaic_tpu': all_gather_matmul: no implementation",
        ),
        (
            {"offload__level": "parameters", "offload__host_gib": 1e-4},
            "which may pin 0.0 (offload.host_gib)",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_bad_input_is_one_line(place, whole, capsys, settings, message):
    assert message in refuse(capsys, place, "refused", **settings)
    assert not (place.folder / "refused").exists()


def test_what_cannot_run_or_be_kept_is_refused_before_data_is_prepared(place, whole, capsys):
    unprepared = place.folder / "unprepared"
    for key in ("attention", "rms_norm", "linear_cross_entropy"):
        line = refuse(capsys, place, "refused", data__store=unprepared, **{f"kernels__{key}": "triton"})
        assert f"kernels.{key} = 'triton'" in line and "no implementation can run here" in line
    (place.folder / "text").touch()
    line = refuse(capsys, place, "text/run", data__store=unprepared)
    assert line.endswith("text/run: cannot be written (Not a directory)")
    assert not unprepared.exists()


def test_bad_input_ends_the_process_with_code_2(place):
    output = place.run("refused", "--set", "train.stepz=3", code=2)
    assert output.strip() == "jaxthru: unknown key train.stepz = '3'; did you mean 'train.steps'?"


def test_a_directory_of_another_run_is_refused(place, whole, capsys):
    line = refuse(capsys, place, "whole", model__layers=3, optim__learning_rate=1)
    assert "holds a run of another configuration: model.layers (2 → 3), optim.learning_rate" in line
    assert "already holds a run" in refuse(capsys, place, "whole", "--resume", "never")


def test_a_longer_run_may_hold_its_learning_rate(tmp_path, caplog):
    path, directory = ROOT / "configs" / "quickstart.py", RunDirectory(tmp_path)
    before = load_config(path, ["train.steps=40"])
    dump(before, directory.config)

    def said(*settings) -> tuple[list[str], str]:
        caplog.clear()
        config = load_config(path, ["train.steps=400", *settings])
        with caplog.at_level("INFO", "jaxthru"):
            check_resumable(config, directory, "auto")
        lines = [
            record.getMessage().removeprefix("changed since the run was started: ")
            for record in caplog.records
        ]
        return lines, schedule_changed(before, config, 30)  # of the step that it goes on from

    changed, stretched = said()
    assert changed == ["train.steps (40 → 400)"]
    assert re.fullmatch(r"the cosine schedule is stretched: .* at step 31; .*_steps=40 holds it", stretched)
    held = ["optim.schedule_steps (None → 40)", "train.steps (40 → 400)"]
    assert said("optim.schedule_steps=40") == (held, "")
    assert said("optim.schedule_steps=200")[1].startswith("the cosine schedule is stretched")
    assert schedule_changed(None, before, 30) == ""


def test_checkpoints_of_nobody_knows_what_are_refused(tmp_path):
    """Only config.json says with what seed, say, they were trained."""
    config, directory = load_config(ROOT / "configs" / "quickstart.py"), RunDirectory(tmp_path)
    directory.metrics_file.touch()
    check_resumable(config, directory, "auto")  # of a run that ended before its first checkpoint
    (directory.checkpoints / "10").mkdir(parents=True)
    with pytest.raises(InputError, match=r"own config.json cannot be used: .*no such file; put it back"):
        check_resumable(config, directory, "auto")


def test_a_run_directory_that_cannot_be_one(place, whole, capsys):
    (place.folder / "file").write_text("")
    assert "is a file; give a directory" in refuse(capsys, place, "file")


def test_two_jobs_do_not_train_in_one_directory(place, whole, capsys):
    process = place.start("shared", train__steps=400)
    place.wait_for_step(process, "shared", 1)
    process.send_signal(signal.SIGSTOP)
    being_written = place.folder / "shared" / "checkpoints" / f"399{TEMPORARY}" / "state"
    being_written.mkdir(parents=True)
    try:
        assert "another process trains here now" in refuse(capsys, place, "shared", train__steps=400)
        assert being_written.is_dir()
    finally:
        kill(process)


@pytest.mark.slow
def test_one_document_and_nothing_held_out(quick, tmp_path):
    (tmp_path / "only.txt").write_text("To be, or not to be. " * 200)
    (tmp_path / "mix.toml").write_text(
        "held_out = 0\n[tokenizer]\nvocabulary = 270\n"
        '[sources.local_text]\npaths = ["only.txt"]\nweight = 1\n'
    )
    settings = {"data__mix": tmp_path / "mix.toml", "train__steps": 3, "checkpoint__every": 0}
    output = quick.run("alone", **settings)
    assert "no text is held out" in output and len(quick.metrics("alone")) == 3


def test_endless_nans_end_the_run_with_a_clear_message(place, whole):
    output = place.run(
        "nans", code=1, optim__learning_rate=1e30, optim__clip=0, optim__warmup_ratio=0, train__skip_limit=3
    )
    assert "not finite 3 times in a row (train.skip_limit)" in output
    assert place.metrics("nans")[-1]["skipped_updates"] == 3


def test_a_notebook_needs_only_public_names(place, whole, tmp_path):
    code = (
        "import sys, jaxthru\n"
        "assert 'jax' not in sys.modules, 'import jaxthru should do no work'\n"
        "config = jaxthru.load_config(sys.argv[1], ['train.steps=42'])\n"
        "made = jaxthru.build_step(config, jaxthru.open_data(config.data))\n"
        "slow = [name for name in sys.modules if name.startswith('jax.experimental.mosaic')]\n"
        "assert not slow, f'two seconds of every start: {slow}'\n"
        "import os\n"
        "print(made.compiled.as_text()[:9], os.environ['NCCL_NVLS_ENABLE'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(place.folder / "whole" / "config.json")],
        env=place.environment(),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout == "HloModule 0\n", done.stderr
