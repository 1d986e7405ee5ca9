"""Run directories in a bucket: checkpoints lie there, and so does what is written beside them."""

import fcntl
import json
import sys
from pathlib import Path

import fake_bucket
import pytest
from bucket_checkpoints import check_that_damage_is_passed_over, restored, save
from etils import epath
from runs import make_workplace

import jaxthru
from jaxthru import supervise
from jaxthru.build.language_model import folder_of
from jaxthru.runtime import bucket as bucket_addresses
from jaxthru.runtime.errors import InputError, TrainingError
from jaxthru.training import remote_run
from jaxthru.training.checkpoint import CheckpointError
from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.tier import COMMITTED, saved_steps

URL = "gs://bucket/runs/one"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    return fake_bucket.begin(tmp_path_factory.mktemp("bucket"))


@pytest.fixture
def bucket(server, tmp_path, monkeypatch):
    server.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return server


def test_checkpoints_lie_in_the_bucket_and_are_checked(bucket, caplog):
    check_that_damage_is_passed_over(RunDirectory(URL, trains=True), URL, caplog)


def test_what_a_killed_save_left_is_none(bucket):
    run = RunDirectory(URL, trains=True)
    save(run, 10, 20)
    (run.checkpoints / "20" / COMMITTED).unlink()
    assert saved_steps(run.checkpoints) == [10]
    assert restored(run) == 10
    assert not (run.checkpoints / "20").exists()
    save(run, 20)
    assert restored(run) == 20


def test_files_follow_before_a_checkpoint_counts(bucket, tmp_path, monkeypatch):
    run = RunDirectory(URL, trains=True)
    assert not run.holds_run() and run.where == URL and run.path.is_relative_to(tmp_path / "cache")
    run.config.write_text('{"train": {"steps": 7}}')
    run.tokenizer.mkdir()
    (run.tokenizer / "tokenizer.json").write_bytes(b"\x00tokens")
    run.metrics_file.write_text('{"step": 1}\n')
    save(run, 1)
    with run.metrics_file.open("a") as file:  # a kill leaves this row on this host alone
        file.write('{"step": 2}\n')
    there = epath.Path(URL)
    assert (there / "metrics.jsonl").read_text() == '{"step": 1}\n'
    again = RunDirectory(URL, trains=True)
    assert again.holds_run() and again.steps() == 7 and len(again.metrics_file.read_text().splitlines()) == 2
    (again.path / "leftover.json").write_text("{}")  # nobody has sent it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another host"))
    other = RunDirectory(URL, trains=True)
    assert other.metrics_file.read_text() == '{"step": 1}\n'
    assert (other.tokenizer / "tokenizer.json").read_bytes() == b"\x00tokens"
    other.metrics_file.write_text('{"step": 1}\n{"step": 2, "on": "another"}\n')
    other.config.unlink()
    with other.locked():
        pass
    assert not (there / "config.json").exists() and "another" in (there / "metrics.jsonl").read_text()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    back = RunDirectory(URL, trains=True)
    assert "another" in back.metrics_file.read_text() and not (back.path / "leftover.json").exists()
    assert RunDirectory(URL).metrics_file.read_text() == back.metrics_file.read_text()  # a reader


def test_another_run_of_the_same_name_takes_nothing_over(bucket):
    run = RunDirectory(URL, trains=True)
    run.metrics_file.write_text('{"step": 1}\n')
    bucket.clear()
    assert not RunDirectory(URL, trains=True).metrics_file.exists()


def test_one_job_at_a_time_trains_on_a_host(bucket):
    run = RunDirectory(URL, trains=True)
    with (run.path / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=f"^--run-dir {URL}: another process trains here now"):
            RunDirectory(URL, trains=True)


def test_a_bucket_that_cannot_be_written_fails_the_save_and_not_the_end(bucket, monkeypatch, caplog):
    run = RunDirectory(URL, trains=True)
    run.config.write_text("{}")

    def refused(*_, **__):
        raise PermissionError("403: no access")

    monkeypatch.setattr(remote_run.Mirror, "_send", refused)
    with pytest.raises(TrainingError, match=f"^{URL}: cannot be written \\(403: no access\\)"):
        run.send()
    with pytest.raises(CheckpointError, match=r"checkpoint 1 was not saved: .*cannot be written \(403"):
        save(run, 1)
    assert saved_steps(run.checkpoints) == []
    with run.locked():
        pass
    assert "not all of its files have been copied there" in caplog.text


def test_a_scheduler_counts_the_failures_of_a_run_in_a_bucket(bucket):
    run, words = RunDirectory(URL, trains=True), ["--", "--run-dir", URL]
    run.metrics_file.write_text('{"step": 4}\n')
    run.send()
    run.metrics_file.write_text('{"step": 4}\n{"step": 5}\n')  # of what was not saved
    assert [supervise.main(["--after", "137", *words]) for _ in range(2)] == [0, 0]
    counts = epath.Path(URL) / supervise.COUNTS
    assert json.loads(counts.read_text()) == {"furthest": 4, "failed": {"4": 2}}
    again = RunDirectory(URL, trains=True)
    again.metrics_file.write_text('{"step": 3}\n')  # it has gone on from there, and cut
    again.send()
    assert supervise.main(["--after", "137", *words]) == 0
    assert json.loads(counts.read_text())["failed"] == {"4": 2, "3": 1}
    assert RunDirectory(URL).read_metrics()[-1]["step"] == 3
    assert supervise.main(["--after", "1", *words]) == 1 and not counts.exists()


def test_a_run_in_a_bucket_is_supervised(bucket, capsys):
    run = RunDirectory(URL, trains=True)
    run.metrics_file.write_text('{"step": 4}\n')
    run.send()
    command = [sys.executable, "-S", "-c", "raise SystemExit(70)", "--run-dir", URL]
    assert supervise.main(["--pause", "0", "--tries", "2", "--", *command]) == 70
    first, second = capsys.readouterr().err.splitlines()
    assert "(hung) after step 4, failure 1 of 2 there" in first
    assert second.endswith("step 5 has failed 2 times, given up")


@pytest.mark.slow
def test_a_run_in_a_bucket_goes_on_without_its_mirror(bucket, tmp_path, monkeypatch):
    place = make_workplace(tmp_path)
    keys = place.settings | {"data.mix": tmp_path / "mix.toml", "data.store": tmp_path / "store"}
    keys |= {"evaluate.rows": 0, "checkpoint.every": 4, "optim.schedule": "constant"}

    def run(steps: int, where: str | Path) -> RunDirectory:
        settings = [f"{key}={value}" for key, value in (keys | {"train.steps": steps}).items()]
        return jaxthru.run(jaxthru.load_config("quickstart", settings), where)

    assert run(6, URL).where == URL
    assert [path.name for path in (epath.Path(URL) / "checkpoints").iterdir()] == ["4", "6"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another host"))
    found, whole = run(9, URL).metrics(), run(9, tmp_path / "whole").metrics()
    assert list(found["step"]) == list(range(1, 10)) and list(found["loss"]) == list(whole["loss"])
    there = (epath.Path(URL) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in there] == list(whole["loss"])


@pytest.mark.parametrize(
    "url, said",
    [
        ("az://bucket/run", "az:// is not supported: checkpoints are written to gs://, s3:// and mounted"),
        ("https://bucket/run", "https:// is not supported"),
        ("gs://bucket", "names no folder of a bucket, as gs://BUCKET/RUN"),
        ("gs://", "names no folder of a bucket"),
        ("s3://bucket/", "names no folder of a bucket, as s3://BUCKET/RUN"),
    ],
)
def test_other_addresses_are_refused(url, said):
    with pytest.raises(InputError, match=f"^--run-dir {url}: {said}"):
        RunDirectory(url)


@pytest.mark.parametrize("scheme, library, login", [("gs", "gcsfs", "gcloud"), ("s3", "s3fs", "aws")])
def test_a_missing_library_and_missing_credentials_are_said(monkeypatch, scheme, library, login):
    url = f"{scheme}://bucket/run"

    class Refuses:
        def exists(self):
            raise ImportError("Install it") if self.missing else OSError("Anonymous caller\nhas no access")

    monkeypatch.setattr(bucket_addresses.epath, "Path", lambda url: Refuses())
    Refuses.missing = True
    said = f"needs {library}, which is not installed: `pip install {library}`$"
    with pytest.raises(InputError, match=said):
        RunDirectory(url)
    Refuses.missing = False
    with pytest.raises(InputError, match=rf"reached \(Anonymous caller has no access\); `{login} "):
        RunDirectory(url)


@pytest.mark.parametrize("scheme, copy", [("gs", "gcloud storage cp"), ("s3", "aws s3 cp")])
def test_a_run_in_a_bucket_is_not_used_from_there(scheme, copy):
    url = f"{scheme}://bucket/run"
    said = f"^{url}: a run in a bucket cannot be used from there; copy it first \\(`{copy} --recursive`"
    with pytest.raises(InputError, match=said):
        folder_of(url)
