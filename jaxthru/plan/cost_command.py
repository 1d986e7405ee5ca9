"""The command `plan cost`: its arguments, and what it prints."""

import argparse
import dataclasses
import json
import math

import rich.box
import rich.console
import rich.table

from jaxthru import config as configuration
from jaxthru.config import RunConfig
from jaxthru.plan import cost
from jaxthru.plan.demand import demand
from jaxthru.plan.limits_command import add_cluster, cluster_of
from jaxthru.runtime import aot, command_line
from jaxthru.runtime.errors import require
from jaxthru.training.run_directory import RunDirectory


def add(commands: argparse._SubParsersAction, prog: str) -> None:
    """Adds `cost` to the planner's commands. prog: how the planner was called."""
    example = "--config llama3_8b --run runs/llama3_8b/1 --set cost.dollars_per_device_hour=PRICE"
    command = commands.add_parser(
        "cost",
        help="hours, energy and dollars of the run",
        description="Says how many hours, MWh and dollars a run takes: by the rate of a run, a rate\n"
        "that you give, or the one that plan limits predicts. No price is assumed.",
        **command_line.ending(f"{prog} cost", example),
    )
    command.set_defaults(run=run)
    configuration.add_arguments(command)
    add = command.add_argument
    add("--run", dest="run_dir", metavar="RUN_DIR", help="a run whose rate and joules a token to take")
    add("--tokens-per-second", type=float, help="the rate, of all devices together")
    add("--joules-per-token", type=float, help="as the devices count them")
    add("--tokens", type=float, help="of the whole run; default: train.steps × rows × sequence")
    add("--devices", type=int, help="that the run is to have; default: as --run, else 1")
    add_cluster(command)
    add("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code. Raises InputError."""
    for name in ("tokens_per_second", "joules_per_token", "tokens", "devices"):
        value = getattr(arguments, name)
        fits = value is None or 0 < value < math.inf
        require(fits, f"--{name.replace('_', '-')} {value}: must be above 0, and finite")
    both = arguments.run_dir is not None and arguments.tokens_per_second is not None
    require(not both, "plan cost: give --run or --tokens-per-second, not both: which rate counts?")
    config = configuration.from_arguments(arguments)
    rate = rate_of(arguments, config)
    if arguments.joules_per_token is not None:
        rate = dataclasses.replace(rate, joules_per_token=arguments.joules_per_token, whole=False)
    found = cost.bill(arguments.tokens or cost.tokens_of(config), rate, config.cost)
    if arguments.json:
        print(json.dumps(cost.row_of(found)))
        return 0
    console = rich.console.Console()
    console.print(table(found))
    for line in cost.lines(found, config.cost):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return 0


def rate_of(arguments: argparse.Namespace, config: RunConfig) -> cost.Rate:
    """Returns the rate that a command line asks for. Raises InputError."""
    if arguments.run_dir is not None:
        directory = RunDirectory(arguments.run_dir)
        require(directory.metrics_file.is_file(), f"--run {arguments.run_dir}: no metrics.jsonl is there")
        return cost.measured(directory, arguments.devices)
    devices = arguments.devices or 1
    if arguments.tokens_per_second is not None:
        return cost.given(arguments.tokens_per_second, devices)
    aot.use_cpu()
    need = demand(config)
    return cost.predicted(need, cluster_of(arguments, config, need, devices), devices)


def table(found: cost.Bill) -> rich.table.Table:
    """Returns the bill."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    energy = "not known" if found.mwh is None else f"{found.mwh:,.4g} MWh"
    if found.joules_per_token is not None:
        energy += f", {1e3 * found.joules_per_token:,.4g} mJ a token"
    dollars = "no price" if found.dollars is None else f"{found.dollars:,.2f}"
    if found.dollars_per_million_tokens is not None:
        dollars += f", {found.dollars_per_million_tokens:,.4g} a million tokens"
    for name, value in (
        ("tokens", f"{found.tokens:,.0f}"),
        ("devices", f"{found.rate.devices:,}"),
        ("tokens/s", f"{found.rate.tokens_per_second:,.0f}"),
        ("hours", f"{found.hours:,.4g} ({found.hours / 24:,.3g} days)"),
        ("device-hours", f"{found.device_hours:,.4g}"),
        ("energy", energy),
        ("dollars", dollars),
    ):
        table.add_row(name, value)
    return table
