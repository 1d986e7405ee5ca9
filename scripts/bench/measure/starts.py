"""Starts the training command twice and times both to their first step; then what the second one waits for.

    python scripts/bench/measure/starts.py --config configs/llama3_8b_8layer.py [--set a.b=v ...]

The first start has no programs compiled by JAX, Triton or CUDA and no token stores; the second finds what the
first made.
`seconds_to_first_step` is from the start of the process to the first row of its metrics. The waits are parts
of the time of the second start's steps: `host_gap` how long the device was seen without work, `data_wait` how
long the loop stood in the loader. Both runs are killed, which saves writing a checkpoint.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness

from jaxthru.runtime.errors import require

CACHES = ("JAX_COMPILATION_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
SETTLED = 10
"""Steps of the second start that do not count: the first ones fill queues."""


def rows_of(path: Path) -> list[dict]:
    """Returns the whole lines of a metrics file, none while there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def parts_of(log: str) -> str | None:
    """Returns where the time to the first step went, as the log of a run says it."""
    said = [line.partition("start: ")[2] for line in log.splitlines() if "start: " in line]
    return said[0] if said else None


def start(
    words: list[str], environment: dict[str, str], run_dir: Path, steps: int
) -> tuple[float, list[dict]]:
    """Returns the seconds to the first step and the metrics of so many. Exits if the run ends before."""
    command = [sys.executable, "-m", "jaxthru.train", *words, "--run-dir", str(run_dir)]
    metrics, log, first = run_dir / "metrics.jsonl", run_dir.with_suffix(".log"), None
    began = time.monotonic()
    with (
        log.open("w") as output,
        harness.session(command, env=environment, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        while len(rows := rows_of(metrics)) < steps:
            if rows and first is None:
                first = time.monotonic() - began
            if process.poll() is not None:
                sys.exit(f"starts.py: {shlex.join(command)} ended:\n{log.read_text()[-2000:]}")
            time.sleep(0.02)
    return time.monotonic() - began if first is None else first, rows


def share(rows: list[dict], wait: str) -> float:
    """Returns which part of the steps' time a wait was."""
    return round(sum(row[wait] or 0.0 for row in rows) / sum(row["step_seconds"] for row in rows), 6)


def measure(arguments) -> dict:
    require(
        arguments.steps > SETTLED, f"--steps {arguments.steps}: must be above {SETTLED}, which do not count"
    )
    found, parts = {}, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = [*arguments.overrides, f"data.store={folder / 'store'}"]
        words = ["--config", arguments.config, *harness.set_words(settings)]
        caches = {name: str(folder / "compiled" / name) for name in CACHES}
        for number, (which, steps) in enumerate({"first": 2, "second": arguments.steps}.items()):
            seconds, rows = start(words, os.environ | caches, folder / str(number), steps)
            found[which] = round(seconds, 2)
            parts[which] = parts_of((folder / f"{number}.log").read_text())
            said = f"{which} start: {seconds:.1f} s to the first step: {parts[which]}"
            print(said, file=sys.stderr, flush=True)
        written = json.loads((folder / "1" / "environment.json").read_text())
    counted = rows[SETTLED:]
    return {
        "seconds_to_first_step": found,
        "parts": parts,
        "steps_counted": len(counted),
        "step_seconds": round(statistics.median(row["step_seconds"] for row in counted), 6),
        "host_gap": share(counted, "host_gap_seconds"),
        "data_wait": share(counted, "data_wait_seconds"),
        "environment": written,
    }


steps = harness.option("--steps", type=int, default=100, help="of the second start")
main = harness.program(__doc__, measure, steps, elsewhere=True)


if __name__ == "__main__":
    sys.exit(main())
