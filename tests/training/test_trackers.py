"""Experiment trackers get the rows of metrics.jsonl, and can end no run."""

import json
import logging
import struct
import sys
import threading
import time
import types
from collections.abc import Iterator

import pytest

from jaxthru.runtime.errors import InputError, TrainingError
from jaxthru.training.metrics import TRACKERS, MetricsConfig
from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.sinks import tracker

ROWS = [
    {"step": step, "loss": 7.0 / step, "loss_by_source": {"prose": 0.1 * step}, "mfu": None}
    for step in (1, 2, 3)
]


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    run = RunDirectory(tmp_path / "quickstart" / "1")
    run.path.mkdir(parents=True)
    run.config.write_text(json.dumps({"train": {"steps": 3}, "data": {"mix": "quickstart"}}))
    return run


class Kept:
    """A tracker that keeps what it is told. opened: the ids that it was asked to continue."""

    def __init__(self):
        self.opened, self.logged, self.finished, self.before = [], [], [], lambda step: None

    def open_tracker(self, run, known):
        self.opened.append(known)
        self.id = known or "first"
        return self

    def log(self, step, values):
        self.before(step)
        self.logged.append((step, values))

    def finish(self, failed):
        self.finished.append(failed)


@pytest.fixture
def kept(monkeypatch) -> Kept:
    kept = Kept()
    module = types.SimpleNamespace(open_tracker=kept.open_tracker)
    monkeypatch.setitem(sys.modules, "jaxthru.training.sinks.wandb", module)
    return kept


def test_gets_the_numbers_of_each_row(run, kept):
    with tracker.tracked(("wandb",), run) as (sink,):
        for row in ROWS:
            sink.step(row)
        sink.evaluation({"step": 3, "loss": 2.5})
    steps = [
        (row["step"], {"train/loss": row["loss"], "train/loss_by_source/prose": 0.1 * row["step"]})
        for row in ROWS
    ]
    assert kept.logged == [*steps, (3, {"eval/loss": 2.5})] and kept.finished == [False]


def test_a_resumed_run_continues_in_the_same_one(run, kept):
    for _ in range(2):
        with tracker.tracked(("wandb",), run) as (sink,):
            sink.step(ROWS[0])
    assert kept.opened == [None, "first"]
    assert json.loads((run.path / "trackers.json").read_text()) == {"wandb": "first"}


def test_an_error_in_training_passes_and_the_tracker_hears_of_it(run, kept):
    with pytest.raises(TrainingError, match="no number"), tracker.tracked(("wandb",), run) as (sink,):
        sink.step(ROWS[0])
        raise TrainingError("no number")
    assert len(kept.logged) == 1 and kept.finished == [True]


@pytest.mark.parametrize("error", [RuntimeError("quota\nexceeded"), SystemExit(3), KeyboardInterrupt()])
def test_one_that_raises_is_a_warning(run, kept, caplog, error):
    def fail(step):
        if step == 2:
            raise error

    kept.before = fail
    with caplog.at_level(logging.WARNING), tracker.tracked(("wandb",), run) as (sink,):
        for row in ROWS:
            sink.step(row)
    assert [step for step, _ in kept.logged] == [1]
    (record,) = caplog.records
    said = record.getMessage()
    assert f"wandb ended with {type(error).__name__}" in said and "\n" not in said and "metrics.jsonl" in said


def test_one_that_never_returns_is_left_behind(run, kept, caplog, monkeypatch):
    forever = threading.Event()
    kept.before = lambda step: forever.wait(60)
    with caplog.at_level(logging.WARNING), tracker.tracked(("wandb",), run, seconds=0.1) as (sink,):
        for row in ROWS:
            sink.step(row)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "has not ended" in said[0] and tracker.left_behind()
    forever.set()
    sink._thread.join(10)
    assert not tracker.left_behind()


def test_one_that_falls_behind_is_told_once(run, kept, caplog, monkeypatch):
    turn = threading.Semaphore(0)
    kept.before = lambda step: turn.acquire(timeout=60)
    monkeypatch.setattr(tracker, "WAITING_MOST", 2)
    with caplog.at_level(logging.WARNING), tracker.tracked(("wandb",), run) as (sink,):
        for row in ROWS * 3:
            sink.step(row)
            turn.release() if caplog.records else None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "2 rows waiting" in said[0]
    turn.release(9)


def test_several_are_waited_for_together(run, kept, monkeypatch):
    forever, module = threading.Event(), types.SimpleNamespace(open_tracker=lambda *_: forever.wait(60))
    for name in TRACKERS:
        monkeypatch.setitem(sys.modules, f"jaxthru.training.sinks.{name}", module)
    began = time.monotonic()
    with tracker.tracked(TRACKERS, run, seconds=1.0):
        pass
    assert 1.0 <= time.monotonic() - began < 2.8
    forever.set()


def test_ctrl_c_waits_no_longer(run, kept, caplog, monkeypatch):
    forever = threading.Event()
    kept.before = lambda step: forever.wait(60)
    waited = []

    def join(thread, seconds):
        waited.append(seconds)
        if len(waited) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", join)
    with caplog.at_level(logging.WARNING), tracker.tracked(("wandb",), run) as (sink,):
        sink.step(ROWS[0])
    forever.set()
    assert waited[1:] == [0.0] and "not waited for any longer" in caplog.records[0].getMessage()


def test_names_that_are_none(run):
    with pytest.raises(InputError, match=r"'wandv' is none of wandb, mlflow, trackio.*wandb"):
        MetricsConfig(trackers=("wandv",))
    with pytest.raises(InputError, match="names mlflow twice"):
        MetricsConfig(trackers=("mlflow", "mlflow"))


def test_one_that_is_not_installed(monkeypatch):
    def check():
        with pytest.raises(InputError, match="mlflow is not installed; pip install mlflow"):
            tracker.check_trackers(MetricsConfig(trackers=("mlflow",)))

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check()
    folder = types.SimpleNamespace(origin=None)  # as one that MLflow's files are in
    monkeypatch.setattr("importlib.util.find_spec", lambda name: folder)
    check()


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """Yields the records of a file in LevelDB's log format, as W&B writes it: behind 7 bytes of its own,
    blocks of 32 KiB hold pieces of checksum, length and kind (1 whole, 2 first, 3 middle, 4 last)."""
    place, data = 7, b""
    while place + 7 <= len(log):
        if 32768 - place % 32768 < 7:  # no room for a header
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<4xHB", log, place)
        data += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield data
            data = b""


def numbers_of(name: str, run: RunDirectory, identity: str) -> list[tuple[int, str, float]]:
    """Returns (step, name, value) of what a tracker keeps of a run."""
    if name == "mlflow":
        from mlflow.tracking import MlflowClient

        client = MlflowClient()
        keys = client.get_run(identity).data.metrics
        return [
            (each.step, key, each.value) for key in keys for each in client.get_metric_history(identity, key)
        ]
    if name == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        rows = SQLiteStorage.get_logs(tracker.PROJECT, identity)
        return [(row["step"], key, value) for row in rows for key, value in row.items() if "/" in key]
    from wandb.proto import wandb_internal_pb2

    found = []
    files = sorted((run.path / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.name for file in files} == {f"run-{identity}.wandb"}
    for file in files:
        for data in leveldb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            found += [(row["step"], key, value) for key, value in row.items() if "/" in key]
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("name", TRACKERS)
def test_each_tracker_holds_what_was_recorded(run, name, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(run.path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{run.path}/mlflow.db")
    rows = [*ROWS, {"step": 4, "loss": 1 / 3, "loss_by_source": {"prose": 1e-30}}]
    for part in (rows[:2], rows[2:]):  # a run, and its continuation
        with tracker.tracked((name,), run) as (sink,):
            for row in part:
                sink.step(row)
    wanted = [
        (row["step"], f"train/{key}", value)
        for row in rows
        for key, value in (("loss", row["loss"]), ("loss_by_source/prose", row["loss_by_source"]["prose"]))
    ]
    identity = json.loads(run.trackers.read_text())[name]
    assert sorted(numbers_of(name, run, identity)) == sorted(wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # theirs
def test_wandb_without_a_key_asks_for_none(run, monkeypatch, caplog):
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(run.path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(run.path))
    wandb.teardown()  # forgets the settings of tests before
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a prompt"))
    with caplog.at_level(logging.WARNING), tracker.tracked(("wandb",), run) as (sink,):
        sink.step(ROWS[0])
    assert "no API key" in caplog.text
    wandb.teardown()
