"""Supervised runs lose processes, and go on by themselves, on the same batches."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recorded_train import RECORDED, recorded_rows
from runs import Workplace, make_workplace

from jaxthru.training.supervisor import steps_done

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
SETTINGS = {"mesh__data": -1, "mesh__fsdp": 1, "evaluate__rows": 0, "data__packing": "best_fit"}
SETTINGS |= {"model__layers": 1}


class Supervised:
    """A run under a supervisor, whose batches are written down."""

    def __init__(self, place: Workplace, name: str, *options: str, **settings):
        self.path, self.records = place.folder / name, place.folder / f"records-{name}"
        train = place.command(name, **SETTINGS | settings)[3:]
        words = [sys.executable, "-m", "jaxthru.supervise", "--pause", "0", *options, "--"]
        words += [sys.executable, str(RECORDED), str(self.records), *train]
        self.log = place.folder / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, env=place.environment(), stdout=log, stderr=log)

    def children(self) -> dict[int, int]:
        """Returns {index: process id} of the run's processes."""
        found, own = {}, self.process.pid
        for child in Path(f"/proc/{own}/task/{own}/children").read_text().split():
            try:
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                given = dict(each.split(b"=", 1) for each in variables if b"=" in each)
            except OSError:
                continue
            found[int(given.get(b"JAX_PROCESS_ID", b"0"))] = int(child)
        return found

    def send(self, number: int, after: int, index: int) -> int:
        """Sends a signal to one of the processes once so many more steps are done; returns how many are."""
        begun, deadline = None, time.monotonic() + 240
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.said()
            done = steps_done(self.path)
            # What is there at first may be cut as the run resumes.
            begun = done if begun is None or done < begun else begun
            if done >= begun + after and index in (children := self.children()):
                os.kill(children[index], number)
                return done
            time.sleep(0.01)
        raise AssertionError(self.said())

    def said(self) -> str:
        return self.log.read_text()

    def finish(self, code: int = 0) -> list[str]:
        """Returns what the supervisor said, once it has ended with this code."""
        try:
            assert self.process.wait(timeout=400) == code, self.said()
        finally:
            self.process.kill()
        return [line for line in self.said().splitlines() if line.startswith("supervise: ")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_workplace(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def whole(place):
    """A run of one process that nothing disturbed."""
    run = Supervised(place, "whole")
    assert run.finish() == []
    return run


@pytest.mark.slow(minutes=0.5)
def test_after_losses_it_goes_on_with_fewer_processes_on_the_same_batches(place, whole):
    """Two, then one; the batches are those of an undisturbed run by one, to the bit."""
    rows = recorded_rows(whole.records)
    assert list(rows) == list(range(1, 41)) and all(len(of_step) == 8 for of_step in rows.values())
    run = Supervised(place, "fewer", "--processes", "2,1", "--tries", "1")
    run.send(signal.SIGKILL, after=8, index=1)
    (line,) = run.finish()
    assert "of 2 ended with exit code" in line and "going on with 1 processes" in line
    assert recorded_rows(run.records) == rows
    found, expected = place.losses("fewer"), place.losses("whole")
    assert found.keys() == expected.keys()
    for step in expected:  # sums over other numbers of devices
        assert found[step] == pytest.approx(expected[step], rel=1e-4)


@pytest.mark.slow(minutes=1)
def test_a_run_that_is_killed_and_stopped_again_and_again_ends_as_if_it_was_not(place, whole):
    """Of two processes, lost at random moments and told to stop: no row is lost, every loss is the same.
    Told to stop itself, the supervisor has all processes save, and ends."""
    seed = int(os.environ.get("SEED", "32"))
    print("seed", seed)
    draw, options = random.Random(seed), ("--processes", "2", "--tries", "9")
    pair = Supervised(place, "pair", *options)
    assert pair.finish() == []
    run = Supervised(place, "run", *options)
    for number in (signal.SIGKILL, signal.SIGTERM):
        run.send(number, after=draw.randint(2, 9), index=draw.randint(0, 1))
        starts, deadline = len(run.said().split("starting again")), time.monotonic() + 120
        while len(run.said().split("starting again")) == starts and time.monotonic() < deadline:
            assert run.process.poll() is None, run.said()
            time.sleep(0.02)
    begun = steps_done(run.path)
    while steps_done(run.path) in range(begun + 1):  # a resume may cut what is there
        assert run.process.poll() is None, run.said()
        time.sleep(0.01)
    run.process.terminate()
    *lines, last = run.finish(143)
    assert len(lines) == 2 and last == "supervise: SIGTERM is passed on; the run is not started again"
    assert 0 < max(place.checkpoints("run")) == steps_done(run.path) < 40
    assert Supervised(place, "run", *options).finish() == []
    assert recorded_rows(run.records) == recorded_rows(pair.records) == recorded_rows(whole.records)
    assert place.losses("run") == place.losses("pair")
