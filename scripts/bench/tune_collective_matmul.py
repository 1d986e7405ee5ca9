"""Measures tiles for the fused collective matrix products and writes the best into tile_table.json.

    python scripts/bench/tune_collective_matmul.py [--devices 2] [--shapes NAME ...] [--directions forward]
        [--senders 20 44]

All of `tiles.candidates`, with each number of --senders, take turns with the plain form, so that they see the
same clocks, in two regimes: without a pause, which holds the GPUs at their power cap, and in bursts after a
rest, at their full clock. The second asks more of the L2 cache and the link, whose speed changes less. A step
has both: the tiles with the least product of both times are chosen. All sizes and clusters have run before at
tiny shapes, in a child process; whom a kernel waits for depends neither on the order nor on how many send. A
call is timed whole, a backward pass with the products that give the weights' gradients, and `faster` says
whether it took less than the plain form in both regimes. Entries of other shapes and devices stay; UNTUNED
shapes are left out, so that what is chosen for an unknown shape is measured too.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable

import collective_matmul_check as checks
import harness
import jax
from measure import programs
from measure.collectives import Case

from jaxthru.runtime import xla
from pallas_kernels.collective_matmul import mosaic_gpu, reference, tiles
from pallas_kernels.collective_matmul.shapes import GPU

PLAIN = "plain"


def to_measure(problem: tiles.Problem, senders: list[int]) -> list[tiles.Tiles]:
    """Returns the candidates of a problem with each of these numbers of senders."""
    every = itertools.product(tiles.candidates(problem), senders)
    return [dataclasses.replace(one, senders=number) for one, number in every]


def try_all(mesh: jax.sharding.Mesh, every: Iterable[tiles.Tiles]) -> None:
    """Runs all sizes to be measured, and their clusters, at tiny shapes in a child process."""
    minor, width = tiles.ORDERS[0]
    alike = {"minor": minor, "width": width, "senders": tiles.Tiles.senders}
    wanted = dict.fromkeys(dataclasses.replace(one, **alike) for one in every)
    checks.try_tiles(dict(mesh.shape), list(wanted))


def tune(case: Case, every: list[tiles.Tiles], turns: int, turn_seconds: float) -> dict:
    """Returns the table's entry for a case, and under "tried" the microseconds of all tiles measured."""
    operands = case.operands()
    # The plain form runs before any kernel: what only it needs of XLA and NCCL is then loaded.
    wanted = jax.block_until_ready(jax.jit(case.of(reference))(*operands))
    runs = {one: (case.of(mosaic_gpu, tiles=one), operands) for one in every}
    placed = programs.placed({PLAIN: (case.of(reference), operands)}, case.in_a_row)
    placed |= programs.placed(runs, case.in_a_row, alike=True)
    times = programs.both_regimes(placed, turns, turn_seconds, case.in_a_row)
    best = min(times.keys() - {PLAIN}, key=lambda name: math.prod(times[name]))
    fused = checks.compile_safely(jax.jit(runs[best][0]).lower(*operands))
    jax.block_until_ready(fused(*case.operands(seed=1)))  # so that no buffer still holds the right result
    found = jax.block_until_ready(fused(*operands))  # nothing is loaded while it runs
    if not max(map(float, programs.apart(found, wanted))) <= programs.TOLERANCE:
        sys.exit(f"{case.problem.key}: the result with {best} differs from the plain form's")
    # Once more, as the least of many is less than what it takes.
    last = {name: placed[name] for name in (PLAIN, best)}
    final = programs.both_regimes(last, 2 * turns, turn_seconds, case.in_a_row)
    return {
        "tiles": dataclasses.asdict(best),
        "microseconds": final[best],
        "plain_microseconds": final[PLAIN],
        "faster": all(fused < plain for fused, plain in zip(final[best], final[PLAIN], strict=True)),
        "tried": [
            dataclasses.asdict(one) | {"microseconds": microseconds}
            for one, microseconds in times.items()
            if one != PLAIN
        ],
    }


def write(table: dict[str, dict[str, dict]]) -> None:
    """Writes the table that `tiles` reads."""
    tiles.TABLE_FILE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--devices", type=int, default=2, help="on the axis")
    add("--shapes", nargs="+", choices=GPU, default=list(GPU))
    both = ("forward", "backward")
    add("--directions", nargs="+", choices=both, default=both)
    done = "the first run that precedes all others has just passed, in a process of its own"
    add("--first-run-done", action="store_true", help=done)
    default = [tiles.Tiles.senders]
    add("--senders", nargs="+", type=int, metavar="N", default=default, help="thread blocks")
    add("--turns", type=int, default=8)
    add("--turn-seconds", type=float, default=0.01)
    options = parser.parse_args()
    os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.6"  # the rest is for the processes that try tiles
    harness.keep_stdout()
    xla.configure()
    phase, axes = harness.Phases(), {"tensor": options.devices}
    if not options.first_run_done:
        with phase("first run, in a child process"):
            checks.in_child([axes], seconds=180)
    mesh = checks.make_mesh(axes)
    kind = jax.local_devices()[0].device_kind
    named = [(name, direction) for name in options.shapes for direction in options.directions]
    cases = {f"{name} {way}": Case(GPU[name], mesh, way == "backward") for name, way in named}
    to_try = {name: to_measure(case.problem, options.senders) for name, case in cases.items()}
    with phase("tiny shapes, in a child process"):
        try_all(mesh, itertools.chain.from_iterable(to_try.values()))
    found = {}
    for name, case in cases.items():
        key = case.problem.key
        with phase(name), checks.ends_within(300, name):
            found[key] = tune(case, to_try[name], options.turns, options.turn_seconds)
        print(key, found[key], file=sys.stderr, flush=True)
        entry = {field: value for field, value in found[key].items() if field != "tried"}
        tiles.TABLE.setdefault(kind, {})[key] = entry
        write(tiles.TABLE)  # after each, so that a run cut short leaves what it has
    harness.emit({"benchmark": "tune_collective_matmul", "entries": found} | harness.provenance())
    return 0


if __name__ == "__main__":
    sys.exit(main())
