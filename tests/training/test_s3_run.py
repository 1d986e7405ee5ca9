"""Run directories in buckets of S3, which a server on this host keeps; the clients are those of users."""

import json
import logging
import subprocess
import sys

import fsspec
import pytest
from bucket_checkpoints import check_that_damage_is_passed_over, restored, save
from etils import epath
from orbax.checkpoint._src.serialization import tensorstore_utils
from processes import finish, job
from runs import make_workplace

from jaxthru import supervise
from jaxthru.profile.show import command as profile_command
from jaxthru.runtime.errors import InputError
from jaxthru.training import s3
from jaxthru.training.checkpoint import CheckpointConfig, Checkpointer
from jaxthru.training.checksums import files_below
from jaxthru.training.remote_run import IDENTITY
from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.tier import COMMITTED, saved_steps

pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def server():
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    said = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "of a test",
        "AWS_SECRET_ACCESS_KEY": "of a test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in said.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3", use_listings_cache=False).mkdir("bucket")
        yield said
    server.stop()
    s3.where.cache_clear()


@pytest.fixture
def url(server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"s3://bucket/runs/{tmp_path.name}"


def test_a_checkpoint_is_written_and_read(url):
    run = RunDirectory(url, trains=True)
    run.metrics_file.write_text('{"step": 7}\n')
    save(run, 7)
    assert saved_steps(run.checkpoints) == [7] and restored(run) == 7
    assert (epath.Path(url) / "metrics.jsonl").read_text() == '{"step": 7}\n'


def test_a_bucket_that_is_not_there_is_not_made(server):
    with pytest.raises(InputError, match=r"^--run-dir s3://other/run: there is no bucket other, or"):
        RunDirectory("s3://other/run", trains=True)


def test_tensorstore_takes_the_credentials_that_are_there_or_says_that_it_cannot(
    server, url, tmp_path, monkeypatch
):
    assert s3.where()["aws_credentials"] == {"type": "environment"}
    monkeypatch.setattr(s3, "where", s3.where.__wrapped__)  # not of the environment before
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/config").write_text("[profile mine]\nregion = eu-west-1\n")
    keys = tmp_path / ".aws/credentials"
    keys.write_text("[mine]\naws_access_key_id = a\naws_secret_access_key = b\n")
    RunDirectory(url, trains=True)
    found = s3.where()
    assert found["endpoint"] == server["AWS_ENDPOINT_URL"] and found["driver"] == "s3"
    assert found["aws_credentials"]["credentials_file"] == str(keys)
    keys.write_text("")
    monkeypatch.setattr(s3, "where", lambda: found)
    with pytest.raises(InputError, match=rf"^--run-dir {url}: TensorStore, .* cannot \(.*credentials"):
        RunDirectory(url, trains=True)


def test_a_check_makes_no_file(url):
    with pytest.raises(InputError, match=rf"^--run-dir {url}: TensorStore, .* cannot \(finds no note there"):
        s3.check(epath.Path(url), "note")
    assert not epath.Path(url).exists()


def test_an_orbax_that_has_another_way_is_said(monkeypatch):
    monkeypatch.delattr(tensorstore_utils, "build_kvstore_tspec")
    with pytest.raises(InputError, match=r"^Orbax 0\S+ cannot be told of s3:// .*; `pip install orbax-che"):
        s3.teach_orbax.__wrapped__()


def test_a_folder_that_a_console_has_made_holds_not_itself(url):
    for name in ("", "/checkpoints", "/notes"):
        fsspec.filesystem("s3").pipe(f"{url}{name}/", b"")
    run = RunDirectory(url, trains=True)
    with Checkpointer(run.checkpoints, CheckpointConfig()):
        pass  # which clears away what no save has finished
    assert {path.name for path in files_below(epath.Path(url))} == {IDENTITY}
    assert fsspec.filesystem("s3").exists(f"{url}/checkpoints/")


@pytest.mark.slow
def test_damaged_and_unfinished_checkpoints_are_passed_over(url, caplog):
    run = RunDirectory(url, trains=True)
    check_that_damage_is_passed_over(run, url, caplog)
    (run.checkpoints / "30" / COMMITTED).unlink()  # as if it had been killed before
    assert restored(run) == 20 and not (run.checkpoints / "30").exists()
    with (run.path / "metrics.jsonl").open("w") as file:
        file.write('{"step": 20}\n')
    run.send()
    assert supervise.main(["--after", "137", "--", "--run-dir", url]) == 0
    assert json.loads((epath.Path(url) / supervise.COUNTS).read_text())["failed"] == {"20": 1}
    assert profile_command.main([url]) == 2  # none was recorded


@pytest.mark.slow
def test_two_processes_train_there_and_one_goes_on_elsewhere(url, tmp_path, monkeypatch):
    place = make_workplace(tmp_path)
    keys = {"mesh__data": 1, "mesh__fsdp": -1, "evaluate__rows": 0, "checkpoint__every": 4}
    command = place.command("run", **keys, train__steps=6)
    command[command.index("--run-dir") + 1] = url

    def train(processes: int) -> tuple[str, list[float]]:
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        here = place.environment(devices=2 // processes)
        jobs = [subprocess.Popen(command, env=here | said, **how) for said in job(processes)]
        said = finish(jobs, 120)[0]
        rows = [json.loads(line) for line in (epath.Path(url) / "metrics.jsonl").read_text().splitlines()]
        return said, [row["loss"] for row in rows]

    losses = train(2)[1]
    (epath.Path(url) / "checkpoints/6" / COMMITTED).unlink()  # as if killed before
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another host"))
    said, again = train(1)
    assert "resumed from step 4" in said and again == losses and len(losses) == 6


@pytest.mark.slow
def test_a_command_without_credentials_ends_before_it_begins(server, tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("HOME", str(tmp_path))
    command = [
        sys.executable,
        "-m",
        "jaxthru.train",
        "--config",
        "quickstart",
        "--run-dir",
        "s3://bucket/run",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert "s3://bucket/run: cannot be reached (Unable to locate credentials)" in ended.stderr
