"""The data plane beside its peers: tokens per second, memory of many heavy sources, one slow source.

    python scripts/bench/data.py [--folder DIR] [--only packed heavy slow peers] [--output FILE] [--quick]

Each contender runs in a process of its own, and rounds go through all of them, so that no one has the quiet
hours; the table shows medians. What is expected, on two cores:

- packed: a batch is 24 bytes a token (six fields of four bytes) and is written once, so that ten GB/s of
  memory would give 400 M tokens/s and the calls for 64 rows leave about 150 M; each element of Grain's
  costs about 20 us before anything is done with its 2,048 tokens, which leaves 10 to 50 M.
- heavy: 100 sources × 4 workers × 500 records of 32 KiB that are read ahead, Grain's default, are 6.5 GB; one
  Source Loader is an interpreter, a tokenizer and what it works on, below 100 MB. `-short`: Grain told to
  read no further ahead than the rate asked for needs, by one worker, as many as jaxthru has Source Loaders
  (`-short-4`: by four).
- slow: a tenth of the samples at 4 ms of CPU is 0.4 ms a sample, so that two cores give 5,000 a second
  at most. jaxthru has two Source Loaders; Grain's default has threads alone, which the interpreter's lock
  holds to one core: 2,500. `-mp-prefetch` gives it two processes for all that it does, `-mp-slow` for the
  slow source.

`heavy` compares memory at one rate of samples: every contender is asked for a row each 1/--rate seconds and
no faster, from the time that its buffers are full (its memory has stopped growing). One that cannot keep up
sets the rate for all that follow it, so the one that needs most comes first.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import data_peers
import data_table
import harness
import numpy as np


def processes(root: int) -> list[int]:
    """Returns a process and all that it has started, directly or not."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def cpu_seconds(root: int) -> float:
    """Returns the CPU time of a tree of processes since it began."""
    ticks = 0
    for process in processes(root):
        with contextlib.suppress(OSError):
            fields = (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory(root: int) -> dict[str, float]:
    """Returns what a tree of processes holds: private and proportional MB, threads, processes."""
    total = {"private_mb": 0.0, "proportional_mb": 0.0, "threads": 0, "processes": 0}
    for process in processes(root):
        folder = Path("/proc") / str(process)
        try:
            lines = (folder / "smaps_rollup").read_text().splitlines()[1:]
            threads = len(list((folder / "task").iterdir()))
        except OSError:
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) / 1e3 for line in lines}
        total["private_mb"] += sizes["Private_Clean"] + sizes["Private_Dirty"]
        total["proportional_mb"] += sizes["Pss"]
        total["threads"] += threads
        total["processes"] += 1
    return total


def settled(batches: Iterator, rows: int, rate: float, limit: float) -> None:
    """Takes batches at the rate until memory has hardly grown for some seconds."""
    began = checked = time.monotonic()
    held = memory(os.getpid())["private_mb"]
    while (now := time.monotonic()) - began < limit:
        next(batches)
        time.sleep(rows / rate)
        if now - checked > 6:
            held, before, checked = memory(os.getpid())["private_mb"], held, now
            if held < 1.01 * before:
                return


def take(batches: Iterator, seconds: float, pause: float) -> tuple[int, float]:
    """Takes batches for some seconds, one each `pause` seconds if it is so long; returns how many, and the
    seconds that they took."""
    began, taken = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds:
        if (early := taken * pause - took) > 0:  # a sleep of no time still gives the interpreter's lock away
            time.sleep(early)
        next(batches)
        taken += 1
    return taken, max(took, taken * pause)


def measure(name: str, folder: Path, seconds: float, rate: float, quick: bool) -> dict:
    """Runs one contender in this process."""
    import data_contenders
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Grain's worker processes ask for it
    found = data_peers.contenders() if name.startswith("peers/") else data_contenders.contenders()
    began = time.perf_counter()
    batches = iter(found[name](folder))
    batch = next(batches)
    line = {"first_batch_seconds": time.perf_counter() - began}
    rows, sequence = batch["tokens"].shape
    # Packers leave room at the ends of rows.
    segments = batch.get("segment_ids", batch.get("tokens_segment_ids"))
    fill = 1.0 if segments is None else float((np.asarray(segments) > 0).mean())
    heavy = name.startswith("heavy/")
    if heavy:
        settled(batches, rows, rate, 5 if quick else 300)
    else:
        take(batches, seconds / 2, 0)
    cpu = cpu_seconds(os.getpid())
    taken, took = take(batches, seconds, rows / rate if heavy else 0)
    cpu = cpu_seconds(os.getpid()) - cpu
    if heavy:
        line |= memory(os.getpid())
    line |= {
        "samples_per_second": taken * rows / took,
        "tokens_per_second": taken * rows * sequence * fill / took,
        "tokens_per_cpu_second": taken * rows * sequence * fill / max(cpu, 0.01),
        "cores_used": cpu / took,
        "fill": fill,
        "bytes_per_token": sum(np.asarray(field).nbytes for field in batch.values()) / (rows * sequence),
        "shape": [rows, sequence],
    }
    return line


def start(name: str, arguments: argparse.Namespace) -> dict:
    """Runs one contender in a process of its own; returns its line, or what it said at its end."""
    command = [sys.executable, __file__, "--contender", name, "--folder", str(arguments.folder)]
    command += ["--seconds", str(arguments.seconds), "--rate", str(arguments.rate)]
    command += ["--quick"] * arguments.quick
    paths = [str(Path(__file__).resolve().parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if name in data_peers.NEEDS and arguments.peers:
        paths.insert(0, str(arguments.peers / Path(name).name))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with harness.session(command, env=environment, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            return {"error": "took over ten minutes"}
    lines = [line for line in output.splitlines() if line.startswith('{"first_batch')]
    return json.loads(lines[-1]) if lines else {"error": errors.strip().splitlines()[-1:]}


def installed(name: str, peers: Path | None) -> bool:
    if name not in data_peers.NEEDS:
        return True
    module = data_peers.NEEDS[name][1]
    return bool(importlib.util.find_spec(module)) or bool(
        peers and (peers / Path(name).name / module).is_dir()
    )


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/bench_data"), help="corpora, kept")
    parser.add_argument(
        "--only", nargs="+", default=list(data_table.GROUPS), help="groups, or beginnings of names"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="timed, of each contender and round")
    parser.add_argument("--rate", type=float, default=16.0, help="rows a second that heavy is asked for")
    parser.add_argument("--peers", type=Path, help="a folder with one for each peer, by its name")
    parser.add_argument("--quick", action="store_true", help="a small corpus, one short round: does it run?")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        keys = (arguments.seconds, arguments.rate, arguments.quick)
        print(json.dumps(measure(arguments.contender, arguments.folder, *keys)), flush=True)
        for process in processes(os.getpid())[::-1]:  # what still reads ahead would keep it
            os.kill(process, signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that contenders are ended too
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.5
        arguments.folder = arguments.folder / "quick"
    return run(arguments)


def run(arguments: argparse.Namespace) -> int:
    import data_corpus

    data_corpus.make(arguments.folder, arguments.quick)
    names = [name for name in data_table.NAMES if any(name.startswith(wanted) for wanted in arguments.only)]
    rounds = []
    for number in range(arguments.rounds):
        rounds.append({})
        for name in names:
            line = {"error": "not installed"}
            if installed(name, arguments.peers):
                line = start(name, arguments)
            if name.startswith("heavy/"):
                arguments.rate = min(arguments.rate, line.get("samples_per_second", arguments.rate))
            rounds[-1][name] = line
            print(f"round {number + 1}: {name}: {json.dumps(line)}", file=sys.stderr, flush=True)
    found = data_table.medians(rounds)
    ratios = data_table.compare(found)
    print(data_table.table(found, ratios), file=sys.stderr)
    harness.emit(
        {
            "benchmark": "data",
            "contenders": found,
            "ratios": ratios,
            "rounds": arguments.rounds,
            "device": f"{processor()}, {os.cpu_count()} cores",
            "versions": harness.versions("jaxthru", "grain", "numpy", "tokenizers"),
            "commit": harness.commit(),
            "command": harness.command(),
        },
        arguments.output,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
