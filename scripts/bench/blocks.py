"""Runs blocks of a benchmark, a process each, and makes the batches that they share."""

import argparse
import contextlib
import json
import os
import resource
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

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
    return (
        block
        | outcome
        | {"command": shlex.join("python" if word == sys.executable else word for word in command)}
    )


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


def chosen(parser: argparse.ArgumentParser, option: str, text: str, known: list[str]) -> list[str]:
    """Returns the names in `text`, an option's value; ends with the parser's error if one is not known."""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{option}: {', '.join(unknown)}: not of {', '.join(known)}")
    return names
