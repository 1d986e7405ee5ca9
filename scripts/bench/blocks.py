"""Runs blocks of a benchmark, a process each, and makes the batches that they share."""

import argparse
import contextlib
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import numpy as np

from jaxthru.build.batches import row_cost
from jaxthru.config import RunConfig
from jaxthru.data.loading.dataset import Data, open_data
from jaxthru.data.loading.state import DataState
from jaxthru.runtime.xla import NO_MULTICAST

# Relative, so that commands are recorded as one types them.
HERE, ROOT = (Path(os.path.relpath(Path(__file__).resolve().parents[up])) for up in (0, 2))
BATCHES = 64  # distinct ones, which causal contenders take in turn
PACKED_BATCHES = 16  # of which contenders time all, equally often


def resident(session: int) -> dict[str, float]:
    """Returns the GiB of memory that the processes of a session have now; nothing without /proc.

    What CUDA pins is shared memory and counts. Pages that several processes share count in each.
    """
    pages = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may have ended
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                pages += int(fields[21])
    return {"gib": round(pages * resource.getpagesize() / 2**30, 1)} if pages else {}


AT_THE_END = re.compile(
    r"cuda_\w+\.cc:\d+\].*(Failed to destroy|Failed to unload|Error destroying)"
    r"|^=== Source Location|^external/xla"
)
"""Of XLA's lines while CUDA is already gone, hundreds of which would hide what ended a process."""


def run_block(command: list[str], gpu: str, limit: float | None = None) -> dict:
    """Runs one block in its own process on one GPU; returns {"line": ...} or {"error": ...}, and "host_gib".

    limit: seconds after which it is ended, with the processes that it started. Those end with it in any case:
    what reads data ahead may outlive its parent.
    """
    path = os.pathsep.join(filter(None, [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    one = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu}
    environment = os.environ | NO_MULTICAST | one | {"PYTHONPATH": path}
    late = ""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
    ):
        with (
            harness.session(command, env=environment, stdout=output, stderr=errors) as block,
            harness.Peak(lambda: resident(block.pid), 0.5) as host,
        ):
            try:
                block.wait(limit)
            except subprocess.TimeoutExpired:
                late = f"took more than {limit:.0f} s"
        lines, said = [], []
        for file, into in ((output, lines), (errors, said)):
            file.seek(0)
            into += [line for line in file.read().splitlines() if line.strip()]
    said = [line for line in said if not AT_THE_END.search(line)] or said
    used = {"host_gib": host.most.get("gib")}
    if not late and block.returncode == 0 and lines:
        try:
            return {"line": json.loads(lines[-1])} | used
        except ValueError:
            said.append(f"its last line is not JSON: {lines[-1]}")
    print("\n".join(said[-30:]), file=sys.stderr, flush=True)
    ended = late or f"exit code {block.returncode}"  # what it said last tells where it was
    return {"error": f"{ended}: {(said or ['no output'])[-1].strip()[:300]}"} | used


def block_of(name: str, turn: int, command: list[str], gpu: str, limit: float | None = None) -> dict:
    """Runs one block of a contender, says how it went, and returns it as a record keeps it."""
    identity = harness.ask("nvidia-smi", f"--id={gpu}", "--query-gpu=uuid", "--format=csv,noheader")
    started = time.monotonic()
    outcome = run_block(command, gpu, limit)
    took = time.monotonic() - started
    print(f"round {turn} {name}, {took:.0f} s: {brief(outcome)}", flush=True)
    # Also within a shell's command line.
    typed = shlex.join(command).replace(sys.executable, "python").replace(f"{Path.cwd()}/", "")
    block = {"contender": name, "round": turn, "gpu": identity, "seconds": round(took, 1)}
    return block | outcome | {"command": typed}


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


def first_batches(config: RunConfig, batches: int, data: Data | None = None) -> list[dict[str, np.ndarray]]:
    """Returns so many of a run's first batches. data: the run's, if it is open."""
    data, train = data or open_data(config.data), config.train
    keys = {"seed": train.seed, "rows": train.rows, "cost": row_cost(config)}
    schedule = DataState(0, ((0, data.mixture),), data.keys).schedule
    with data.train_batches(schedule, steps=batches, **keys) as steps:
        return [{name: value.copy() for name, value in batch.items()} for batch in steps]


def write_tokens(config: RunConfig, path: Path, batches: int) -> None:
    """Writes the tokens of a run's first batches, int32 [batches, rows, sequence]."""
    np.save(path, np.stack([batch["tokens"] for batch in first_batches(config, batches)]))


def write_batches(config: RunConfig, path: Path, batches: int) -> None:
    """Writes a run's first batches whole: an .npz with each of their arrays, [batches, rows, sequence]."""
    found = first_batches(config, batches)
    np.savez(path, **{name: np.stack([batch[name] for batch in found]) for name in found[0]})


def chosen(parser: argparse.ArgumentParser, option: str, text: str, known: list[str]) -> list[str]:
    """Returns the names in `text`, an option's value; ends with the parser's error if one is not known."""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{option}: {', '.join(unknown)}: not of {', '.join(known)}")
    return names
