"""The command `plan goodput`: its arguments, and what it prints."""

import argparse
import contextlib
import json
import math
from typing import Any

import rich.box
import rich.console
import rich.table

from jaxthru.plan.goodput import HOUR, Measured, Rates, measured
from jaxthru.runtime import command_line
from jaxthru.runtime.errors import InputError, require
from jaxthru.training.checkpoint_config import checked, seconds
from jaxthru.training.run_directory import RunDirectory


def add(commands: argparse._SubParsersAction, prog: str) -> None:
    """Adds `goodput` to the planner's commands. prog: how the planner was called."""
    example = "--mtbf 3.1 --save 10 --restart 600 --step 8"
    command = commands.add_parser(
        "goodput",
        help="the best checkpoint.every for a mean time between failures",
        description="Says after how many steps to save, so that most of the time trains, and what is kept\n"
        "then. With --run, what that run measured stands in for what is not given.",
        **command_line.ending(f"{prog} goodput", example),
    )
    command.set_defaults(run=run)
    add = command.add_argument
    add("--run", dest="run_dir", metavar="RUN_DIR", help="take its steps, saves, restarts and failures")
    add("--mtbf", type=float, metavar="HOURS", help="mean time between failures, of the whole run")
    add(
        "--device-mtbf", type=float, metavar="HOURS", help="of one device, in place of --mtbf; with --devices"
    )
    add("--devices", type=int, help="how many there are, for --device-mtbf")
    add("--save", type=float, metavar="SECONDS", help="that a save keeps the steps waiting")
    add("--write", type=float, default=0.0, metavar="SECONDS", help="that it goes on beside them; default 0")
    add("--restart", type=float, metavar="SECONDS", help="from a failure until steps go on")
    add("--step", type=float, metavar="SECONDS", help="of one step")
    add("--simulate", action="store_true", help="also simulate 100,000 failures at each of several intervals")
    add("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code. Raises InputError."""
    for name in ("mtbf", "device_mtbf", "restart", "step", "save", "write", "devices"):
        value = getattr(arguments, name)
        least = name in ("save", "write", "restart")
        fits = value is None or (0 <= value < math.inf if least else 0 < value < math.inf)
        bound = "at least 0" if least else "above 0"
        require(fits, f"--{name.replace('_', '-')} {value}: must be {bound}, and finite")
    own = measured(RunDirectory(arguments.run_dir).path) if arguments.run_dir else Measured()
    rates, now = rates_of(arguments, own), None
    if arguments.run_dir:
        now = _steps(RunDirectory(arguments.run_dir).asked("checkpoint").get("every"), rates.step)
    shown = rows(rates, now)
    simulated = _simulated(rates) if arguments.simulate else {}
    if arguments.json:
        print(json.dumps({"every": rates.best, "rows": shown, **simulated, "rates": vars(rates)}))
        return 0
    console = rich.console.Console()
    console.print(table(shown))
    for line in (
        *lines(rates, own, arguments.mtbf is None and arguments.device_mtbf is None),
        *_said(simulated),
    ):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return 0


def _steps(every: Any, step: float) -> int | None:
    """Returns a run's `checkpoint.every` in steps, None if it saves none. step: seconds of one."""
    with contextlib.suppress(InputError, TypeError):
        apart = seconds(checked("checkpoint.every", every))
        return max(1, round(apart / step)) if apart else every or None
    return None


def rates_of(arguments: argparse.Namespace, own: Measured) -> Rates:
    """Returns the rates that are given, or else those that a run has measured. Raises InputError."""
    both = arguments.mtbf is not None and arguments.device_mtbf is not None
    require(not both, "plan goodput: give --mtbf or --device-mtbf, not both")
    together = (arguments.device_mtbf is None) == (arguments.devices is None)
    require(together, "plan goodput: --device-mtbf and --devices belong together")
    hours = arguments.mtbf
    if arguments.device_mtbf is not None:
        hours = arguments.device_mtbf / arguments.devices
    found = {
        "--mtbf": own.between_failures if hours is None else hours * HOUR,
        "--save": own.save if arguments.save is None else arguments.save,
        "--restart": own.restart if arguments.restart is None else arguments.restart,
        "--step": own.step if arguments.step is None else arguments.step,
    }
    missing = [name for name, value in found.items() if value is None]
    where = f"; {arguments.run_dir} has not measured it" if arguments.run_dir else ", or --run RUN_DIR"
    require(not missing, f"plan goodput: give {', '.join(missing)}{where}")
    mean, save, restart, step = found.values()
    return Rates(between_failures=mean, save=save, restart=restart, step=step, write=arguments.write)


def rows(rates: Rates, now: int | None) -> list[dict[str, Any]]:
    """Returns what each of some intervals keeps: the best, others around it, and the run's own."""
    best = rates.best
    tried = {max(1, round(best * factor)) for factor in (0.25, 0.5, 1, 2, 4)} | ({now} if now else set())
    found = []
    for every in sorted(tried):
        what = {best: "best", now: "now"}.get(every, "")
        one = {"every": every, "what": what, "seconds": every * rates.step, "goodput": rates.kept(every)}
        found.append(one | rates.losses(every))
    return found


def table(shown: list[dict[str, Any]]) -> rich.table.Table:
    """Returns the rows as a table."""
    made = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    made.add_column("checkpoint.every", justify="right", no_wrap=True)
    made.add_column("")
    for column in ("seconds of steps", "goodput", "saving", "made again", "restarts"):
        made.add_column(column, justify="right")
    for row in shown:
        shares = [f"{row[name]:.2%}" for name in ("goodput", "saving", "made again", "restarts")]
        made.add_row(f"{row['every']:,}", row["what"], f"{row['seconds']:,.4g}", *shares)
    return made


def lines(rates: Rates, own: Measured, of_run: bool) -> list[str]:
    """Returns what the advice rests on. of_run: the time between failures is a run's own."""
    where = f", of {own.failures} of this run" if of_run else ""
    said = (
        f"a failure every {rates.between_failures / HOUR:,.4g} h in the mean{where}; a save keeps the steps "
        f"waiting for {rates.save:,.4g} s, a restart takes {rates.restart:,.4g} s, a step {rates.step:,.4g} s"
    )
    few = own.failures < 5 and of_run
    doubt = ["so few failures say little of the time between them: --mtbf HOURS gives another"] * few
    kept = f"{rates.kept(rates.best):.1%} of the time"
    apart = rates.best * rates.step
    timed = f"{apart / 60:.0f}m" if apart >= 1000 else f"{apart:.3g}s"
    advice = (
        f"--set checkpoint.every={rates.best} keeps {kept} for steps that count; as a time, "
        f"checkpoint.every={timed}"
    )
    return [said, *doubt, advice]


def _simulated(rates: Rates) -> dict[str, Any]:
    return {
        "simulated_goodput": rates.simulated(rates.best),
        "simulated_best": rates.simulated_best(),
        "simulated_best_of_bursts": rates.simulated_best(shape=0.7),
    }


def _said(simulated: dict[str, Any]) -> list[str]:
    if not simulated:
        return []
    return [
        f"simulated: {simulated['simulated_goodput']:.1%} are kept; the best interval is "
        f"{simulated['simulated_best']:,.4g} steps, and of failures that come in bursts "
        f"{simulated['simulated_best_of_bursts']:,.4g}"
    ]
