"""Trains on CPUs with freed memory kept and given back, in turns: what that takes of time, faults and memory.

    python scripts/bench/measure/kept_memory.py [--config FILE] [--set a.b=v ...] [--turns N] [--output FILE]

Each turn is `python -m jaxthru.train` in a process of its own (see jaxthru/runtime/allocator.py), whose page
faults and peak memory are those of its whole life. Steps are timed by the loop's clock once they have warmed
up. `spread`: how far the slowest turn's median is above the fastest's.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
from suites.profiler import GIVEN_BACK, QUIET

from jaxthru.runtime.errors import require

VARIANTS = {"kept": {}, "given_back": GIVEN_BACK}


def train(words: list[str], environment: dict[str, str], run_dir: Path) -> dict[str, Any]:
    """Returns the seconds of a run's steps, and what the system counted of it. Exits if it fails."""
    command = [sys.executable, "-m", "jaxthru.train", *words, "--run-dir", str(run_dir)]
    log = run_dir.with_suffix(".log")
    with (
        log.open("w") as output,
        harness.session(command, env=environment, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        _, status, used = os.wait4(process.pid, 0)  # of this process alone, where RUSAGE_CHILDREN adds up
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"kept_memory.py: exit code {process.returncode}:\n{log.read_text()[-2000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "step_seconds": [row["step_seconds"] for row in rows],
        "page_faults": used.ru_minflt,
        "peak_bytes": used.ru_maxrss << 10,
    }


def warmed_up(steps: list[float], seconds: float) -> list[float]:
    """Returns the steps that began so many seconds after the first, which compiles, had ended."""
    left, passed = [], 0.0
    for step in steps[1:]:
        if passed >= seconds:
            left.append(step)
        passed += step
    return left


def told(turns: list[dict[str, Any]], warmup: float) -> dict[str, Any]:
    """Returns what the record says of one variant. Exits if a turn has too few steps to time."""
    timed = [warmed_up(turn["step_seconds"], warmup) for turn in turns]
    if min(map(len, timed)) < 3:
        sys.exit(f"kept_memory.py: --steps: too few of them begin {warmup:g} s after the first")
    medians = [median(steps) for steps in timed]
    return {
        "step_seconds": median(medians),
        "step_seconds_by_turn": medians,
        "spread": max(medians) / min(medians) - 1,
        "quartiles_by_turn": [quantiles(steps) for steps in timed],
        "steps_timed": list(map(len, timed)),
        "timed_seconds": [round(sum(steps), 1) for steps in timed],
        "page_faults": [turn["page_faults"] for turn in turns],
        "peak_bytes": [turn["peak_bytes"] for turn in turns],
    }


def measure(arguments) -> dict:
    own = [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]
    require(not own, f"{', '.join(own)} is set: no run would keep its memory")
    settings = [*QUIET.split(), f"train.steps={arguments.steps}", *arguments.overrides]
    words = ["--config", arguments.config, *harness.set_words(settings)]
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
        for turn in range(arguments.turns):
            for variant, environment in VARIANTS.items():
                found = train(words, os.environ | common | environment, folder / f"{variant}_{turn}")
                print(f"{variant}: {median(found['step_seconds']):.4f} s a step", file=sys.stderr, flush=True)
                turns[variant].append(found)
    os.environ["JAX_PLATFORMS"] = "cpu"  # of what is recorded of this machine, too
    rows = {name: told(of, arguments.warmup_seconds) for name, of in turns.items()}
    return {
        "variants": rows,
        "kept_over_given_back": rows["kept"]["step_seconds"] / rows["given_back"]["step_seconds"],
        "environment_given_back": GIVEN_BACK,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
    }


main = harness.program(
    __doc__,
    measure,
    harness.option("--turns", type=int, default=3, help="of each variant"),
    harness.option("--steps", type=int, default=300, help="of a turn"),
    harness.option("--warmup-seconds", type=float, default=20.0, help="of a turn's steps; they do not count"),
    config="configs/quickstart.py",
)


if __name__ == "__main__":
    sys.exit(main())
