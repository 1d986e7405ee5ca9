"""Experiment trackers (W&B, MLflow, Trackio) as sinks of a run's record.

metrics.jsonl stays the truth; a tracker is imported when it is chosen, and is handed the same rows by a
thread of its own. Whatever one does, be it slow, raise or never return, the steps go on: it is left behind
with a warning.
"""

import contextlib
import importlib
import importlib.util
import json
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import require
from jaxthru.training.metrics import MetricsConfig, Row
from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.sinks.tensorboard import scalars

log = logging.getLogger("jaxthru")

PROJECT = "jaxthru"
"""What runs are filed under where the tracker's own environment variable names nothing else."""
WAITING_MOST = 100_000
"""Rows that may wait for a tracker before it is left behind: some 100 MB."""
LAST_SECONDS = 60.0
"""How long the end of a run waits for trackers to send what they have."""
SILENT_SECONDS = 5.0
"""How long it does so without a word."""


class Tracker(Protocol):
    """A run in a tracker. id: by which it can be continued."""

    id: str

    def log(self, step: int, values: dict[str, float]) -> None:
        """Takes the numbers of a step, by names such as `train/loss`."""

    def finish(self, failed: bool) -> None:
        """Sends what is left, and ends the run. failed: training was ended by an error."""


def check_trackers(config: MetricsConfig) -> None:
    """Raises InputError, naming the package, for a tracker that is not installed."""
    for name in config.trackers:
        found = importlib.util.find_spec(name)
        # A folder of that name, as a tracker keeps its files in, is found as a package without an origin.
        here = found is not None and found.origin is not None
        require(here, f"metrics.trackers: {name} is not installed; pip install {name}, or leave it out")


@contextlib.contextmanager
def tracked(
    names: Sequence[str], run: RunDirectory, seconds: float = LAST_SECONDS
) -> Iterator[list["Background"]]:
    """Yields the sinks of trackers, and waits at the end until all rows are there, but no longer than so many
    seconds for all of them together, nor after Ctrl-C."""
    sinks, failed = [Background(name, run) for name in names], True
    try:
        yield sinks
        failed = False
    finally:
        ends = time.monotonic() + seconds
        for sink in sinks:
            sink.end(failed)
        for sink in sinks:
            try:
                sink.wait(max(0.0, ends - time.monotonic()))
            except KeyboardInterrupt:
                ends = 0.0
                sink.wait(0.0)


def left_behind() -> bool:
    """Says whether a tracker still works on its own. Its package may have the interpreter's end wait for
    it."""
    return any(thread.name.startswith(THREAD) for thread in threading.enumerate())


THREAD = "jaxthru-tracker-"


class Background:
    """A tracker's sink: rows wait in a queue for its thread, which also opens and ends the tracker's run."""

    def __init__(self, name: str, run: RunDirectory):
        self._name, self._run = name, run
        self._rows: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._left = self._failed = False
        self._thread = threading.Thread(target=self._work, name=f"{THREAD}{name}", daemon=True)
        self._thread.start()

    def step(self, row: Row) -> None:
        self._put("train", row)

    def evaluation(self, row: Row) -> None:
        self._put("eval", row)

    def end(self, failed: bool = False) -> None:
        """Says that no more rows come. failed: as for `Tracker.finish`."""
        self._failed = failed
        self._rows.put(None)

    def wait(self, seconds: float) -> None:
        """Waits for the tracker's run to end, or leaves it behind after so many seconds."""
        if self._left:
            return
        self._thread.join(min(SILENT_SECONDS, seconds))
        if self._thread.is_alive() and seconds > SILENT_SECONDS:
            log.info("waiting for %s, for %.0f s at most; Ctrl-C ends that", self._name, seconds)
            self._thread.join(seconds - SILENT_SECONDS)
        if self._thread.is_alive():
            self._leave("has not ended and is not waited for any longer")

    def _put(self, group: str, row: Row) -> None:
        if self._left:
            return
        if self._rows.qsize() < WAITING_MOST:
            self._rows.put((row["step"], {f"{group}/{name}": value for name, value in scalars(row)}))
        else:
            self.end()
            self._leave(f"has left {WAITING_MOST} rows waiting")

    def _work(self) -> None:
        try:
            module = importlib.import_module(f"jaxthru.training.sinks.{self._name}")
            tracker: Tracker = module.open_tracker(self._run, kept_id(self._run, self._name))
            keep_id(self._run, self._name, tracker.id)
            while (row := self._rows.get()) is not None:
                tracker.log(*row)
            tracker.finish(self._failed)
        except BaseException as error:  # whatever a tracker raises, it ends no run
            if not self._left:
                self._leave(f"ended with {type(error).__name__}: {' '.join(str(error).split())[:200]}")

    def _leave(self, why: str) -> None:
        self._left = True
        where = self._run.metrics_file
        log.warning("metrics.trackers: %s %s; all rows are in %s", self._name, why, where)


def kept_id(run: RunDirectory, name: str) -> str | None:
    """Returns by which id a tracker's run is continued; None where there is none yet."""
    return _ids(run).get(name)


def keep_id(run: RunDirectory, name: str, identity: str) -> None:
    """Keeps a tracker's id in trackers.json of the run directory."""
    with _WRITING:
        if (ids := _ids(run)).get(name) != identity:
            write_atomically(run.trackers, json.dumps(ids | {name: identity}, indent=2) + "\n")


_WRITING = threading.Lock()  # each tracker has a thread


def _ids(run: RunDirectory) -> dict[str, str]:
    return json.loads(run.trackers.read_text()) if run.trackers.exists() else {}


def run_name(run: RunDirectory) -> str:
    """Returns what a tracker shows a run as: the last two folders of its path."""
    path = run.path.absolute()
    return f"{path.parent.name}/{path.name}"


def configuration(run: RunDirectory) -> dict[str, object]:
    """Returns the run's resolved configuration, {"optim.learning_rate": 0.0003, ...}."""
    groups = json.loads(run.config.read_text())
    return {
        f"{group}.{key}": value
        for group, values in groups.items()
        for key, value in (values if isinstance(values, dict) else {"": values}).items()
    }
