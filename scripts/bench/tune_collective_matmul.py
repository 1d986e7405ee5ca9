"""Measures tiles for the fused collective matrix products and writes the best into tile_table.json.

    python scripts/bench/tune_collective_matmul.py [--devices 2] [--shapes NAME ...] [--directions forward]
        [--cases down_forward ...] [--senders 28 66]

Tiles are searched in stages, each of which takes turns with the plain form in two regimes: without a pause,
which holds the GPUs at their power cap, and in bursts after a rest, at their full clock. The second asks more
of the L2 cache and the link, whose speed changes less. A step has both, so the least product of both times
counts. First come all sizes and clusters in the order that reads least, then the best two in other orders,
then the best with other numbers of --senders. In turns as short as these the clock is one that all tiles
share; so the FINALISTS then run for longer each, until the clock is what their own joules leave them, and the
least product of those times and the bursts' is chosen.

All sizes and clusters have run before at tiny shapes, in a child process; whom a kernel waits for depends
neither on the order nor on how many send. A call is timed whole, a backward pass with the products that give
the weights' gradients, and `faster` says whether it took less than the plain form in both regimes. Entries of
other shapes and devices stay; UNTUNED shapes are left out, so that what is chosen for an unknown shape is
measured too.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable

import collective_matmul_check as checks
import harness
import jax
import timed_loop
from measure import programs
from measure.collectives import Case

from jaxthru.runtime import xla
from pallas_kernels.collective_matmul import mosaic_gpu, reference, tiles
from pallas_kernels.collective_matmul.shapes import GPU
from pallas_kernels.hopper_tiles import hopper_device

PLAIN = "plain"
ORDERS_EACH = 6  # of the eight, those that read least
FINALISTS = 4
CAP = {"rounds": 3, "seconds": 0.3}  # of each finalist, and of the plain form


def stages(problem: tiles.Problem, senders: list[int]) -> list[Callable]:
    """Returns the stages of the search: each, of the tiles measured so far, the best first, what to measure
    next. What is taken now is among the first."""
    kind, sms = hopper_device()
    now, _ = tiles.choose(problem, kind, sms)

    def orders(best):
        each = (tiles.reordered(problem, one, sms)[1:ORDERS_EACH] for one in best[:2])
        return [*itertools.chain.from_iterable(each)]

    return [
        lambda best: [*dict.fromkeys([*tiles.candidates(problem, sms), now])],
        orders,
        lambda best: [dataclasses.replace(one, senders=many) for one in best[:1] for many in senders],
    ]


def try_all(mesh: jax.sharding.Mesh, every: Iterable[tiles.Tiles]) -> None:
    """Runs all sizes to be measured, and their clusters, at tiny shapes in a child process."""
    minor, width = tiles.ORDERS[0]
    alike = {"minor": minor, "width": width, "senders": tiles.Tiles.senders}
    wanted = dict.fromkeys(dataclasses.replace(one, **alike) for one in every)
    checks.try_tiles(dict(mesh.shape), list(wanted))


def tune(case: Case, search: list[Callable], turns: int, turn_seconds: float, cap: dict = CAP) -> dict:
    """Returns the table's entry for a case, and under "tried" the microseconds of all tiles measured.

    search: as `stages` has it. cap: how long the finalists run, as `programs.at_the_cap` takes it.
    """
    operands = case.operands()
    # The plain form runs before any kernel: what only it needs of XLA and NCCL is then loaded.
    wanted = jax.block_until_ready(jax.jit(case.of(reference))(*operands))
    plain = programs.placed({PLAIN: (case.of(reference), operands)}, case.in_a_row)
    placed, times = {}, {}
    for stage in search:
        new = [one for one in stage(by_product(times)) if one not in times]
        runs = {one: (case.of(mosaic_gpu, tiles=one), operands) for one in new}
        placed |= (found := programs.placed(runs, case.in_a_row, alike=True))
        if found:
            timed = programs.both_regimes(plain | found, turns, turn_seconds, case.in_a_row)
            times |= {name: of for name, of in timed.items() if name != PLAIN}
    if not times:
        sys.exit(f"{case.problem.key}: no tiles compile")
    last = plain | {name: placed[name] for name in by_product(times)[:FINALISTS]}
    final, joules = finals(last, case, turns, turn_seconds, cap)
    best = by_product({name: final[name] for name in last if name != PLAIN})[0]
    fused = checks.compile_safely(jax.jit(case.of(mosaic_gpu, tiles=best)).lower(*operands))
    jax.block_until_ready(fused(*case.operands(seed=1)))  # so that no buffer still holds the right result
    found = jax.block_until_ready(fused(*operands))  # nothing is loaded while it runs
    if not max(map(float, programs.apart(found, wanted))) <= programs.TOLERANCE:
        sys.exit(f"{case.problem.key}: the result with {best} differs from the plain form's")
    return {
        "tiles": dataclasses.asdict(best),
        "microseconds": final[best],
        "plain_microseconds": final[PLAIN],
        **({"joules": joules[best], "plain_joules": joules[PLAIN]} if joules[best] else {}),
        "faster": all(fused < plain for fused, plain in zip(final[best], final[PLAIN], strict=True)),
        "tried": [
            dataclasses.asdict(one)
            | {"microseconds": microseconds}
            | ({"at_the_cap": final[one], "joules": joules[one]} if one in final else {})
            for one, microseconds in times.items()
        ],
    }


def by_product(times: dict[tiles.Tiles, list[float]]) -> list[tiles.Tiles]:
    """Returns the tiles, those first whose times in both regimes have the least product."""
    return sorted(times, key=lambda one: math.prod(times[one]))


def finals(
    runs: programs.Runs, case: Case, turns: int, turn_seconds: float, cap: dict
) -> tuple[dict[Hashable, list[float]], dict[Hashable, float | None]]:
    """Returns the microseconds of a call of each, at the power cap with the clock of its own joules and in
    bursts, and the joules of a call there on all GPUs, None where no counter tells."""
    bursts = programs.in_turns(runs, 2, turns, turn_seconds, case.in_a_row, programs.REST * turn_seconds)
    gpus, microseconds, joules = case.mesh.size, {}, {}
    for name, of in programs.at_the_cap(runs, calls=case.in_a_row, gpus=gpus, **cap).items():
        both = statistics.median(of["seconds"]), statistics.median(bursts[name])
        microseconds[name] = [round(1e6 * seconds, 1) for seconds in both]
        watts = [each for each in of["watts"] if each]
        joules[name] = round(statistics.fmean(watts) * both[0] * gpus, 5) if watts else None
    return microseconds, joules


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
    every = [f"{name}_{direction}" for name in GPU for direction in both]
    add("--cases", nargs="+", choices=every, metavar="SHAPE_DIRECTION", help="in place of both")
    done = "the first run that precedes all others has just passed, in a process of its own"
    add("--first-run-done", action="store_true", help=done)
    senders = "thread blocks, beside the 44 that are the default"
    add("--senders", nargs="*", type=int, metavar="N", default=[28, 66], help=senders)
    add("--tried", action="store_true", help="all sizes and clusters have run before at tiny shapes")
    add("--stop-after", type=float, default=math.inf, metavar="SECONDS", help="begin no case after")
    add("--turns", type=int, default=6)
    add("--turn-seconds", type=float, default=0.01)
    options = parser.parse_args()
    os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.6"  # the rest is for the processes that try tiles
    harness.keep_stdout()
    xla.configure()
    phase, axes, started = timed_loop.Phases(), {"tensor": options.devices}, time.monotonic()
    if not options.first_run_done:
        with phase("first run, in a child process"):
            checks.in_child([axes], seconds=180)
    mesh = checks.make_mesh(axes)
    kind = jax.local_devices()[0].device_kind
    named = list(itertools.product(options.shapes, options.directions))
    if options.cases:
        named = [(name, way) for name, _, way in (case.rpartition("_") for case in options.cases)]
    cases = {f"{name} {way}": Case(GPU[name], mesh, way == "backward") for name, way in named}
    if not options.tried:
        with phase("tiny shapes, in a child process"):
            every = (stages(case.problem, [])[0]([]) for case in cases.values())
            try_all(mesh, itertools.chain.from_iterable(every))
    found, left_out = {}, []
    for name, case in cases.items():
        if time.monotonic() - started > options.stop_after:
            left_out.append(name)
            continue
        key = case.problem.key
        with phase(name), checks.ends_within(300, name):
            search = stages(case.problem, options.senders)
            found[key] = tune(case, search, options.turns, options.turn_seconds)
        print(key, found[key], file=sys.stderr, flush=True)
        entry = {field: value for field, value in found[key].items() if field != "tried"}
        tiles.TABLE.setdefault(kind, {})[key] = entry
        write(tiles.TABLE)  # after each, so that a run cut short leaves what it has
    line = {"benchmark": "tune_collective_matmul", "entries": found, "left_out": left_out}
    harness.emit(line | {"seconds": phase.seconds} | harness.provenance())
    return 0


if __name__ == "__main__":
    sys.exit(main())
