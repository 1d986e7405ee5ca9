"""Runs of several processes that end at random and are started again: for scripts/faults.py.

Every process is forked from one that has imported all modules and used no device: it starts soon. Runs of
different numbers of processes go on beside each other, for much of a case is waiting.
"""

import atexit
import collections
import concurrent.futures
import ctypes
import functools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

import psutil
from faulting_checkpoints import damage
from processes import job
from runs import Workplace, make_workplace

PR_SET_PDEATHSIG = 1
"""Linux's number of what ends a process with the one that forked it."""
SOON = 30.0
"""Seconds from a fault to the end of all processes, at most."""
STEPS_APART = 6
KINDS = ("SIGKILL", "SIGTERM", "SIGSTOP", "full disk", "damaged checkpoint", "killed helpers")
AHEAD = 12
"""Steps after the loss of helpers: more than there are batches that they have made ahead."""
CODES = {
    "SIGKILL": {-9, 160},
    "SIGTERM": {143},
    "SIGSTOP": {-9, 160},
    "full disk": {1},
    "damaged checkpoint": {-9, 160},
    "killed helpers": {-9, 160},
}
"""How processes may end after a fault. A killed helper is started again, or its processes go on without: some
steps later, with others made since, they are killed."""


class Process:
    """A process of a run, forked. code: its exit code once it has ended; a signal's number is negative."""

    def __init__(self, argv: list[str], environment: dict[str, str], log: Path):
        self.log, self.code = log, None
        self.pid = os.fork()
        if not self.pid:
            self._become(argv, environment)

    def _become(self, argv: list[str], environment: dict[str, str]) -> None:
        code = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setpgid(0, 0)
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
            os.environ.update(environment)
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(line_buffering=True)
            from jaxthru.train import start

            start(argv)
        except SystemExit as ended:
            code = ended.code or 0
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Run:
    """A run of `count` processes that is started again and again."""

    def __init__(self, place: Workplace, name: str, count: int, steps: int):
        self.place, self.name, self.count, self.steps = place, name, count, steps
        self.folder, self.starts = place.folder / name, 0
        self.processes: list[Process] = []

    def start(self, every: int = 3) -> None:
        settings = {"mesh__fsdp": self.count, "train__steps": self.steps, "checkpoint__every": every}
        argv = self.place.command(self.name, **settings, checkpoint__keep=3)[3:]
        log = self.place.folder / f"{self.name}.{self.starts}"
        self.starts += 1
        self._before = self._inode()
        self.processes = [
            Process(argv, said, log.with_name(f"{log.name}.{index}.log"))
            for index, said in enumerate(job(self.count))
        ]

    def _inode(self) -> int | None:
        path = self.folder / "metrics.jsonl"
        return path.stat().st_ino if path.exists() else None

    def step(self) -> int:
        """Returns the step that this start has booked last, 0 before its first."""
        path = self.folder / "metrics.jsonl"
        if self._inode() in (None, self._before):  # what the start before left
            return 0
        return path.read_bytes().count(b"\n")

    def saved(self) -> int:
        return max(self.place.checkpoints(self.name), default=0)

    def saving(self) -> bool:
        return any(not path.name.isdecimal() for path in (self.folder / "checkpoints").glob("*"))

    def wait(self, condition, seconds: float = 240.0) -> bool:
        """Waits for a condition; returns whether it came before the end of a process."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not condition():
            if any(process.poll() is not None for process in self.processes):
                return False
            time.sleep(0.003)
        return condition()

    def ended(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while any([process.poll() is None for process in self.processes]) and time.monotonic() < until:
            time.sleep(0.01)
        return all(process.poll() is not None for process in self.processes)

    def finished(self) -> bool:
        """Has the run go to its end, with few checkpoints; says whether it did, and else ends it."""
        self.start(every=self.steps)
        if self.ended(1800) and {process.code for process in self.processes} == {0}:
            return True
        self.kill()
        return False

    def helpers(self) -> list[psutil.Process]:
        """Returns the data server and the token workers: one of the processes has started them for all."""
        trees = [psutil.Process(process.pid).children(recursive=True) for process in self.processes]
        return [each for tree in trees for each in tree if "jaxthru.data" in " ".join(each.cmdline())]

    def tail(self) -> list[str]:
        return [process.log.read_text()[-3000:] for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.send(signal.SIGKILL)
        self.ended(20)


def endings(count: int, seed: int, folder: Path, process_counts: list[int]) -> dict:
    """Ends runs `count` times; returns how many of each kind, seconds from a fault to the end of all, and
    what was wrong."""
    import grain  # noqa: F401 - before the first fork, as the next

    import jaxthru.train  # noqa: F401

    place = make_workplace(folder)
    mix = (folder / "mix.toml").read_text()
    (folder / "mix.toml").write_text(mix.replace("weight = 0.3\n", "weight = 0.3\nonline = true\n"))
    shares = [len(range(number, count, len(process_counts))) for number in range(len(process_counts))]
    forked = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(len(shares), forked) as pool:
        parts = list(pool.map(functools.partial(_ended_runs, place, seed), process_counts, shares))
    ended = [each for part, _ in parts for each in part]
    wrong = [each for _, others in parts for each in others] + _left_processes(folder)
    return {
        "endings": len(ended),
        "kinds": _counted(each["kind"] for each in ended),
        "within a save": sum(each["within a save"] for each in ended),
        "by processes": {
            processes: _counted(each["kind"] for each in part)
            | {"within a save": sum(each["within a save"] for each in part)}
            for processes, (part, _) in zip(process_counts, parts, strict=True)
        },
        "seconds": _quantiles(ended),
        "seconds by kind": {
            kind: _quantiles([each for each in ended if each["kind"] == kind]) for kind in KINDS
        },
        "seconds by processes": {
            processes: _quantiles(part) for processes, (part, _) in zip(process_counts, parts, strict=True)
        },
        "wrong": wrong,
    }


def _ended_runs(place: Workplace, seed: int, processes: int, count: int) -> tuple[list[dict], list[dict]]:
    """Ends a run of so many processes `count` times and has it finish; returns the endings and what was
    wrong."""
    draw, ended, wrong = random.Random(f"{seed} {processes}"), [], []
    steps = 40 + count * (STEPS_APART + 3)  # more than the endings take
    whole, run = (Run(place, f"{name}{processes}", processes, steps) for name in ("whole", "run"))
    if not whole.finished():
        return ended, [{"run": whole.name, "said": whole.tail()}]
    for _ in range(count):
        ending = _ending(draw, run)
        print(json.dumps(ending), flush=True)
        ended.append(ending)
        if ending["wrong"]:
            wrong.append({**ending, "said": run.tail()})
            run.kill()
    if not run.finished():
        return ended, [*wrong, {"run": run.name, "said": run.tail()}]
    return ended, wrong + compared(place, run, whole)


def _left_processes(folder: Path) -> list[dict]:
    """Returns which helpers of the data plane have outlived the runs that they worked for."""
    until = time.monotonic() + SOON
    while left := [each for each in psutil.process_iter() if _of(each, folder)]:
        if time.monotonic() > until:
            return [{"wrong": "left running", "command": each.cmdline()} for each in left]
        time.sleep(0.1)
    return []


def _of(process: psutil.Process, folder: Path) -> bool:
    """Says whether a process is one that a run in this folder has started."""
    try:
        started = process.environ().get("JAX_COMPILATION_CACHE_DIR") == f"{folder}/compiled"
        return started and "jaxthru.data" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _counted(kinds: Iterable[str]) -> dict[str, int]:
    return dict(sorted(collections.Counter(kinds).items()))


def _ending(draw: random.Random, run: Run) -> dict:
    """Starts a run, ends it by a fault, and looks how its processes end."""
    kind, victim = draw.choice(KINDS), draw.randrange(run.count)
    within, after = draw.random() < 0.5, draw.randrange(1, STEPS_APART)
    told = {"kind": kind, "processes": run.count, "victim": victim, "wrong": "", "seconds": None}
    begun = run.saved()
    run.start()
    come = run.wait(lambda: run.step() >= begun + after)
    inside = come and within and run.wait(run.saving, 5)
    told |= {"step": run.step(), "within a save": bool(inside)}
    if not come:
        return told | {"wrong": "ended before the fault"}
    process = run.processes[victim]
    if kind == "killed helpers":
        helpers = run.helpers()
        for each in helpers:
            each.kill()
        told["helpers"] = len(helpers)
        step = run.step()
        if not helpers or not run.wait(lambda: run.step() >= step + AHEAD):
            return told | {"wrong": "does not go on without its helpers" if helpers else "has no helpers"}
    since = time.monotonic()
    _break(kind, run, process)
    if kind == "SIGSTOP":
        others = [each for each in run.processes if each is not process]
        until = since + SOON
        while any([each.poll() is None for each in others]) and time.monotonic() < until:
            time.sleep(0.01)
        process.send(signal.SIGKILL)
    if not run.ended(2 * SOON):
        return told | {"wrong": "does not end"}
    told |= {"seconds": time.monotonic() - since, "codes": [each.code for each in run.processes]}
    if told["seconds"] > SOON:
        told["wrong"] = "took too long"
    elif not set(told["codes"]) <= CODES[kind]:
        told["wrong"] = "other exit codes"
    elif kind == "SIGTERM" and run.saved() != run.step():
        told["wrong"] = f"{run.saved()} of {run.step()} steps are saved"
    if kind == "damaged checkpoint" and len(run.place.checkpoints(run.name)) > 1:
        newest = run.saved()
        told["damage"] = damage(draw, run.folder / f"checkpoints/{newest}")
    elif kind == "damaged checkpoint":  # there is no older one
        told["kind"] = "SIGKILL"
    return told


def _break(kind: str, run: Run, process: Process) -> None:
    match kind:
        case "SIGTERM":
            process.send(signal.SIGTERM)
        case "SIGSTOP":
            process.send(signal.SIGSTOP)
        case "full disk":
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (512, 512))
        case _:
            process.send(signal.SIGKILL)


def compared(place: Workplace, run: Run, whole: Run) -> list[dict]:
    """Returns what of a run differs from that of an undisturbed one."""
    wrong = []
    try:
        same = place.losses(run.name) == place.losses(whole.name)
    except AssertionError:
        return [{"run": run.name, "wrong": "not one row for each step"}]
    if not same:
        wrong.append({"run": run.name, "wrong": "other losses"})
    for field in ("tokens", "loss_by_source", "learning_rate"):
        one, other = ([row[field] for row in place.metrics(each.name)] for each in (run, whole))
        if one != other:
            wrong.append({"run": run.name, "wrong": f"other {field}"})
    shutil.rmtree(run.folder / "damaged", ignore_errors=True)
    mine, others = (
        {path.relative_to(each.folder) for path in each.folder.rglob("*")} for each in (run, whole)
    )
    extra = sorted(str(path) for path in mine - others if "checkpoints" not in path.parts)
    extra += [str(path) for path in run.folder.glob("checkpoints/*") if not path.name.isdecimal()]
    extra += [str(path) for path in place.folder.rglob("*.partial")]
    if extra or len(place.checkpoints(run.name)) > 3:
        wrong.append({"run": run.name, "wrong": "left over", "files": extra[:9]})
    return wrong


def _quantiles(ended: list[dict]) -> dict[str, float]:
    """Returns quantiles of the seconds from a fault to the end of all processes."""
    ordered = sorted(each["seconds"] for each in ended if each["seconds"] is not None)
    if not ordered:
        return {}
    last = ordered[round(0.99 * (len(ordered) - 1))]
    return {"count": len(ordered), "p50": statistics.median(ordered), "p99": last, "most": ordered[-1]}
