"""Times the implementations of an operation, forward and backward, in turns, and prints one JSON line.

    python scripts/bench/measure/kernel.py OPERATION [--shape NAME|all] [--tiles] [--output FILE]

OPERATION is a file of measure/kernels/, which says what is timed and what is expected; shapes are those of
the operation's own shapes.py. Contenders take turns, A-B-C-A-B-C, and medians count; beside each stands how
far its results are from those of one of them. --tiles has kernels contend in other tiles too.
"""

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import turns
from measure import workload

from jaxthru.runtime import xla

OPERATIONS = sorted(path.stem for path in Path(__file__).with_name("kernels").glob("*.py"))


def main() -> int:
    first = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=len(sys.argv) < 3)
    first.add_argument("operation", choices=OPERATIONS, help="--help behind it lists its shapes")
    name, words = first.parse_known_args()
    operation = importlib.import_module(f"measure.kernels.{name.operation}")
    pace, groups = operation.PACE, operation.GROUPS
    shapes = (*groups, *operation.SHAPES)
    parser = turns.parser(operation.__doc__.splitlines()[0], shapes, operation.SHAPE, pace.warmup, pace.timed)
    parser.add_argument("--tiles", action="store_true", help="time other tiles of kernels too")
    parser.add_argument("--table", type=Path, help="tiles of Hopper's grouped matmuls, for the tree's table")
    options = parser.parse_args(words)
    if options.table:
        operation.use_table(options.table)
    harness.keep_stdout()
    xla.configure()
    contenders, clocks, about = {}, {}, {}
    for shape in groups.get(options.shape, (options.shape,)):
        work = operation.workload(operation.SHAPES[shape])
        contenders[shape], clocks[shape] = workload.measured(work, pace, options)
        about[shape] = work.about
    if options.shape in groups:
        told, more = {shape: of | about[shape] for shape, of in contenders.items()}, {"clocks": clocks}
    else:
        told, more = contenders[options.shape], about[options.shape] | clocks[options.shape]
    turns.emit(name.operation, options, told, more)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
