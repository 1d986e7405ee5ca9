"""Measures tiles for the grouped matmuls of Triton and writes the best into triton_table.json.

    python scripts/bench/tune_grouped_matmul.py [--shapes NAME ...] [--operations matmul transposed outer]

Of each shape, with as many rows to a group as chance gives: all of `triton_tiles.candidates` take turns with
XLA's dense product of as many FLOPs, in two regimes: without a pause, which holds the GPU at its power cap,
and in bursts after a rest, at its full clock. The tiles with the least product of both times then take turns
in other orders. What is written has the values of the portable form. About 30 s a shape and operation on an
H200, as predicted; entries of other shapes and devices stay.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable

import harness
import jax
import jax.numpy as jnp
import numpy as np
import timed_loop
from measure import programs

from jaxthru.runtime import xla
from pallas_kernels.dispatch import nvidia_compute_capability
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_outer, triton, triton_tiles
from pallas_kernels.grouped_matmul.shapes import GPU, Shape
from pallas_kernels.grouped_matmul.triton_tiles import Problem, Tile

PLAIN = "dense"
OPERATIONS = ("matmul", "transposed", "outer")
SHAPES = [name for name in GPU if name.startswith(("qwen3", "olmoe", "mixtral"))]
SHARED_BYTES = {8: 163 << 10, 9: 227 << 10}
"""Of a program, by the major compute capability of data-centre GPUs; elsewhere 99 KiB."""


@dataclasses.dataclass(frozen=True)
class Case:
    """operands: x, the matrices or y, and sizes. of: a tile -> the kernel. plain: the dense product.
    portable: the same by XLA. All are functions of the operands, and give a tuple."""

    problem: Problem
    operands: tuple[jax.Array, ...]
    of: Callable[[Tile], Callable]
    plain: Callable
    portable: Callable


def case(shape: Shape, operation: str, seed: int = 0) -> Case:
    """Returns an operation of a shape: "transposed" is the gradient of the rows of its "matmul", "outer" that
    of the matrices."""
    I, O = shape.columns, shape.results  # noqa: E741
    if operation == "transposed":
        I, O = O, I  # noqa: E741
    keys = jax.random.split(jax.random.key(seed), 2)
    x = jax.random.normal(keys[0], (shape.rows, I), jnp.bfloat16)
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(shape.rows, np.full(shape.groups, 1 / shape.groups))
    sizes = jnp.asarray(shape.sizes or drawn, jnp.int32)
    problem = Problem(operation, shape.rows, shape.groups, I, O, "bfloat16")
    if operation == "outer":
        y = jax.random.normal(keys[1], (shape.rows, O), jnp.bfloat16)
        how = {"into": None, "dtype": jnp.bfloat16, "platform": "gpu"}
        return Case(
            problem,
            (x, y, sizes),
            lambda tile: lambda *arrays: (triton.grouped_outer(*arrays, **how, tile=tile),),
            lambda x, y, _: (x.T @ y,),
            lambda *arrays: (grouped_outer(*arrays, implementation="xla"),),
        )
    turned = operation == "transposed"
    w = jax.random.normal(keys[1], (shape.groups, *((O, I) if turned else (I, O))), jnp.bfloat16)
    how = {"transposed": turned, "platform": "gpu"}
    return Case(
        problem,
        (x, w, sizes),
        lambda tile: lambda *arrays: (triton.grouped_matmul(*arrays, **how, tile=tile),),
        lambda x, w, _: (x @ (w[0].T if turned else w[0]),),
        lambda *arrays: (grouped_matmul(*arrays, turned, implementation="xla"),),
    )


def tune(case: Case, tiles: list[Tile], turns: int, turn_seconds: float) -> dict:
    """Returns the table's entry for a case, and under "tried" the microseconds of all tiles measured."""
    operands, calls = case.operands, programs.in_a_row(case.problem.flops)
    wanted = jax.block_until_ready(jax.jit(case.portable)(*operands))
    plain = programs.placed({PLAIN: (case.plain, operands)}, calls)

    def times(tiles: list[Tile]) -> dict:
        runs = {tile: (case.of(tile), operands) for tile in tiles}
        placed = plain | programs.placed(runs, calls, alike=True)
        return programs.both_regimes(placed, turns, turn_seconds, calls)

    def best_of(found: dict) -> Tile:
        measured = found.keys() - {PLAIN}
        if not measured:
            sys.exit(f"{case.problem.key}: no tile compiles; why is said above")
        return min(measured, key=lambda tile: math.prod(found[tile]))

    tried = times(tiles)
    best = best_of(tried)
    final = times([best, *triton_tiles.in_other_bands(case.problem, best)])
    best = best_of(final)
    found = jax.block_until_ready(jax.jit(case.of(best))(*operands))
    if not max(map(float, programs.apart(found, wanted))) <= programs.TOLERANCE:
        sys.exit(f"{case.problem.key}: the result with {best} differs from the portable form's")
    every = [(tile, took) for of in (tried, final) for tile, took in of.items() if tile != PLAIN]
    return {
        "tile": dataclasses.asdict(best),
        "microseconds": final[best],
        "plain_microseconds": final[PLAIN],
        "tried": [dataclasses.asdict(tile) | {"microseconds": took} for tile, took in every],
    }


def write(table: dict[str, dict[str, dict]]) -> None:
    """Writes the table that `triton_tiles` reads."""
    triton_tiles.TABLE_FILE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shapes", nargs="+", choices=list(GPU), default=SHAPES)
    add("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    add("--turns", type=int, default=6)
    add("--turn-seconds", type=float, default=0.01)
    options = parser.parse_args()
    harness.keep_stdout()
    xla.configure()
    phase, kind = timed_loop.Phases(), jax.local_devices()[0].device_kind
    shared = SHARED_BYTES.get((nvidia_compute_capability() or (0, 0))[0], 99 << 10)
    found = {}
    for name in options.shapes:
        for operation in options.operations:
            one = case(GPU[name], operation)
            with phase(f"{name} {operation}"):
                tiles = triton_tiles.candidates(one.problem, shared)
                entry = tune(one, tiles, options.turns, options.turn_seconds)
            found[one.problem.key] = entry
            rate = round(one.problem.flops / entry["microseconds"][0] / 1e6)
            print(one.problem.key, entry["tile"], f"{rate} TFLOP/s", file=sys.stderr, flush=True)
            kept = {field: value for field, value in entry.items() if field != "tried"}
            triton_tiles.TABLE.setdefault(kind, {})[one.problem.key] = kept
            write(triton_tiles.TABLE)  # after each, so that a run cut short leaves what it has
    harness.emit({"benchmark": "tune_grouped_matmul", "entries": found} | harness.provenance())
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
