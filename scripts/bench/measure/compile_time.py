"""Compares two commits: the time to compile their steps for a GPU that need not be here, and the peaks.

    git worktree add build/old OLD
    python scripts/bench/measure/compile_time.py --old build/old --output FILE [--rows a,b,...] [--rounds 3]

Each round compiles a row of commits.py as `python -m jaxthru.plan memory` does, in a process of its own, the
old commit and the new in turns: tracing, lowering, XLA without autotuning, and reading what it says of
memory. The fastest round counts. Needs "jaxthru[aot]"; the compilation cache is off.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import jax
from measure.commits import ROOT, ROWS, Row

ONE = """
import json, sys, time
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
from jaxthru import config as configuration
from jaxthru.plan.__main__ import _plan
from jaxthru.runtime import aot, xla
path, documents, *settings = sys.argv[1:]
xla.configure()
aot.use_cpu(1)
config, target = configuration.load(path, settings), aot.target("h200")
aot.available()
began = time.perf_counter()
plan, _ = _plan(config, target, 1, int(documents))
told = {"seconds": time.perf_counter() - began, "peak_device": plan.peak_device, "peak_host": plan.peak_host}
print(json.dumps(told))
"""


def once(tree: Path, row: Row) -> dict:
    """Returns seconds and peaks of a row with the code of a tree."""
    path = tree / "configs" / f"{row.config}.py"
    command = [sys.executable, "-c", ONE, str(path), str(row.documents), *row.settings]
    environment = os.environ | {"PYTHONPATH": str(tree), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    printed = subprocess.run(
        command, env=environment, cwd=tree, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(printed.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--old", type=Path, required=True, metavar="FOLDER", help="the other commit's files")
    add("--old-commit", default="", help="its name, for the record")
    add("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    add("--rounds", type=int, default=3)
    add("--output", type=Path, required=True)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    sides, rows = {"old": arguments.old.resolve(), "new": ROOT}, {}
    for name in arguments.rows.split(","):
        rounds = [
            {side: once(tree, ROWS[name]) for side, tree in sides.items()} for _ in range(arguments.rounds)
        ]
        best = {side: min(one[side]["seconds"] for one in rounds) for side in sides}
        last = rounds[-1]
        rows[name] = {
            "seconds": {side: [round(one[side]["seconds"], 2) for one in rounds] for side in sides},
            "compile_ratio": round(best["new"] / best["old"], 3),
            "peak_device": {side: last[side]["peak_device"] for side in sides},
            "peak_host": {side: last[side]["peak_host"] for side in sides},
            "peak_ratio": round(last["new"]["peak_device"] / last["old"]["peak_device"], 5),
        }
        print(name, rows[name], file=sys.stderr, flush=True)
        line = {"benchmark": "compile_time", "old_commit": arguments.old_commit, "rows": rows}
        harness.write(line | harness.provenance(), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
