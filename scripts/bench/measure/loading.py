"""One way of loading data, read for some seconds: tokens and samples per second, CPU, memory; one JSON line.

    python scripts/bench/measure/loading.py FOLDER READER [KEY=VALUE ...] [--seconds 4] [--rate ROWS_A_SECOND]

READER is of `data_contenders` or `data_peers`, KEYs are its own. FOLDER is of `data_corpus`, made if missing.
With --rate it is asked for so many rows a second and no more, from the time that its buffers are full (its
memory has stopped growing), and its memory is counted: private to each of its processes, and proportional.
"""

import argparse
import collections
import contextlib
import inspect
import json
import os
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import numpy as np
import slow_transform

from jaxthru.runtime.errors import InputError, require

PEERS = harness.ROOT / "build" / "bench_peers"


def processes(root: int) -> list:
    """Returns a process and all that it has started, directly or not, of psutil."""
    import psutil  # here, so that whoever has none is told so in a line

    return [psutil.Process(root), *psutil.Process(root).children(recursive=True)]


def held(root: int) -> dict[str, float]:
    """Returns what a tree of processes has: private and proportional MB, threads, processes, CPU seconds."""
    import psutil

    total = collections.Counter()
    for process in processes(root):
        with contextlib.suppress(psutil.Error):  # it has ended
            memory, times = process.memory_full_info(), process.cpu_times()
            total += {"private_mb": memory.uss / 1e6, "proportional_mb": memory.pss / 1e6}
            total += {
                "threads": process.num_threads(),
                "processes": 1,
                "cpu_seconds": times.user + times.system,
            }
    return dict(total)


def settle(batches: Iterator, pause: float, limit: float) -> None:
    """Takes batches, one each `pause` seconds, until memory has hardly grown for some seconds."""
    began = checked = time.monotonic()
    before = held(os.getpid())["private_mb"]
    while (now := time.monotonic()) - began < limit:
        next(batches)
        time.sleep(pause)
        if now - checked > 6:
            grown, checked = held(os.getpid())["private_mb"], now
            if grown < 1.01 * before:
                return
            before = grown


def take(batches: Iterator, seconds: float, pause: float) -> tuple[list[float], float]:
    """Takes batches for some seconds, one each `pause` seconds if it is so long; returns how long each took,
    and the seconds of all."""
    began, taken = time.perf_counter(), []
    while (took := time.perf_counter() - began) < seconds:
        if (early := len(taken) * pause - took) > 0:  # a sleep of no time still gives the lock away
            time.sleep(early)
        asked = time.perf_counter()
        next(batches)
        taken.append(time.perf_counter() - asked)
    return taken, max(took, len(taken) * pause)


def measure(open_batches: Callable[[], Iterator], arguments: argparse.Namespace) -> dict:
    """Returns what comes of reading."""
    began, own = time.perf_counter(), os.getpid()
    batches = open_batches()
    batch = next(batches)
    first = time.perf_counter() - began
    rows, sequence = batch["tokens"].shape
    # Packers leave room at the ends of rows.
    segments = batch.get("segment_ids", batch.get("tokens_segment_ids"))
    fill = 1.0 if segments is None else float((np.asarray(segments) > 0).mean())
    pause = rows / arguments.rate if arguments.rate else 0
    if pause:
        settle(batches, pause, arguments.settle_seconds)
    else:
        take(batches, arguments.seconds / 2, 0)
    before = held(own)
    taken, took = take(batches, arguments.seconds, pause)
    after = held(own)
    cpu = after.pop("cpu_seconds") - before["cpu_seconds"]
    samples = len(taken) * rows
    return {
        "first_batch_seconds": first,
        **(after if pause else {}),
        "samples_per_second": samples / took,
        "tokens_per_second": samples * sequence * fill / took,
        "batch_seconds_median": statistics.median(taken),
        "tokens_per_cpu_second": samples * sequence * fill / max(cpu, 0.01),
        "cores_used": cpu / took,
        "fill": fill,
        "bytes_per_token": sum(np.asarray(field).nbytes for field in batch.values()) / (rows * sequence),
        "shape": [rows, sequence],
    }


def opened(arguments: argparse.Namespace) -> Callable[[], Iterator]:
    """Returns what opens the batches that are asked for. Raises InputError."""
    import data_contenders
    import data_peers

    readers = data_contenders.READERS | data_peers.READERS
    known = arguments.reader in readers
    require(known, f"READER {arguments.reader}: not of {', '.join(readers)}")
    if module := data_peers.NEEDS.get(arguments.reader):
        sys.path.insert(0, str(PEERS / arguments.reader))
        harness.need(module)
    reader, keys = readers[arguments.reader], {}
    for key, _, value in (word.partition("=") for word in arguments.words):
        keys[key] = json.loads(value) if re.fullmatch(r"\d+|true|false", value) else value
    try:
        inspect.signature(reader).bind(arguments.folder, **keys)
    except TypeError as error:
        raise InputError(f"{arguments.reader} {' '.join(arguments.words)}: {error}") from error
    return lambda: iter(reader(arguments.folder, **keys))


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def load(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what comes of reading as it is asked for."""
    harness.need("psutil", "grain", "zstandard")
    if arguments.tiny:
        arguments.seconds, arguments.settle_seconds = 0.5, 5.0
    warnings.simplefilter("ignore")
    os.environ |= {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    import data_corpus
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Grain's worker processes ask for it
    open_batches = opened(arguments)
    data_corpus.make(arguments.folder, arguments.tiny)
    os.environ[slow_transform.VARIABLE] = str(arguments.milliseconds)
    found = measure(open_batches, arguments)
    device = {"kind": processor(), "count": os.cpu_count()}
    versions = harness.versions("jaxthru", "grain", "numpy", "tokenizers")
    about = {"reader": arguments.reader, "device": device, "versions": versions}
    return about | found | {"commit": harness.commit()}


option = harness.option
OPTIONS = (
    option("folder", type=Path),
    option("reader"),
    option("words", nargs="*", metavar="KEY=VALUE"),
    option("--seconds", type=float, default=4.0, help="timed"),
    option("--settle-seconds", type=float, default=300.0, help="at most, with --rate"),
    option("--rate", type=float, help="rows a second that it is asked for"),
    option("--milliseconds", type=float, default=0.0, help="of CPU that a text of a slow source takes"),
    option("--tiny", action="store_true", help="a small corpus, a short time: does it run?"),
)
main = harness.program(__doc__, load, *OPTIONS, config=False, elsewhere=True)


if __name__ == "__main__":
    code = main()
    for process in processes(os.getpid())[:0:-1]:  # what still reads ahead would keep it
        process.kill()
    harness.end(code)
