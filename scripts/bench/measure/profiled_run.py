"""Trains with something wrong on purpose, profiles it, and measures what the profile says: one JSON line.

    python scripts/bench/measure/profiled_run.py DIR --cause clean --closes --split --config F [--set a.b=v]

The run is `planted.py`, with NVML sampled beside it. DIR keeps its ledger, its report and, with
--keep-traces, its traces. With --read-again nothing is trained: the figures come from traces that were kept.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import jax
from measure import profiler as measured

from jaxthru.profile.collect import clocks
from jaxthru.profile.read import xplane
from jaxthru.runtime import nvml


def train(arguments: argparse.Namespace, words: list[str]) -> None:
    """Runs the planted training in a process of its own. Exits if it fails."""
    shutil.rmtree(arguments.folder, ignore_errors=True)
    notes = arguments.folder / "notes.json"
    planted = [arguments.cause, str(notes), "--seconds", f"{arguments.seconds:g}"]
    planted += ["--turns", str(arguments.turns), *(["--one-batch"] if arguments.one_batch else [])]
    place = ["--run-dir", str(arguments.folder), "--resume", "never"]
    script = str(Path(__file__).with_name("planted.py"))
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    with (
        clocks.sampled([] if on_cpu else nvml.names(range(arguments.gpus))) as samples,
        harness.session(
            [sys.executable, script, *planted, "--", *words, *place], stdout=sys.stderr
        ) as process,
    ):
        code = process.wait()
    if code:
        sys.exit(f"profiled_run.py: the run ended with exit code {code}")
    notes.write_text(json.dumps({"notes": json.loads(notes.read_text()), "samples": samples.devices}))


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what `work` does, or why it failed, which is not to cost the other parts."""
    try:
        return work()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}


def parts(run: measured.Run, closes: bool, split: bool) -> dict[str, dict[str, Any]]:
    """Returns a run's figures, each of which may fail alone."""
    found = {"closure": lambda: measured.closure(run)} if closes else {}
    if run.ledger.run.platform == "gpu":
        found["gemm"] = lambda: measured.gemm_clock(xplane.read(run.folder / "production"))
    found |= {"split": lambda: measured.split(run)} if split else {}
    return {name: attempt(of) for name, of in found.items()}


def measure(arguments) -> dict:
    arguments.folder = arguments.folder.absolute()
    if not arguments.read_again:
        train(arguments, ["--config", arguments.config, *harness.set_words(arguments.overrides)])
    jax.config.update("jax_platforms", "cpu")  # of what reads traces
    for ledger in arguments.folder.glob("profile/*/ledger.json") if arguments.read_again else ():
        ledger.unlink()
    run = measured.opened(arguments.folder)
    found = parts(run, arguments.closes, arguments.split)
    where = json.loads((arguments.folder / "environment.json").read_text())
    if not (arguments.keep_traces or arguments.read_again):
        for unneeded in ("production", "attribution", "dump"):
            shutil.rmtree(run.folder / unneeded, ignore_errors=True)
        for text in run.folder.glob("*.hlo.txt"):
            text.unlink()
    origin = {"device": where["devices"], "versions": where["versions"], "commit": where["commit"]}
    return {"cause": arguments.cause} | found | origin


main = harness.program(
    __doc__,
    measure,
    harness.option("folder", type=Path, metavar="DIR", help="the run's directory, made anew"),
    harness.option("--cause", default="clean", help="of planted.py"),
    harness.option("--seconds", type=float, default=0.0, help="that it sleeps"),
    harness.option("--one-batch", action="store_true", help="each step takes the first batch"),
    harness.option("--turns", type=int, default=0, help="more traces, behind the profile"),
    harness.option("--gpus", type=int, default=1, help="whose clocks are sampled"),
    harness.option("--closes", action="store_true", help="hold the ledger against the loop's clock"),
    harness.option("--split", action="store_true", help="take the products' rate apart"),
    harness.option("--keep-traces", action="store_true"),
    harness.option("--read-again", action="store_true", help="train nothing"),
    elsewhere=True,
)


if __name__ == "__main__":
    sys.exit(main())
