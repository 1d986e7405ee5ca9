"""The run directory: what a kill leaves can be read, cut and continued."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import finish, start_processes

from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError, TrainingError
from jaxthru.training.display import LONGER, overrides
from jaxthru.training.run_directory import EVAL_FIELDS, METRICS_FIELDS, RunDirectory, check_place


def metrics_row(step, **values):
    return {**dict.fromkeys(METRICS_FIELDS), "step": step, **values}


def eval_row(step):
    return {**dict.fromkeys(EVAL_FIELDS), "step": step, "loss_by_source": {"prose": 1.0 / 3.0}}


def test_paths_are_the_contract(tmp_path):
    run = RunDirectory(tmp_path / "run")
    paths = (
        run.config,
        run.environment,
        run.metrics_file,
        run.eval_file,
        run.tensorboard,
        run.checkpoints,
        run.profile,
        run.tokenizer,
        run.base,
    )
    names = "config.json environment.json metrics.jsonl eval.jsonl tensorboard checkpoints profile"
    names += " tokenizer base"
    assert [path.relative_to(run.path).as_posix() for path in paths] == names.split()
    assert not run.path.exists()


def test_fresh_directories_are_numbered(tmp_path):
    made = [RunDirectory.fresh("tiny", tmp_path / "runs").path for _ in range(3)]
    assert [path.relative_to(tmp_path).as_posix() for path in made] == [f"runs/tiny/{n}" for n in (1, 2, 3)]
    made[0].rmdir()
    (tmp_path / "runs/tiny/12").mkdir()
    (tmp_path / "runs/tiny/notes").mkdir()
    assert RunDirectory.fresh("tiny", tmp_path / "runs").path.name == "13"
    assert not RunDirectory(made[2]).holds_run()


def test_a_fresh_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(InputError, match="runs/tiny: no run directory can be made in it"):
        RunDirectory.fresh("tiny", tmp_path / "runs")


def test_a_place_is_tried_and_left_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    check_place(RunDirectory(tmp_path / "runs" / "1"), "tiny")
    check_place(None, "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    for path in (tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(InputError, match=f"--run-dir {path}: cannot be written"):
            check_place(RunDirectory(path), "tiny")
    (tmp_path / "runs").touch()
    with pytest.raises(InputError, match=r"runs/tiny: no run directory can be made in it .*give a --run-dir"):
        check_place(None, "tiny")


def test_an_unset_variable_is_no_run_directory():
    with pytest.raises(InputError, match="--run-dir: is empty"):
        RunDirectory("")


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoints"])
def test_holds_a_run(tmp_path, name):
    run = RunDirectory(tmp_path)
    assert not run.holds_run()
    (tmp_path / name).touch()
    assert run.holds_run()


def test_a_run_directory_of_impossible_name_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"--run-dir .*: cannot be read \(File name too long\)"):
        RunDirectory(tmp_path / ("a" * 5000)).holds_run()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file; give a directory"):
        RunDirectory(tmp_path / "file").holds_run()


def test_rows_come_back_exactly(tmp_path):
    run = RunDirectory(tmp_path)
    values = np.random.default_rng(0).standard_normal(50) * 10.0 ** np.arange(-25, 25)
    for step, value in enumerate(values):
        run.append_metrics(
            metrics_row(
                step, loss=float(value), grad_norm=np.float32(value), loss_by_source={"a": np.float64(value)}
            )
        )
    rows = run.read_metrics()
    assert [row["loss"] for row in rows] == values.tolist()
    assert [np.float32(row["grad_norm"]) for row in rows] == [np.float32(value) for value in values]
    assert [row["loss_by_source"]["a"] for row in rows] == values.tolist()
    assert tuple(rows[0]) == METRICS_FIELDS


def test_what_is_not_finite_is_null(tmp_path):
    run = RunDirectory(tmp_path)
    run.append_metrics(
        metrics_row(1, loss=float("nan"), grad_norm=np.float32("inf"), loss_by_source={"a": float("-inf")})
    )
    assert "NaN" not in run.metrics_file.read_text()
    (row,) = run.read_metrics()
    assert (row["loss"], row["grad_norm"], row["loss_by_source"]) == (None, None, {"a": None})


def test_further_fields_follow_and_survive_a_cut(tmp_path):
    run = RunDirectory(tmp_path)
    old = {field: 0 for field in METRICS_FIELDS if field != "attention_span"} | {"step": 1}
    run.metrics_file.write_text(json.dumps(old) + "\n")  # as versions wrote it that did not keep it
    further = {"balance": np.float32("nan"), "load": np.asarray([1.5, np.inf], np.float32)}
    for step in (2, 3):
        run.append_metrics(further | metrics_row(step))
    run.cut(2)
    before, row = run.read_metrics()
    assert before == dict.fromkeys(METRICS_FIELDS, 0) | {"step": 1, "attention_span": None}
    assert tuple(row) == (*METRICS_FIELDS, "balance", "load")
    assert (row["balance"], row["load"]) == (None, [1.5, None])


def test_missing_fields_are_refused(tmp_path):
    run = RunDirectory(tmp_path)
    with pytest.raises(ValueError, match=r"missing fields \['loss'\]"):
        run.append_metrics({field: None for field in METRICS_FIELDS if field != "loss"})
    with pytest.raises(ValueError, match=r"missing fields \['tokens'\]"):
        run.append_eval({field: None for field in EVAL_FIELDS if field != "tokens"})
    assert not run.metrics_file.exists()


def test_a_full_disk_is_one_line(tmp_path):
    run = RunDirectory(tmp_path)
    run.metrics_file.symlink_to("/dev/full")
    with pytest.raises(TrainingError, match=r"metrics.jsonl: cannot be written \(No space left on device\)"):
        run.append_metrics(metrics_row(1))


def test_a_directory_that_is_removed_meanwhile_is_not_made_again(tmp_path):
    """It would lack its config.json, and whoever removed it would find it there again."""
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(
        TrainingError, match=r"metrics.jsonl: cannot be written \(No such file or directory\)"
    ):
        run.append_metrics(metrics_row(1))
    assert not run.path.exists()


def test_a_torn_line_is_forgotten(tmp_path):
    run = RunDirectory(tmp_path)
    for step in range(1, 6):
        run.append_metrics(metrics_row(step, loss=step / 7))
        run.append_eval(eval_row(step))
    whole = run.metrics_file.read_text()
    for length in range(1, len(whole.splitlines()[-1]) + 1):
        run.metrics_file.write_text(whole[:-length])
        assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4]
    run.cut(4)
    run.append_metrics(metrics_row(5))
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in run.read_eval()] == [1, 2, 3, 4]


def test_cut_keeps_the_kept_lines_as_they_were(tmp_path):
    run = RunDirectory(tmp_path)
    for step in range(1, 10):
        run.append_metrics(metrics_row(step, loss=np.pi / step))
    lines = run.metrics_file.read_text().splitlines()
    run.cut(6)
    assert run.metrics_file.read_text().splitlines() == lines[:6]
    assert not run.eval_file.exists()
    run.cut(0)
    assert run.metrics_file.read_text() == ""


def test_a_start_from_nothing_evaluates_again(tmp_path):
    run = RunDirectory(tmp_path)
    for step in (0, 5, 10):
        run.append_eval(eval_row(step))
    run.cut(5)
    assert [row["step"] for row in run.read_eval()] == [0, 5]
    run.cut(0)
    assert run.read_eval() == []


DAMAGED = {
    "torn": b'{"step": ',
    "nulls": b"\0" * 50,
    "blank": b"",
    "not UTF-8": b"\xff\xfe",
    "a number": b"5",
    "null": b"null",
    "no step": b'{"a": 1}',
    "a step that is none": b'{"step": true}',
    "nested": b"[" * 100_000,
}


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("ended", [b"\n", b""], ids=["", "no newline"])
def test_what_a_resume_would_cut_does_not_stop_it(tmp_path, damaged, ended, caplog):
    run = RunDirectory(tmp_path)
    for step in range(1, 8):
        run.append_metrics(metrics_row(step))
        run.append_eval(eval_row(step))
    for path in (run.metrics_file, run.eval_file):
        whole = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([*whole[:5], damaged + b"\n", whole[5], damaged + ended]))
    run.cut(5)
    assert run.metrics_file.read_bytes().splitlines(keepends=True)[-1] == whole_line(metrics_row(5))
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in run.read_eval()] == [1, 2, 3, 4, 5]
    assert not caplog.records
    run.metrics_file.write_bytes(damaged + b"\n")
    run.cut(0)
    assert run.metrics_file.read_bytes() == b""


def whole_line(row):
    return json.dumps(row).encode() + b"\n"


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_line_among_those_that_are_kept_is_one_line_with_its_remedy(tmp_path, damaged, caplog):
    run = RunDirectory(tmp_path)
    lines = [whole_line(metrics_row(step)) for step in range(1, 8)]
    run.metrics_file.write_bytes(b"".join([*lines[:2], damaged + b"\n", *lines[2:]]))
    for read in (run.read_metrics, lambda: run.cut(5)):
        with pytest.raises(InputError, match=r"metrics.jsonl: line 3 is damaged.*`sed -i 3d FILE`"):
            read()
    subprocess.run(["sed", "-i", "3d", run.metrics_file], check=True)
    run.cut(5)
    assert len(run.read_metrics()) == 5 and not caplog.records


def test_rows_that_are_lost_are_said_to_be(tmp_path, caplog):
    run = RunDirectory(tmp_path)
    run.append_metrics(metrics_row(1))
    with run.metrics_file.open("ab") as file:
        file.write(b"\0" * 10 + b"\n")
    run.cut(3)
    run.metrics_file.unlink()
    run.cut(3)
    run.cut(0)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{run.metrics_file}: has no rows of steps {first} to 3; going on" for first in (2, 1)]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_one_line(tmp_path, monkeypatch, code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(InputError, match=f"locks no file .{os.strerror(code)}.*give a directory on"):
        RunDirectory(tmp_path).locked().__enter__()


def test_a_run_keeps_its_tokenizer_once(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path / "run")
    files = {"tokenizer.json": b"{}\n", "documents.json": b"\xff", "merges.txt": b"a\r\n"}
    written = []

    def noted(path, content):
        written.append(path.name)
        write_atomically(path, content)

    monkeypatch.setattr("jaxthru.training.run_directory.write_atomically", noted)
    run.keep_tokenizer(lambda: files)
    assert {path.name: path.read_bytes() for path in run.tokenizer.iterdir()} == files
    assert written[-1] == "tokenizer.json"  # a kill before it leaves what the next start writes again
    run.keep_tokenizer(lambda: {"tokenizer.json": b"other"})
    assert len(written) == 3 and not run.holds_run()
    (run.tokenizer / "tokenizer.json").unlink()
    run.keep_tokenizer(lambda: files)
    assert {path.name: path.read_bytes() for path in run.tokenizer.iterdir()} == files


def test_a_run_keeps_what_published_weights_say_about_themselves(tmp_path, caplog, monkeypatch):
    folder, run = tmp_path / "weights", RunDirectory(tmp_path / "run")
    (folder / "LICENSES").mkdir(parents=True)
    names = ("config.json", "generation_config.json", "README.md", "LICENSE", "LICENSE.txt")
    for name in (*names, "model.safetensors", "tokenizer.json", "modeling_x.py"):
        (folder / name).write_bytes(name.encode() + b"\r\n")
    (folder / "LICENSE.long").write_bytes(bytes(101))
    monkeypatch.setattr("jaxthru.training.run_directory.BASE_BYTES", 100)
    run.keep_base(folder)
    kept = {path.name: path.read_bytes() for path in run.base.iterdir()}
    assert kept == {name: name.encode() + b"\r\n" for name in names}
    assert "LICENSE.long: 101 bytes, is not kept with the run" in caplog.text
    (folder / "config.json").write_text("other")
    run.keep_base(folder)
    assert (run.base / "config.json").read_bytes() == kept["config.json"]


APPEND = """
import sys
from jaxthru.training.run_directory import METRICS_FIELDS, RunDirectory
run = RunDirectory(sys.argv[1])
for step in range(1, 1_000_000):
    run.append_metrics({**dict.fromkeys(METRICS_FIELDS, 0.1), "step": step})
    if step == 50:
        print("ready", flush=True)
"""


def test_a_kill_loses_at_most_the_line_in_flight(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", APPEND, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.kill()
    process.communicate()
    steps = [row["step"] for row in RunDirectory(tmp_path).read_metrics()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 50


def test_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    run = RunDirectory(tmp_path)
    run.write_environment()
    found = json.loads(run.environment.read_text())
    assert found["flags"]["NCCL_NVLS_ENABLE"] == "0"
    assert "xla_force_host_platform_device_count" in found["flags"]["XLA_FLAGS"]
    assert found["devices"] == {"kind": "cpu", "count": 8}
    assert found["processes"] == 1
    assert set(found["versions"]) >= {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"}
    assert all(found["versions"].values())
    assert "PATH" not in found["flags"]


def test_atomic_writing_leaves_the_old_text_or_the_new(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_atomically(path, "old")

    def killed(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    monkeypatch.undo()
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


TWO_PROCESSES = """
import sys
import jax
from jaxthru.runtime.distributed import initialize
from jaxthru.runtime.errors import InputError, TrainingError
from jaxthru.training.run_directory import RunDirectory

initialize()
run = RunDirectory(sys.argv[1])
locked = run.locked()
for refused in (locked.__enter__, lambda: run.cut(1), lambda: RunDirectory.fresh("x", run.metrics_file)):
    try:
        refused()
    except InputError as error:
        print(error, flush=True)
print(RunDirectory.fresh("a" * 100, run.path / ("b" * 200) / ("c" * 200)).path.name, flush=True)
jax.distributed.shutdown()
"""


def test_what_stops_the_first_process_stops_all(tmp_path):
    """The others would wait for it in vain, for minutes, and then abort."""
    (tmp_path / "two.py").write_text(TWO_PROCESSES)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{\n{"step": 1}\n')
    with RunDirectory(tmp_path / "run").locked():
        for output in finish(start_processes(tmp_path / "two.py", str(tmp_path / "run"))):
            assert "another process trains here now" in output and "line 1 is damaged" in output
            assert "metrics.jsonl/x: no run directory can be made in it (Not a directory)" in output
            assert output.splitlines()[-1] == "1"


def test_going_on_names_a_family_of_one_s_own(tmp_path):
    """What is stored imports no code, so the command has to."""
    run = RunDirectory(tmp_path)
    run.config.write_text(json.dumps({"model": {"family": "mine.shape"}, "train": {"steps": 4}}))
    assert overrides(run, "resume") == ["model.family=mine.shape"]
    assert overrides(run, LONGER) == ["model.family=mine.shape", "train.steps=8"]
    run.config.write_text(json.dumps({"model": {"family": "llama"}, "train": {"steps": 4}}))
    assert overrides(run, "resume") == []
