"""The supervisor: starts a run again where that can mend its end, and gives up a step that keeps failing.

It loads no JAX, and takes no memory that the run would want.
"""

import collections
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jaxthru.runtime import exit_codes
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.bucket import AnyPath, reason_of
from jaxthru.runtime.errors import TrainingError, require
from jaxthru.runtime.nvml import bus_ids
from jaxthru.training.rows import last

log = logging.getLogger("jaxthru")

PATIENCE = 60.0
"""Seconds that the other processes of a run have to end by themselves, once one has failed. They take 30 to
find out and to say so."""
POLL = 0.05
LONGEST_PAUSE = 300.0
SIGNALS = frozenset(128 + number for number in signal.Signals)
SAYS_WHY = (exit_codes.CANNOT_GO_ON, exit_codes.BAD_INPUT)
COORDINATOR = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
WITH_PARENT = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))\n"  # PR_SET_PDEATHSIG
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Becomes a command that is told to stop when its supervisor is killed: nobody would hear of its end."""


def restartable(code: int, more: Collection[int] = ()) -> bool:
    """Says whether the same command, started again, may go on. code: as a shell has it, 128 + n for a process
    that signal n ended. more: codes that are said to be."""
    if code == exit_codes.INTERRUPTED:
        return False  # by a person
    return code in exit_codes.AGAIN or code in SIGNALS or code in more


@dataclasses.dataclass(frozen=True)
class End:
    """How the processes of a run ended. code: as a shell has it. process: whose it is, of so many."""

    code: int
    process: int = 0
    processes: int = 1

    def __str__(self) -> str:
        who = "the run" if self.processes == 1 else f"process {self.process} of {self.processes}"
        name = MEANING.get(self.code)
        if name is None and self.code in SIGNALS:
            name = signal.Signals(self.code - 128).name
        return f"{who} ended with exit code {self.code}" + (f" ({name})" if name else "")


MEANING = {
    exit_codes.CANNOT_GO_ON: "cannot go on",
    exit_codes.BAD_INPUT: "bad input",
    exit_codes.HUNG: "hung",
    exit_codes.INTERRUPTED: "Ctrl-C",
    exit_codes.STOPPED: "told to stop",
    exit_codes.PEER_LOST: "a peer was lost",
}


class Failures:
    """Counts how often each step has failed, until the run has got further than ever before."""

    def __init__(self, file: AnyPath | None = None):
        """file: where the counts outlast this process; None where they need not."""
        self._file = file
        self._furthest, self._counts = -1, collections.Counter()
        with contextlib.suppress(Exception):  # of whichever library reads a bucket, too
            kept = json.loads(file.read_text())
            self._furthest = int(kept["furthest"])
            self._counts.update({int(step): int(count) for step, count in kept["failed"].items()})

    def add(self, step: int) -> int:
        """Books that a run failed with so many steps done; returns how often it has now, at this one. Raises
        TrainingError if that cannot be kept: a step that keeps failing would be started for ever."""
        if step > self._furthest:
            self._counts.clear()
        self._furthest = max(step, self._furthest)
        self._counts[step] += 1
        self._keep({"furthest": self._furthest, "failed": dict(self._counts)})
        return self._counts[step]

    @property
    def since_progress(self) -> int:
        """Returns how many failures there were since the run last got further than ever."""
        return self._counts.total()

    def forget(self) -> None:
        """Begins anew: a run that has been given up may be started again once its cause is mended."""
        self._counts.clear()
        if self._file is not None:
            with contextlib.suppress(Exception):  # of whichever library; it is said already that it is over
                self._file.unlink(missing_ok=True)

    def _keep(self, counts: dict) -> None:
        if self._file is not None:  # in a bucket a file is whole or not there
            write = write_atomically if isinstance(self._file, Path) else type(self._file).write_text
            try:
                write(self._file, json.dumps(counts) + "\n")
            except Exception as error:  # of whichever library it is
                raise TrainingError(f"{self._file}: cannot be written ({reason_of(error)})") from error


def steps_done(run_dir: AnyPath) -> int:
    """Returns how many steps a run has recorded, as far as that can be read: in a bucket when it saves."""
    with contextlib.suppress(Exception):  # of whichever library reads a bucket: no run is given up for it
        if row := last(run_dir / "metrics.jsonl"):
            return row["step"]
    return 0


def stopped_exit_code(run_dir: AnyPath) -> int:
    """Returns the exit code of a run that was told to stop: `train.stopped_exit_code` of its config.json."""
    with contextlib.suppress(Exception):  # of whichever library reads a bucket
        return int(json.loads((run_dir / "config.json").read_text())["train"]["stopped_exit_code"])
    return exit_codes.STOPPED


class Processes:
    """The processes of one start: a command so many times, which find each other on this host."""

    def __init__(self, command: Sequence[str], count: int, patience: float = PATIENCE):
        """Raises InputError where `count` processes cannot share this host."""
        self._patience = patience
        prefix = [sys.executable, "-S", "-c", WITH_PARENT] if sys.platform == "linux" else []
        # In sessions of their own: a terminal's Ctrl-C comes through the supervisor, and comes once.
        self.running = [
            subprocess.Popen([*prefix, *command], env=environment, start_new_session=True)
            for environment in environments(count)
        ]

    def signal(self, number: int) -> None:
        """Passes a signal on to each."""
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def wait(self) -> End:
        """Returns how they ended: by the first that failed, as the others follow it. Where one has failed,
        those that have not ended by themselves within the patience are killed."""
        ended: dict[int, tuple] = {}
        failed_at, killed = None, False
        while len(ended) < len(self.running):
            now = time.monotonic()
            for index, process in enumerate(self.running):
                if index not in ended and (code := process.poll()) is not None:
                    code = 128 - code if code < 0 else code
                    # Of those that fail at once, one that says why; a lost peer is never the first.
                    cause = killed, code == exit_codes.PEER_LOST, now, code not in SAYS_WHY, index
                    ended[index] = (code == 0, cause, code)
                    failed_at = failed_at or (now if code else None)
            if failed_at and now - failed_at > self._patience and not killed:
                killed = True
                self.signal(signal.SIGKILL)
            time.sleep(POLL)
        index = min(ended, key=lambda each: ended[each][:2])
        return End(ended[index][2], index, len(self.running))


def environments(count: int) -> list[dict[str, str]]:
    """Returns the environment of each of `count` processes of one run on this host. They share its GPUs.

    Raises InputError if they cannot, or if this is one process of a larger job already.
    """
    if count == 1:
        return [dict(os.environ)]
    given = [name for name in COORDINATOR if os.environ.get(name)]
    several = f"--processes {count}: {', '.join(given)} says that a larger job started this; leave one out"
    require(not given, several)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    gpus = 0 if os.environ.get("JAX_PLATFORMS") == "cpu" else len(bus_ids())
    require(gpus % count == 0, f"--processes {count}: cannot share {gpus} GPUs evenly")
    each, found = gpus // count, []
    for index in range(count):
        values = (f"127.0.0.1:{port}", str(count), str(index))
        own = dict(zip(COORDINATOR, values, strict=True))
        if each:
            own["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(index * each, (index + 1) * each)))
        found.append(os.environ | own)
    return found


@dataclasses.dataclass(frozen=True)
class Supervisor:
    """Starts a command until it has finished.

    run_dir: that the command trains in. processes: how many of it; further numbers are fewer ones, each taken
    once a step has failed `tries` times with the number before. pause: seconds before the first restart;
    twice as many before each further one that made no progress, and LONGEST_PAUSE at most. retry: exit codes
    beside those of `exit_codes.AGAIN` and of signals after which to start again. patience: see `Processes`.
    """

    command: tuple[str, ...]
    run_dir: AnyPath
    processes: tuple[int, ...] = (1,)
    tries: int = 3
    pause: float = 5.0
    retry: tuple[int, ...] = ()
    patience: float = PATIENCE

    def run(self) -> int:
        """Returns the exit code: 0 once the command has finished, else that of its last end. SIGTERM and
        SIGINT are passed on, and end it all."""
        require(shutil.which(self.command[0]) is not None, f"{self.command[0]}: there is no such command")
        counts, failures = list(self.processes), Failures()
        with Stop() as stop:
            while True:
                started = Processes(self.command, counts[0], self.patience)
                stop.passes_to(started)
                end = started.wait()
                stop.passes_to(None)
                if stop.asked or end.code == exit_codes.FINISHED:
                    return end.code
                judged = judge(end, self.run_dir, failures, self.tries, self.retry)
                if judged.given_up and len(counts) > 1:
                    counts.pop(0)
                    failures.forget()
                    judged = Judgement(True, f"{judged.line}: going on with {counts[0]} processes")
                if not judged.again:
                    log.error("supervise: %s", judged.line)
                    return end.code
                pause = min(self.pause * 2 ** max(0, failures.since_progress - 1), LONGEST_PAUSE)
                log.warning("supervise: %s; starting again in %.3g s", judged.line, pause)
                if stop.within(pause):
                    by_a_person = stop.asked == signal.SIGINT
                    return exit_codes.INTERRUPTED if by_a_person else stopped_exit_code(self.run_dir)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Whether to start again, and why, in a line. given_up: a step has failed too often."""

    again: bool
    line: str
    given_up: bool = False


def judge(
    end: End, run_dir: AnyPath, failures: Failures, tries: int, retry: Collection[int] = ()
) -> Judgement:
    """Returns whether a run that ended so is to be started again. A stop is no failure of its step."""
    steps, stopped = steps_done(run_dir), stopped_exit_code(run_dir)
    said = f"{end} after step {steps}"
    if not restartable(end.code, (*retry, stopped)):
        why = {
            exit_codes.INTERRUPTED: "as a person asked",
            exit_codes.BAD_INPUT: "the input has to be mended",
        }.get(end.code, "a person has to look")
        return Judgement(False, f"{said}: not started again, {why}")
    if end.code == stopped:
        return Judgement(True, said)
    count = failures.add(steps)
    if count >= tries:
        return Judgement(False, f"{said}: step {steps + 1} has failed {count} times, given up", True)
    return Judgement(True, f"{said}, failure {count} of {tries} there")


class Stop:
    """SIGTERM and SIGINT, passed on to processes. A context manager. asked: the first that came, 0 for
    none."""

    def __init__(self):
        self.asked = 0
        self._to: Processes | None = None
        self._came = threading.Event()
        self._passing: collections.deque[int] = collections.deque()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def passes_to(self, processes: Processes | None) -> None:
        """Has signals go to these, also one that came before they were there."""
        self._to = processes
        self._pass()

    def within(self, seconds: float) -> bool:
        """Waits; says whether a signal came meanwhile, at once if it does."""
        return self._came.wait(seconds)

    def _handle(self, number: int, frame) -> None:
        if not self.asked:
            name = signal.Signals(number).name
            # os.write, because a handler may interrupt a print that holds the stream's lock.
            os.write(2, f"supervise: {name} is passed on; the run is not started again\n".encode())
            self.asked = number
        self._passing.append(number)
        self._came.set()
        self._pass()

    def _pass(self) -> None:
        """Passes each signal on once, though a handler may run at any place in here."""
        with contextlib.suppress(IndexError):
            while self._to is not None:
                self._to.signal(self._passing.popleft())
