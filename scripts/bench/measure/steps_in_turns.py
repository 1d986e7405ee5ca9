"""Times steps of one configuration under several settings, in turns in one process, and prints one JSON line.

    python scripts/bench/measure/steps_in_turns.py --config configs/llama3_8b_8layer.py \\
        --set mesh.fsdp=1 --set mesh.tensor=2 --contender none=kernels.collective_matmul=none \\
        --contender ring=kernels.collective_matmul=ring [--output FILE]

Contenders differ in how a step is computed, not in what its state is: one state and one run of batches go
through all of their steps, A-B-C-A-B-C, so that they see the same clocks, and one warm-up is enough for all.
Before, each takes the first batch from the first state; its loss and gradient norm are in the result. Ratios
are to the first contender. A contender that cannot run here is left out, with the reason.
"""

import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import collective_matmul_check as checks
import comparison
import harness
import jax
import turns
from measure.step import packed_batches

from jaxthru import config as configuration
from jaxthru.build.compiled import Build, build_step
from jaxthru.data.loading.dataset import open_data
from jaxthru.runtime import hardware, xla
from jaxthru.runtime.errors import InputError

FIRST = ("loss", "grad_norm")
COMPILES, RUNS = 240.0, 90.0  # seconds that a contender may take to compile, and to run its first step


def contender(text: str) -> tuple[str, list[str]]:
    """Returns the name and the settings in NAME=GROUP.KEY=VALUE,GROUP.KEY=VALUE."""
    name, _, settings = text.partition("=")
    return name, settings.split(",") if settings else []


def build_all(config: str, common: list[str], wanted: dict[str, list[str]]) -> tuple[dict, dict[str, str]]:
    """Returns {name: Build} and {name: why it cannot run}. Raises InputError if their states differ."""
    built, missing = {}, {}
    for name, settings in wanted.items():
        print(f"{name}: compiles", file=sys.stderr, flush=True)
        resolved = configuration.load(config, [*common, *settings, "train.steps=1000000"])
        with checks.ends_within(COMPILES, f"{name} compiles"):
            try:
                made = build_step(resolved, open_data(resolved.data))
            except InputError as refusal:
                missing[name] = str(refusal)
                continue
        if built and made.abstract != next(iter(built.values())).abstract:
            raise InputError(f"--contender {name}: its state is another than the first one's")
        print(f"{name}: compiled in {made.compile_seconds:.0f} s", file=sys.stderr, flush=True)
        built[name] = made
    return built, missing


def first_metrics(of: Build, batch: Any) -> dict[str, float]:
    """Returns what the first step of a run says."""
    _, metrics = of.compiled(of.first_state(), batch)
    metrics = jax.device_get(metrics)
    return {name: float(metrics[name]) for name in FIRST if name in metrics}


def turn(step: Callable, state: Any, batches: Iterator, seconds: float) -> tuple[Any, list[float], list]:
    """Returns the state after a turn, and the seconds and metrics of each of its steps but the first.

    As in training, a step is dispatched before the last one's metrics are read.
    """
    state, previous = step(state, next(batches))
    began, clock, took, values = time.perf_counter(), None, [], []
    while time.perf_counter() - began < seconds or len(took) < 2:
        state, started = step(state, next(batches))
        metrics, now = jax.device_get(previous), time.perf_counter()
        if clock is not None:
            took.append(now - clock)
            values.append(metrics)
        previous, clock = started, now
    jax.block_until_ready(previous)
    return state, took, values


def measure(built: dict[str, Build], warmup: float, timed: float, turn_seconds: float) -> dict:
    """Returns each contender's result. warmup: seconds of all together; timed: of each."""
    base = next(iter(built.values()))
    batches = packed_batches(base)
    batch = next(batches)
    first = {}
    for name, of in built.items():
        with checks.ends_within(RUNS, f"{name}, the first step"):
            first[name] = first_metrics(of, batch)
        print(f"{name}: first step {first[name]}", file=sys.stderr, flush=True)
    state = base.first_state()

    def run(name: str) -> tuple[list[float], int, dict]:
        nonlocal state
        with checks.ends_within(60 + 2 * turn_seconds, name):
            state, took, values = turn(built[name].compiled, state, batches, turn_seconds)
        return took, sum(int(step["tokens"]) for step in values), values[-1]

    runs = {name: functools.partial(run, name) for name in built}
    found = turns.steps_in_turns(runs, warmup, timed, jax.device_count())
    rows = {name: turns.rated(of) for name, of in found.items()}
    for name, row in rows.items():
        compared = comparison.ratio(row, next(iter(rows.values())))
        row |= {"skipped_updates": int(found[name][-1].last["skipped"]), "first_step": first[name]}
        row |= {"compile_seconds": round(built[name].compile_seconds, 1)}
        row |= {"ratio": round(compared["ratio"], 4), "claimed": compared["claimed"]}
    return rows


def main() -> int:
    parser = harness.config_parser(__doc__)
    add = parser.add_argument
    add("--contender", action="append", required=True, type=contender, metavar="NAME=GROUP.KEY=VALUE,...")
    harness.add_seconds(parser)
    add("--turn-seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    wanted = dict(arguments.contender)
    xla.configure(writes_to_peers=True)  # some may; CUDA starts once for all
    built, missing = build_all(arguments.config, arguments.overrides, wanted)
    first = next(iter(wanted))
    if first in missing:
        raise InputError(f"--contender {first}: all ratios are to it, and it cannot run: {missing[first]}")
    rows = measure(built, arguments.warmup_seconds, arguments.timed_seconds, arguments.turn_seconds)
    line = {
        **harness.about("steps_in_turns", arguments),
        "contenders": {name: {"set": wanted[name]} | row for name, row in rows.items()},
        "missing": missing,
        "peak_hbm_bytes": hardware.peak_bytes(),
    }
    harness.emit(line | harness.provenance(), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
