"""What the profiler's hooks cost while it is off: jaxthru's loop, and the same without them, in turns.

    python scripts/bench/measure/profiler_off.py --config F [--set a.b=v ...] [--steps N] [--rounds N]

The second loop is the first one's source with every call of the profiler cut out. Both train the same
compiled step, A-A-B-B in one process, each time from the first state. Prints one JSON line.
"""

import ast
import inspect
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import comparison
import harness
from suites.profiler import QUIET

from jaxthru import config as configuration
from jaxthru import train as training
from jaxthru.build.compiled import build_step
from jaxthru.data.loading.dataset import open_data
from jaxthru.profile.account.build import WARM_UP
from jaxthru.runtime import xla
from jaxthru.training.checkpoint import Checkpointer
from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.start import StartTimes

HOOKS = "profile"
"""What the loop calls the profiler."""


class WithoutHooks(ast.NodeTransformer):
    """Cuts out of a function all statements that call the profiler; its program is the compiled step."""

    def _mentions(self, node: ast.AST) -> bool:
        return any(isinstance(one, ast.Name) and one.id == HOOKS for one in ast.walk(node))

    def visit_Assign(self, node: ast.Assign):
        return None if self._mentions(node.targets[0]) else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr):
        return None if self._mentions(node) else self.generic_visit(node)

    def visit_If(self, node: ast.If):
        return None if self._mentions(node.test) else self.generic_visit(node)

    def visit_With(self, node: ast.With):
        node.items = [item for item in node.items if not self._mentions(item)]
        self.generic_visit(node)
        if not node.body:  # of what timed the profiler alone nothing is left
            return None
        return node if node.items else node.body

    def visit_Attribute(self, node: ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id == HOOKS and node.attr == "program":
            return ast.copy_location(ast.parse("built.compiled", mode="eval").body, node)
        return self.generic_visit(node)


def without_hooks(function: Callable) -> Callable:
    """Returns a function of jaxthru.train, compiled again from its source without the profiler's hooks."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    tree = ast.fix_missing_locations(WithoutHooks().visit(tree))
    if HOOKS in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}:
        raise ValueError(f"{function.__name__}: the profiler is still called")
    names = dict(vars(training))
    exec(compile(tree, "<without hooks>", "exec"), names)
    return names[function.__name__]


def turn(loop: Callable, built, folder: Path) -> float:
    """Returns the median step of one run."""
    directory = RunDirectory(folder)
    directory.path.mkdir(parents=True)
    with Checkpointer(directory.checkpoints, built.config.checkpoint) as checkpointer:
        loop(built, directory, checkpointer, time.monotonic(), StartTimes())
    return median(row["step_seconds"] for row in directory.read_metrics() if row["step"] > WARM_UP)


def measure(arguments) -> dict:
    own = ["profile.at=0", f"train.steps={arguments.steps}", *QUIET.split()]
    config = configuration.load(arguments.config, [*arguments.overrides, *own])
    xla.configure()
    loops = {"hooks": training.train, "none": without_hooks(training.train)}
    seconds = {name: [] for name in loops}
    with open_data(config.data) as data, tempfile.TemporaryDirectory() as folder:
        built = build_step(config, data)
        turn(loops["hooks"], built, Path(folder) / "warm_up")
        for number in range(arguments.rounds):
            for name in ("hooks", "hooks", "none", "none"):
                place = Path(folder) / f"{number}_{name}_{len(seconds[name])}"
                seconds[name].append(turn(loops[name], built, place))
    spread = max(comparison.spread(of) for of in seconds.values())
    change = fmean(seconds["hooks"]) / fmean(seconds["none"]) - 1
    found = {"change": change, "spread": spread, "bar": 2 * spread, "met": abs(change) <= 2 * spread}
    return {"off": {"step_seconds": seconds, **found}}


main = harness.program(
    __doc__,
    measure,
    harness.option("--steps", type=int, default=15, help="of a turn"),
    harness.option("--rounds", type=int, default=2, help="of A-A-B-B"),
)


if __name__ == "__main__":
    sys.exit(main())
