"""Runs the blocks of a comparison: a process each, in turns; finished ones are kept in a file."""

import argparse
import concurrent.futures
import contextlib
import json
import os
import resource
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import comparison
import harness
import numpy as np

from jaxthru.config import RunConfig
from jaxthru.data.loading.dataset import open_data
from jaxthru.data.loading.state import DataState
from jaxthru.runtime.xla import NO_MULTICAST

# Relative, so that commands are recorded as one types them.
HERE, ROOT = (Path(os.path.relpath(Path(__file__).resolve().parents[up])) for up in (0, 2))
BATCHES = 64  # distinct ones, which causal contenders take in turn


class HostMemory:
    """The most host memory (GiB) that the processes of a session have at once, by samples.

    What CUDA pins is shared memory and counts. Pages that several processes share count in each. None without
    /proc.
    """

    def __init__(self, session: int):
        self.gib, self._session = None, session
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self):
        self._sampler.start()
        return self

    def _sample(self) -> None:
        while not self._ended.wait(0.5):
            if used := resident_bytes(self._session):
                self.gib = max(self.gib or 0.0, round(used / 2**30, 1))

    def __exit__(self, *_):
        self._ended.set()
        self._sampler.join()


def resident_bytes(session: int) -> int:
    """Returns the bytes of memory that the processes of a session have now; 0 without /proc."""
    pages = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may have ended
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                pages += int(fields[21])
    return pages * resource.getpagesize()


def run_block(command: list[str], gpu: str, limit: float | None = None) -> dict:
    """Runs one block in its own process on one GPU; returns {"line": ...} or {"error": ...}, and "host_gib".

    limit: seconds after which it is ended, with the processes that it started.
    """
    path = os.pathsep.join(filter(None, [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    one = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu}
    environment = os.environ | NO_MULTICAST | one | {"PYTHONPATH": path}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    output, errors, late = "", "", ""
    with harness.session(command, env=environment, **pipes) as block, HostMemory(block.pid) as host:
        try:
            output, errors = block.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            late = f"took more than {limit:.0f} s"
    if late:  # what it said tells where it was
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, errors = block.communicate(timeout=10)
    lines = output.strip().splitlines()
    if not late and block.returncode == 0 and lines:
        try:
            return {"line": json.loads(lines[-1]), "host_gib": host.gib}
        except ValueError:
            errors += f"\nits last line is not JSON: {lines[-1]}"
    print("\n".join(errors.strip().splitlines()[-30:]), file=sys.stderr, flush=True)
    told = [line for line in errors.splitlines() if line.strip()] or ["no output"]
    ended = late or f"exit code {block.returncode}"
    return {"error": f"{ended}: {told[-1].strip()[:300]}", "host_gib": host.gib}


def block_of(name: str, turn: int, command: list[str], gpu: str, limit: float | None = None) -> dict:
    """Runs one block of a contender, says how it went, and returns it as a record keeps it."""
    identity = harness.ask("nvidia-smi", f"--id={gpu}", "--query-gpu=uuid", "--format=csv,noheader")
    started = time.monotonic()
    outcome = run_block(command, gpu, limit)
    took = time.monotonic() - started
    print(f"round {turn} {name}, {took:.0f} s: {brief(outcome)}", flush=True)
    block = {"contender": name, "round": turn, "gpu": identity, "seconds": round(took, 1)}
    return block | outcome | {"command": shlex.join(["python", *command[1:]])}


def keep(record: dict, block: dict) -> None:
    """Adds a block to a record, in place of an earlier one of the same contender and round."""
    own = (block["contender"], block["round"])
    others = [each for each in record["blocks"] if (each["contender"], each["round"]) != own]
    record["blocks"] = [*others, block]


def brief(outcome: dict) -> str:
    """Returns a block's outcome in a line."""
    shown = ("tokens_per_second", "tflops", "step_seconds", "sm_clock_mhz", "power_watts", "loss", "settings")
    line = outcome.get("line", {})
    return outcome.get("error") or ", ".join(f"{key} {line[key]}" for key in shown if line.get(key))


def visible(gpus: int) -> list[str]:
    """Returns the names of this many GPUs, of those that this process may use. Exits if there are fewer."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    if len(names.split(",")) < gpus:
        sys.exit(f"{gpus} GPUs: CUDA_VISIBLE_DEVICES shows {len(names.split(','))}")
    return names.split(",")[:gpus]


def first_batches(config: RunConfig, batches: int) -> list[dict[str, np.ndarray]]:
    """Returns so many of a run's first batches."""
    data = open_data(config.data)
    schedule = DataState(0, ((0, data.mixture),), data.keys).schedule
    train = config.train
    with data.train_batches(schedule, seed=train.seed, rows=train.rows, steps=batches) as steps:
        return [{name: value.copy() for name, value in batch.items()} for batch in steps]


def write_tokens(config: RunConfig, path: Path, batches: int = BATCHES) -> None:
    """Writes the tokens of a run's first batches, int32 [batches, rows, sequence]."""
    np.save(path, np.stack([batch["tokens"] for batch in first_batches(config, batches)]))


def write_batches(config: RunConfig, path: Path, batches: int = BATCHES) -> None:
    """Writes a run's first batches whole: an .npz with each of their arrays, [batches, rows, sequence]."""
    found = first_batches(config, batches)
    np.savez(path, **{name: np.stack([batch[name] for batch in found]) for name in found[0]})


def record_of(benchmark: str, arguments: argparse.Namespace, **more) -> dict:
    """Returns the record in arguments.output, or a new one. Exits if that one is of another comparison.

    more: settings of this benchmark, beside those that all have.
    """
    settings = {
        "benchmark": benchmark,
        **more,
        "set": arguments.overrides,
        "warmup_seconds": arguments.warmup_seconds,
        "timed_seconds": arguments.timed_seconds,
        "commit": harness.commit(),
    }
    if not arguments.output.exists():
        return settings | {"blocks": []}
    record = json.loads(arguments.output.read_text())
    changed = [key for key, value in settings.items() if record.get(key) != value]
    if changed:
        sys.exit(f"{benchmark}.py: {arguments.output} holds another comparison: {', '.join(changed)} differ")
    return record


def add_arguments(parser: argparse.ArgumentParser, warmup: float = 20.0, timed: float = 40.0) -> None:
    """Adds what `record_of` and `run_missing` need to know. warmup, timed: seconds of a block."""
    add = parser.add_argument
    add("--set", action="append", default=[], dest="overrides", metavar="GROUP.KEY=VALUE")
    harness.add_seconds(parser, warmup, timed)
    add("--output", type=Path, required=True, help="JSON; finished blocks are kept and not run again")
    add("--rounds", type=int, default=2)
    add("--gpus", type=int, default=1, help="of this host to use at once, one block each")
    add("--stop-after", type=float, default=float("inf"), metavar="SECONDS", help="start no block after it")
    add("--torch-python", default=sys.executable, help="a Python that has PyTorch, if this one has not")


def chosen(parser: argparse.ArgumentParser, option: str, text: str, known: list[str]) -> list[str]:
    """Returns the names in `text`, an option's value; ends with the parser's error if one is not known."""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{option}: {', '.join(unknown)}: not of {', '.join(known)}")
    return names


def run_missing(
    record: dict,
    names: list[str],
    arguments: argparse.Namespace,
    command_of: Callable[[str], list[str]],
    summarise: Callable[[], str],
    limit: float | None = None,
) -> None:
    """Runs the blocks that the record lacks and writes it after each; prints the summary.

    command_of: contender -> its command line; summarise: completes the record and returns what is printed of
    it. limit: seconds of a block.
    """
    began = time.monotonic()
    left = comparison.missing(names, arguments.rounds, record["blocks"])
    gpus = arguments.gpus
    gpus_named = visible(gpus)
    writing = threading.Lock()

    def work(number: int) -> None:
        """Runs the blocks that are this GPU's."""
        gpu = gpus_named[number]
        for turn, name in comparison.share(left, names, number, gpus):
            if time.monotonic() - began > arguments.stop_after:
                return
            block = block_of(name, turn, command_of(name), gpu, limit)
            with writing:
                keep(record, block)
                record["command"] = harness.command()
                summarise()
                harness.write(record, arguments.output)

    if left:
        with concurrent.futures.ThreadPoolExecutor(gpus) as pool:
            for ended in [pool.submit(work, number) for number in range(gpus)]:
                ended.result()
    print(summarise())
    if left := comparison.missing(names, arguments.rounds, record["blocks"]):
        print(f"\n{len(left)} blocks are missing: run the same command again.")
