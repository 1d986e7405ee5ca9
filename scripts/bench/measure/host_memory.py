"""Memory that the data of several training processes of a host takes, at one rate for all; one JSON line.

    python scripts/bench/measure/host_memory.py FOLDER READER [KEY=VALUE ...] [--trainers 8] [--rate 8]

READER is of `data_contenders`, KEYs are its own; `jaxthru_host` is told which trainer it is besides. FOLDER
is of `data_corpus`, its heavy sources made if missing. A trainer here imports all that a reader needs, JAX
with it, and trains nothing: its memory before it opens any data is what the same trainers have without data,
and is taken off. Then each takes batches, all together so many rows a second and no more, until the memory of
the whole tree of processes has stopped growing; what the tree has then, and at what rate, is what is printed.
"""

import argparse
import json
import os
import secrets
import select
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
from measure import loading

CHECKED_SECONDS, GROWN = 8.0, 1.01
"""Memory has stopped growing when it has grown by less in so many seconds, twice in a row."""
MEMORY = ("private_mb", "proportional_mb")


def said(arguments: argparse.Namespace) -> bool:
    """Says whether the parent has sent a line, which is read."""
    heard, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(heard and sys.stdin.readline())


def train(arguments: argparse.Namespace) -> None:
    """Is one of the trainers: opens its batches, takes them, and counts when it is told to."""
    warnings.simplefilter("ignore")
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Grain's worker processes ask for it
    if arguments.reader == "jaxthru_host":
        which = f"trainer={arguments.trainer} trainers={arguments.trainers} host={arguments.host}"
        arguments.words += which.split()
    open_batches = loading.opened(arguments)
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    batches = open_batches()
    rows, sequence = next(batches)["tokens"].shape
    first = time.perf_counter() - began
    print(json.dumps("first"), flush=True)
    pause = rows * arguments.trainers / arguments.rate
    while not said(arguments):
        loading.take(batches, pause, pause)
    taken, took = loading.take(batches, arguments.seconds, pause)
    found = {"samples_per_second": len(taken) * rows / took, "first_batch_seconds": first}
    found |= {"tokens_per_second": len(taken) * rows * sequence / took}
    print(json.dumps(found | {"batch_seconds_median": statistics.median(taken)}), flush=True)
    while not said(arguments):
        loading.take(batches, pause, pause)
    for process in loading.processes(os.getpid())[:0:-1]:
        process.kill()
    os._exit(0)


class Trainers:
    """The trainers of a host. memory: of all their processes, in MB, and how many these are."""

    def __init__(self, arguments: argparse.Namespace):
        host = f"jaxthru-bench-{secrets.token_hex(8)}"
        command = [sys.executable, __file__, str(arguments.folder), arguments.reader, *arguments.words]
        command += ["--trainers", str(arguments.trainers), "--rate", str(arguments.rate)]
        command += ["--seconds", str(arguments.seconds)]
        self.processes = []
        for trainer in range(arguments.trainers):
            whole = [*command, "--trainer", str(trainer), "--host", host]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.processes.append(subprocess.Popen(whole, **pipes))

    def tell(self) -> None:
        """Has all go on with what comes next."""
        for process in self.processes:
            process.stdin.write("\n")
            process.stdin.flush()

    def hear(self) -> list[Any]:
        """Waits until each has said something."""
        return [json.loads(process.stdout.readline()) for process in self.processes]

    def memory(self) -> dict[str, float]:
        found = [loading.held(process.pid) for process in self.processes]
        return {name: sum(each[name] for each in found) for name in (*MEMORY, "processes", "threads")}

    def settle(self, limit: float) -> None:
        """Waits until memory has hardly grown for some time."""
        before, ends, calm = self.memory()["private_mb"], time.monotonic() + limit, 0
        while calm < 2 and time.monotonic() < ends:
            time.sleep(CHECKED_SECONDS)
            now = self.memory()["private_mb"]
            calm = calm + 1 if now < GROWN * before else 0
            before = max(now, before)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what comes of it as it is asked for; this process looks on."""
    if arguments.trainer is not None:
        train(arguments)
    harness.need("psutil", "grain", "zstandard")
    if arguments.tiny:
        arguments.seconds, arguments.settle_seconds, arguments.rate = 0.5, 1.0, 64.0
    os.environ |= {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    import data_contenders
    import data_corpus

    data_corpus.make_heavy(arguments.folder, arguments.tiny, data_contenders.HEAVY_SEQUENCE)
    trainers = Trainers(arguments)
    trainers.hear()
    without = trainers.memory()
    trainers.tell()
    trainers.hear()
    trainers.settle(arguments.settle_seconds)
    trainers.tell()
    each = trainers.hear()
    whole = trainers.memory()
    trainers.tell()
    for process in trainers.processes:
        process.wait()
    total = {name: sum(of[name] for of in each) for name in ("samples_per_second", "tokens_per_second")}
    slowest = {name: max(of[name] for of in each) for name in ("first_batch_seconds", "batch_seconds_median")}
    taken_off = {name: whole[name] - without[name] for name in MEMORY}
    counts = {name: whole[name] for name in ("processes", "threads")}
    bare = {f"{name}_without_data": without[name] for name in MEMORY}
    about = {"reader": arguments.reader, "trainers": arguments.trainers}
    device = {"kind": loading.processor(), "count": os.cpu_count()}
    about |= {"device": device, "versions": harness.versions("jaxthru", "grain", "numpy", "tokenizers")}
    return about | total | slowest | taken_off | bare | counts | {"commit": harness.commit()}


option = harness.option
OPTIONS = (
    option("folder", type=Path),
    option("reader"),
    option("words", nargs="*", metavar="KEY=VALUE"),
    option("--trainers", type=int, default=1),
    option("--rate", type=float, default=8.0, help="rows a second that all take together"),
    option("--seconds", type=float, default=30.0, help="timed"),
    option("--settle-seconds", type=float, default=120.0, help="at most"),
    option("--tiny", action="store_true", help="a small corpus, a short time: does it run?"),
    option("--trainer", type=int, help="be this one of the trainers"),
    option("--host", default="", help="the name of the trainers' data server"),
)
main = harness.program(__doc__, measure, *OPTIONS, config=False, elsewhere=True)


if __name__ == "__main__":
    harness.end(main())
