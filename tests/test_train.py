"""The command, end to end, in processes of its own: training, stopping, killing, resuming, refusing."""

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
from processes import finish, start_processes
from runs import ROOT, kill, make_workplace, resumed_from

from jaxthru.training.run_directory import EVAL_FIELDS, METRICS_FIELDS


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_workplace(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def whole(place):
    """A run that nothing disturbed, and what it printed."""
    return place.run("whole")


def test_a_run_learns_and_leaves_what_the_contract_names(place, whole):
    directory = place.folder / "whole"
    rows = place.metrics("whole")
    assert len(rows) == 40 and all(tuple(row) == METRICS_FIELDS for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert all(row["step_seconds"] > 0 and row["tokens"] == 8 * 64 for row in rows)
    assert rows[0]["loss_by_source"].keys() == {"python_stdlib", "prose"}
    evaluations = [json.loads(line) for line in (directory / "eval.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evaluations] == [0, 40]
    assert all(tuple(row) == EVAL_FIELDS for row in evaluations)
    first, last = evaluations
    assert all(last["loss_by_source"][name] < loss - 0.3 for name, loss in first["loss_by_source"].items())
    assert json.loads((directory / "config.json").read_text())["train"]["steps"] == 40
    assert json.loads((directory / "environment.json").read_text())["versions"]["jax"]
    assert place.checkpoints("whole") == [35, 40]
    assert "attention: xla runs" in whole and whole.count("attention:") == 1
    for part in ("held-out loss", "prose", "tokens/s", "run directory", "resume: "):
        assert part in whole
    assert "the tokenizer uses 300 of model.vocabulary = 320" in whole


def test_a_finished_run_started_again_prints_its_table(place, whole):
    before = (place.folder / "whole" / "metrics.jsonl").read_bytes()
    output = place.run("whole")
    table = whole[whole.index("┌") :]
    assert output[output.index("┌") :] == table
    assert (place.folder / "whole" / "metrics.jsonl").read_bytes() == before


def test_killed_and_run_again_the_losses_are_the_same(place, whole):
    process = place.start("killed")
    place.wait_for_step(process, "killed", 15)
    kill(process)
    output = place.run("killed")
    assert 10 <= resumed_from(output) <= 20
    assert place.losses("killed") == place.losses("whole")
    assert [row["step"] for row in read_eval(place, "killed")] == [0, 40]
    assert read_eval(place, "killed") == read_eval(place, "whole")


def read_eval(place, run_dir):
    return [json.loads(line) for line in (place.folder / run_dir / "eval.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("settings", [{}, {"model__loop": "unroll"}], ids=["same", "unrolled"])
def test_killed_thrice_at_random(place, whole, settings, tmp_path_factory):
    """The quick form of `test_killed_twenty_times`. Unrolled layers resume from their own checkpoints."""
    if settings:
        place.run("whole_unrolled", **settings)
    kill_at_random(place, f"thrice{len(settings)}", 3, **settings)
    assert place.losses(f"thrice{len(settings)}") == place.losses("whole_unrolled" if settings else "whole")


def kill_at_random(place, run_dir: str, times: int, **settings) -> int:
    """Kills a run again and again until it is through; returns how many kills fell into a save."""
    seed = int(os.environ.get("JAXTHRU_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"JAXTHRU_TEST_SEED={seed}")
    draw, last, in_save = random.Random(seed), 0, 0
    steps = place.metrics("whole")[-1]["step"]
    for number in range(times):
        process = place.start(run_dir, **settings)
        booked = min(steps - 2, last + 1 + draw.randrange(max(1, steps // times)))
        place.wait_for_step(process, run_dir, booked)
        if number % 2:
            in_save += wait_for_a_save(process, place.folder / run_dir / "checkpoints")
        else:
            time.sleep(draw.random() * 0.05)
        output = kill(process)
        if "Traceback" in output:
            raise AssertionError(output)
        resumed = resumed_from(output)
        saved = max(place.checkpoints(run_dir), default=0)
        assert resumed >= last, f"resumed from {resumed}, although {last} was saved"
        last = max(saved, resumed)
    output = place.run(run_dir, **settings)
    assert resumed_from(output) >= last
    return in_save


def wait_for_a_save(process, checkpoints) -> bool:
    """Returns whether a checkpoint is half written now; gives up when the run ends."""
    while process.poll() is None:
        if any(not path.name.isdecimal() for path in checkpoints.glob("*")):
            return True
    return False


@pytest.mark.slow
def test_killed_twenty_times(place, whole, tmp_path):
    """Saves at every step, so that many kills fall into one."""
    place.run("whole_long", train__steps=200, checkpoint__every=2)
    seed = random.SystemRandom().randrange(2**32)
    print(f"JAXTHRU_TEST_SEED={seed}")
    draw, last, in_save = random.Random(seed), 0, 0
    settings = {"train__steps": 200, "checkpoint__every": 2}
    for number in range(20):
        process = place.start("long", **settings)
        place.wait_for_step(process, "long", last + 1 + draw.randrange(8))
        if number % 2:
            in_save += wait_for_a_save(process, place.folder / "long" / "checkpoints")
        time.sleep(draw.random() * 0.02)
        resumed = resumed_from(kill(process))
        assert resumed >= last
        last = max(place.checkpoints("long"), default=0)
        booked = place.metrics("long")
        assert not booked or booked[-1]["step"] >= last
    output = place.run("long", **settings)
    assert resumed_from(output) >= last
    assert in_save >= 5
    assert place.losses("long") == place.losses("whole_long")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_finishes_the_step_saves_and_says_how_to_resume(place, whole, number):
    name = f"stopped{number}"
    process = place.start(name, checkpoint__every=0)
    place.wait_for_step(process, name, 7)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    (saved,) = place.checkpoints(name)
    assert saved == place.metrics(name)[-1]["step"] < 40
    assert f"stopped after step {saved}" in output and "resume: " in output
    assert resumed_from(place.run(name, checkpoint__every=0)) == saved
    assert place.losses(name) == place.losses("whole")


def test_a_second_signal_exits_at_once(place, whole):
    process = place.start("twice")
    place.wait_for_step(process, "twice", 6)
    process.send_signal(signal.SIGSTOP)  # so that both signals are there when it looks
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=60)
    assert process.returncode in (0, 130)
    place.run("twice")
    assert place.losses("twice") == place.losses("whole")


def test_batches_and_losses_are_the_same_on_another_mesh(place, whole):
    """Stopped on one device and resumed on eight, with other micro-batches."""
    process = place.start("moved")
    place.wait_for_step(process, "moved", 12)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    saved = max(place.checkpoints("moved"))
    output = place.run(
        "moved", devices=8, mesh__fsdp=4, mesh__data=2, train__microbatches=1, remat__policy="full"
    )
    assert resumed_from(output) == saved and "mesh.data (1 → 2)" in output
    moved, one = place.losses("moved"), place.losses("whole")
    assert all(moved[step] == one[step] for step in range(1, saved + 1))
    assert all(moved[step] == pytest.approx(one[step], abs=1e-3) for step in one)
    tokens = [[row["tokens"], *row["loss_by_source"]] for row in place.metrics("moved")]
    assert tokens == [[row["tokens"], *row["loss_by_source"]] for row in place.metrics("whole")]


def test_two_processes_give_the_losses_of_one(place, whole, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom jaxthru.train import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    arguments = place.command("pair", mesh__fsdp=2)[3:]
    outputs = finish(start_processes(script, *arguments), timeout=300)
    assert sum("held-out loss" in output for output in outputs) == 1
    pair, one = place.losses("pair"), place.losses("whole")
    assert pair.keys() == one.keys()
    assert all(pair[step] == pytest.approx(one[step], abs=1e-3) for step in one)


def test_a_longer_run_goes_on_from_the_old_end(place, whole):
    shutil.copytree(place.folder / "whole", place.folder / "longer")
    output = place.run("longer", train__steps=44)
    assert resumed_from(output) == 40 and "train.steps (40 → 44)" in output
    assert len(place.metrics("longer")) == 44


def test_changed_weights_change_only_later_steps(place, whole):
    process = place.start("reweighed")
    place.wait_for_step(process, "reweighed", 12)
    kill(process)
    mix = place.folder / "mix.toml"
    text = mix.read_text()
    try:
        mix.write_text(text.replace("0.7", "0.1").replace("0.3", "0.9"))
        output = place.run("reweighed")
    finally:
        mix.write_text(text)
    resumed = resumed_from(output)
    assert "the mix's weights are now" in output
    new, old = place.losses("reweighed"), place.losses("whole")
    assert all(new[step] == old[step] for step in range(1, resumed + 1))
    assert any(new[step] != old[step] for step in range(resumed + 1, 41))


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(place, whole):
    process = place.start("damaged", checkpoint__keep=3)
    place.wait_for_step(process, "damaged", 22)
    kill(process)
    *_, before, newest = place.checkpoints("damaged")
    files = [p for p in (place.folder / "damaged" / "checkpoints" / str(newest)).rglob("*") if p.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size // 2)
    output = place.run("damaged", checkpoint__keep=3)
    assert resumed_from(output) == before
    assert f"checkpoint {newest}" in output and "damaged" in output
    assert place.losses("damaged") == place.losses("whole")


def test_a_trace_is_taken(place, whole):
    place.run("traced", profile__at=3, profile__steps=2, train__steps=6)
    taken = place.folder / "traced" / "profile" / "3"
    assert "train_step" in (taken / "step.hlo.txt").read_text()
    assert list(taken.rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (["--set", "train.stepz=3"], {}, "unknown key train.stepz; did you mean 'steps'"),
        ([], {"mesh__tensor": 2, "mesh__fsdp": 1}, "needs 2 devices, found 1"),
        ([], {"model__vocabulary": 200}, "model.vocabulary = 200: smaller than the tokenizer's 300"),
        ([], {"data__mix": "nowhere.toml"}, "nowhere.toml"),
        ([], {"model__max_sequence": 32}, "data.sequence = 64: longer than model.max_sequence = 32"),
        ([], {"model__attention": "cudnn_packed"}, "cudnn_packed"),
    ],
    ids=lambda value: None,
)
def test_bad_input_is_one_line_and_exit_code_2(place, whole, arguments, settings, message):
    output = place.run("refused", *arguments, code=2, **settings)
    errors = [line for line in output.splitlines() if line.startswith("jaxthru: ")]
    assert len(errors) == 1 and message in errors[0]
    assert "Traceback" not in output
    assert not (place.folder / "refused").exists()


def test_a_directory_of_another_run_is_refused(place, whole):
    output = place.run("whole", code=2, model__layers=3, optim__learning_rate=1)
    assert "holds a run of another configuration: model.layers (2 → 3), optim.learning_rate" in output
    assert "holds a run" in place.run("whole", "--resume", "never", code=2)


@pytest.mark.parametrize(("devices", "settings"), [(8, {"train__rows": 4}), (3, {})])
def test_rows_must_divide_over_the_devices(place, whole, devices, settings):
    output = place.run("rows", code=2, devices=devices, **settings)
    assert re.search(
        r"jaxthru: (train.rows / train.microbatches|model.embed) = \d+: must be a multiple", output
    )


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
        "made = jaxthru.build(config, jaxthru.open_data(config.data))\n"
        "print(made.compiled.as_text()[:9])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(place.folder / "whole" / "config.json")],
        env=place.environment(),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout == "HloModule\n", done.stderr
