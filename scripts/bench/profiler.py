"""Whether the profiler is right: its ledger and the loop's clock, planted causes, clocks, and its own cost.

    python scripts/bench/profiler.py --output FILE [--rows a,b,...] [--gpus N] [--stop-after SECONDS]

Each row runs in processes of its own. FILE is written after each; the same command continues with rows that
are missing or failed, in whole or in part. With --stop-after none starts that would not end before, and none
trains after; reading the last traces may take a minute more. With --keep-traces the rows can be measured once
more, anywhere, by --read-again. Beside FILE, in a folder of its name, lie logs
and each run's ledger.json and report.html. Rows of two GPUs run first, alone; those of one then share the
GPUs, one row on each; the CPU's runs last, alone. A row for which there are too few GPUs is skipped, and says
so. `--cpu` runs all on CPU devices, to try the script. All steps of a run take one batch, but for the CPU's.

Planted causes have the 8B shape with 2 layers; the clean run is theirs in common, but for the gather's, which
is the 8-layer run on two GPUs.
"""

import argparse
import concurrent.futures
import json
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import blocks
import harness
import jax
import profiler_measure as measured
from profiler_rows import CAUSES, QUIET, ROWS, Row
from profiler_table import table

from jaxthru import config as configuration
from jaxthru.data.loading.dataset import open_data
from jaxthru.profile.collect import clocks
from jaxthru.profile.read import xplane
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.xla import NO_MULTICAST

LIMIT = 400.0  # seconds of one process


class Bench:
    """Runs rows and keeps what they found."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments, self.output = arguments, arguments.output
        self.work = arguments.output.with_suffix("")
        self.work.mkdir(parents=True, exist_ok=True)
        self.record: dict[str, Any] = {"benchmark": "profiler", "rows": {}}
        if self.output.exists():
            self.record = json.loads(self.output.read_text())
        self.began, self.writing = time.monotonic(), threading.Lock()

    def time_left(self) -> float:
        """Returns the seconds until --stop-after."""
        return self.arguments.stop_after - (time.monotonic() - self.began)

    def settings(self, row: Row) -> list[str]:
        """Returns a row's settings as the command line takes them."""
        at, steps, total = self.arguments.steps or row.steps
        own = [*row.settings.split(), *QUIET.split(), f"data.store={self.arguments.store}"]
        if not row.script:
            own += [f"profile.at={at}", f"profile.steps={steps}", f"train.steps={total}"]
        return harness.set_words((*own, *self.arguments.overrides))

    def command(self, name: str) -> list[str]:
        row = ROWS[name]
        config = ["--config", str(blocks.ROOT / "configs" / f"{row.config}.py")]
        if row.script:
            script, *words = row.script.split()
            more = [*config, *self.settings(row)] if script == "profiler_off.py" else []
            more += self.arguments.quick if script == "profiler_clock.py" else []
            more += self.arguments.short if script == "profiler_off.py" else []
            return [sys.executable, str(blocks.HERE / script), *words, *more]
        cause = "clean" if row.cause == "remat" else row.cause
        seconds = row.seconds * self.arguments.sleep
        words = [cause, str(self.work / name / "notes.json"), "--seconds", f"{seconds:g}"]
        words += ["--one-batch"] if row.one_batch else []
        words += [*(["--turns", str(row.turns)] if row.turns and not self.arguments.steps else []), "--"]
        place = ["--run-dir", str(self.work / name), "--resume", "never"]
        script = str(blocks.HERE / "profiler_causes.py")
        return [sys.executable, script, *words, *config, *place, *self.settings(row)]

    def environment(self, row: Row, gpus: list[str]) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(blocks.ROOT.resolve()), os.environ.get("PYTHONPATH", "")]))
        kept = {"PYTHONPATH": path, "JAX_COMPILATION_CACHE_DIR": f"{self.arguments.store}_compiled"}
        where = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        if self.arguments.cpu or row.devices == 0:
            flags = f"--xla_force_host_platform_device_count={max(1, row.devices)}"
            where = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        return os.environ | NO_MULTICAST | kept | where | row.environment

    def run(self, name: str, gpus: list[str]) -> None:
        """Runs a row on these GPUs and writes what it found, or why it found nothing."""
        row, command, started = ROWS[name], self.command(name), time.monotonic()
        print(f"{name} ...", flush=True)
        found: dict[str, Any] = {"command": shlex.join(["python", *command[1:]]), "settings": row.settings}

        def work() -> dict[str, Any]:
            shutil.rmtree(self.work / name, ignore_errors=True)
            with clocks.sampled([] if self.arguments.cpu else gpus) as samples:
                output = self.process(name, command, self.environment(row, gpus))
            if row.script:
                return json.loads(output.read_text().splitlines()[-1])
            notes = self.work / name / "notes.json"
            kept = {"notes": json.loads(notes.read_text()), "samples": samples.devices}
            notes.write_text(json.dumps(kept))
            return self.measure(name)

        found |= attempt(work, 600)
        found["seconds"] = round(time.monotonic() - started, 1)
        self.keep(name, found)

    def read_again(self, name: str) -> None:
        """Measures a row once more, from the traces that an earlier call kept."""
        before = self.record["rows"].get(name, {})
        for other, row in ROWS.items():
            if row.against == name:
                self.record["rows"].get(other, {}).pop("compared", None)
        found = {key: before[key] for key in ("command", "settings", "seconds") if key in before}
        for ledger in (self.work / name).glob("profile/*/ledger.json"):
            ledger.unlink()
        self.keep(name, found | attempt(lambda: self.measure(name), 600))

    def keep(self, name: str, found: dict[str, Any]) -> None:
        print(f"{name}, {found.get('seconds')} s: {found.get('error') or 'done'}", flush=True)
        with self.writing:
            self.record["rows"][name] = found
            self.write()

    def process(self, name: str, command: list[str], environment: dict[str, str]) -> Path:
        """Runs a command, with all that it starts; returns what it printed. Raises if it fails."""
        printed, log = (self.work / f"{name}.{kind}" for kind in ("out", "log"))
        with printed.open("w") as out, log.open("w") as errors:
            streams = {"stdout": out, "stderr": errors}
            with harness.session(command, env=environment, **streams) as process:
                code = process.wait(max(1.0, min(LIMIT, self.time_left())))
        if code:
            last = [line for line in log.read_text().splitlines() if line.strip()][-3:]
            raise RuntimeError(f"exit code {code}: {' '.join(last)}")
        return printed

    def measure(self, name: str) -> dict[str, Any]:
        """Returns a training run's figures, each of which may fail alone; deletes traces not to be kept."""
        row = ROWS[name]
        environment = json.loads((self.work / name / "environment.json").read_text())
        found = {key: environment[key] for key in ("devices", "versions", "commit")}
        run = self.opened(name)
        parts = {"gemm": lambda: measured.gemm_clock(xplane.read(run.folder / "production"))}
        if run.ledger.run.platform != "gpu":
            parts = {}
        parts |= {"closure": lambda: measured.closure(run)} if row.closes else {}
        parts |= {"split": lambda: measured.split(run)} if row.split else {}
        found |= {part: attempt(of, 400) for part, of in parts.items()}
        if not self.arguments.keep_traces:
            for unneeded in ("production", "attribution", "dump"):
                shutil.rmtree(run.folder / unneeded, ignore_errors=True)
            for text in run.folder.glob("*.hlo.txt"):
                text.unlink()
        return found

    def opened(self, name: str) -> measured.Run:
        """Returns a run that has ended, in this or an earlier call of the script."""
        kept = json.loads((self.work / name / "notes.json").read_text())
        samples = {device: [tuple(row) for row in rows] for device, rows in kept["samples"].items()}
        return measured.Run(self.work / name, kept["notes"], clocks.Samples(samples))

    def write(self) -> None:
        """Writes the record, with the comparisons of those planted runs whose clean run is there too."""
        rows = self.record["rows"]
        for name, row in ROWS.items():
            ended = [one for one in (name, row.against) if "error" not in rows.get(one, {"error": ""})]
            missing = "error" in rows.get(name, {}).get("compared", {"error": ""})
            if row.against and len(ended) == 2 and missing:
                gemms = {"planted": rows[name].get("gemm", {}), "clean": rows[row.against].get("gemm", {})}
                gemms = {which: {"mhz": None} | of for which, of in gemms.items()}

                def compared(name=name, row=row, gemms=gemms) -> dict[str, Any]:
                    return measured.cause(row.cause, self.opened(row.against), self.opened(name), gemms)

                rows[name]["compared"] = attempt(compared, 300)
        named = {name: rows.get(name, {}).get("compared", {}).get("met") for name in CAUSES}
        self.record["causes"] = {"met": sum(map(bool, named.values())), "of": len(named), "by_row": named}
        first = next((of for of in rows.values() if of.get("devices") or of.get("device")), {})
        commits = {of["commit"] for of in rows.values() if "commit" in of}
        self.record |= {
            "device": first.get("devices") or first.get("device"),
            "versions": first.get("versions"),
            "commit": commits.pop() if len(commits) == 1 else None,  # each row has its own
            "command": self.record.get("command") or harness.command(),
        }
        write_atomically(self.output, json.dumps(self.record, indent=1) + "\n")

    def left(self, names: list[str]) -> list[str]:
        """Returns the rows to run: those never started, then those that failed, in whole or part."""
        rows = self.record["rows"]
        left = [name for name in names if name not in rows or "skipped" in rows[name] or failed(rows[name])]
        return sorted(left, key=lambda name: failed(rows.get(name, {})))

    def all(self, names: list[str]) -> None:
        """Runs the rows that are missing: those of several GPUs, those of one side by side, the CPU's."""
        gpus = [] if self.arguments.cpu else visible(self.arguments.gpus)
        have = 2 if self.arguments.cpu else len(gpus)
        left = self.left(names)
        for name in left:
            if ROWS[name].devices > have:
                self.record["rows"][name] = {"skipped": f"needs {ROWS[name].devices} GPUs, found {have}"}
        left = [name for name in left if ROWS[name].devices <= have]
        by_devices = {of: iter([name for name in left if ROWS[name].devices == of]) for of in (2, 1, 0)}

        def take(queue: Iterator[str], own: list[str]) -> None:
            for name in queue:  # which GPUs share
                if self.time_left() <= ROWS[name].most:
                    return
                self.run(name, own)

        take(by_devices[2], gpus[:2])
        with concurrent.futures.ThreadPoolExecutor(max(1, len(gpus))) as pool:
            waiting = [pool.submit(take, by_devices[1], [gpu]) for gpu in gpus or [""]]
            for one in waiting:
                one.result()
        take(by_devices[0], [])
        self.write()


def attempt(work: Callable[[], dict[str, Any]], most: int) -> dict[str, Any]:
    """Returns what `work` does, or as "error" at most so many letters of why it failed, which is not to cost
    the others."""
    try:
        return work()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"}


def failed(found: dict[str, Any]) -> bool:
    """Says whether an error kept a row from what it was to find, or from part of it. Comparisons are no part:
    they are made again without a run."""
    parts = (part for name, part in found.items() if isinstance(part, dict) and name != "compared")
    return "error" in found or any(map(failed, parts))


def visible(count: int | None) -> list[str]:
    """Returns the names of the GPUs to use, by default of all of this host."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name][:count]
    listed = harness.ask("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
    return (listed.split() if listed else [str(index) for index in range(count or 0)])[:count]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON; rows in it are not run again")
    add("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    add("--gpus", type=int, help="to use at most; default: all of this host")
    add("--stop-after", type=float, default=float("inf"), metavar="SECONDS", help="end rows")
    add("--set", action="append", default=[], dest="overrides", metavar="GROUP.KEY=VALUE", help="of all rows")
    add("--store", default="store", help="data.store: where prepared tokens are kept")
    add("--steps", type=int, nargs=3, metavar=("AT", "PROFILED", "ALL"), help="in place of each row's own")
    add("--sleep", type=float, default=1.0, help="how much of their seconds planted sleeps last")
    add("--keep-traces", action="store_true", help="beside the ledgers made of them")
    add("--read-again", action="store_true", help="run nothing: measure rows from the traces that were kept")
    add("--cpu", action="store_true", help="run all rows on CPU devices, to try the script")
    arguments = parser.parse_args(argv)
    arguments.rows = blocks.chosen(parser, "--rows", arguments.rows, list(ROWS))
    if not arguments.output.suffix:
        parser.error(f"--output {arguments.output}: it has to end in .json, as a folder is to have its name")
    arguments.output = arguments.output.resolve()
    arguments.store = str(Path(arguments.store).resolve())
    tiny = ["--size", "256", "--warmup-seconds", "0", "--timed-seconds", "0.2"]
    arguments.quick, arguments.short = (
        (tiny, ["--steps", "6", "--rounds", "1"]) if arguments.cpu else ([], [])
    )
    return arguments


def main() -> int:
    arguments = parse()
    jax.config.update("jax_platforms", "cpu")  # of this process alone, which leaves the GPUs to its rows
    bench = Bench(arguments)
    if arguments.read_again:
        arguments.keep_traces = True
        for name in (name for name in ROWS if name in arguments.rows):
            if any((bench.work / name).glob("profile/*/production")):
                bench.read_again(name)
        bench.write()
        print(table(bench.record))
        return 0
    for config in dict.fromkeys(ROWS[name].config for name in arguments.rows):  # before any step is timed
        path = blocks.ROOT / "configs" / f"{config}.py"
        more = [f"data.store={arguments.store}", *arguments.overrides]
        open_data(configuration.load(path, more).data).close()
    bench.all(arguments.rows)
    print(table(bench.record))
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
