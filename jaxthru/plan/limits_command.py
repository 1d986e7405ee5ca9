"""The command `plan limits`: its arguments, and what it prints."""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import rich.box
import rich.console
import rich.table

from jaxthru import config as configuration
from jaxthru.config import RunConfig
from jaxthru.plan import fabric as fabrics
from jaxthru.plan import frontier, limits
from jaxthru.plan.cluster import Cluster, described
from jaxthru.plan.demand import Demand, demand, rate_of
from jaxthru.plan.limits import SHARE, WALLS, Point
from jaxthru.runtime import aot, command_line, xla
from jaxthru.runtime.errors import require
from jaxthru.training.plot import Panel, Picture

DAY = 86_400


def add(commands: argparse._SubParsersAction, prog: str) -> None:
    """Adds `limits` to the planner's commands. prog: how the planner was called."""
    command = commands.add_parser(
        "limits",
        help="over how many devices it still scales, and what ends it",
        description="Says over how many devices a step still gets faster, which wall ends it, and what\n"
        "moves the wall. By arithmetic: nothing is compiled.",
        **command_line.ending(f"{prog} limits", "--config llama3_70b --set train.rows=2048"),
    )
    command.set_defaults(run=run)
    file = "a .py file, the config.json of a run, or the name of a file in configs/"
    command.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=file)
    command_line.add_overrides(command)
    frontier_help = "the published limits of scale beside ours, from named presets; needs no --config"
    command.add_argument("--frontier", action="store_true", help=frontier_help)
    add_cluster(command)
    add = command.add_argument
    add("--most", type=int, default=limits.MOST, help="devices to look at, at most; default %(default)s")
    add("--days", type=float, help="of the run: how many devices end it in time")
    add("--json", action="store_true", help="print one JSON object")
    add("--plot", metavar="FILE", help="draw the curve there, as SVG")


def add_cluster(command: argparse.ArgumentParser) -> None:
    """Gives a command the arguments that describe devices and what joins them."""
    add = command.add_argument
    shipped = ", ".join(fabrics.shipped())
    fabric = f"what joins the devices: a .toml file, or one of {shipped}; default %(default)s"
    add("--fabric", default="infiniband_400g", help=fabric)
    change = "change one key of the fabric; may be given several times"
    add("--fabric-set", action="append", default=[], metavar="KEY=VALUE", help=change)
    add("--device", help=f"one of {', '.join(aot.TARGETS)}; default: the fabric's")
    add("--tflops", type=float, help="that a device holds in matmuls; default: measured, or its data sheet's")


def cluster_of(arguments: argparse.Namespace, config: RunConfig, need: Demand, devices: int) -> Cluster:
    """Returns the cluster that a command line describes. devices: to look at, at most. Raises InputError."""
    tflops = arguments.tflops
    require(tflops is None or 0 < tflops < math.inf, f"--tflops {tflops}: must be above 0, and finite")
    fabric = fabrics.load(arguments.fabric, arguments.fabric_set)
    torus = f"--fabric {arguments.fabric}: a torus of TPUs; these limits are of GPUs, plan network takes it"
    require(not fabric.torus, torus)
    name = arguments.device or fabric.device
    target = aot.target(name)
    rate, source = rate_of(name, target.name, need, config.precision.matmul)
    rate, source = (tflops * 1e12, "by --tflops") if tflops else (rate, source)
    return described(fabric, target, rate, xla.memory_fraction(), source, devices)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code. Raises InputError."""
    require(arguments.most >= 1, f"--most {arguments.most}: must be at least 1")
    require(arguments.days is None or arguments.days > 0, f"--days {arguments.days}: must be above 0")
    require(
        arguments.frontier != ("config" in arguments),
        "plan limits: give --config FILE for a model of your own, or --frontier for the published limits",
    )
    return _frontier(arguments) if arguments.frontier else _limits(arguments)


def _frontier(arguments: argparse.Namespace) -> int:
    found, variants = frontier.figures(), frontier.sensitivity()
    if arguments.json:
        print(json.dumps(frontier.as_json(found, variants)))
    else:
        worst = max(found, key=lambda row: abs(np.log(row.ratio)))
        tests = sum(row.kind == frontier.TEST for row in found)
        _show(
            frontier.tables(found, variants),
            [
                f"{tests} tests and {len(found) - tests} calibrations; the farthest is {worst.ratio:.2f} × "
                f"what was published: {worst.what}"
            ],
        )
    _draw(frontier.picture if arguments.plot else None, arguments)
    return 0


def _limits(arguments: argparse.Namespace) -> int:
    config = configuration.from_arguments(arguments)
    aot.use_cpu()
    need = demand(config)
    cluster = cluster_of(arguments, config, need, arguments.most)
    found = limits.points(need, cluster, arguments.most)
    end, walls = limits.ends(need, cluster, found), limits.closed(need, cluster)
    moved = limits.changes(need, cluster, arguments.most)
    if arguments.json:
        print(json.dumps(_json(need, cluster, found, end, walls, moved)))
    else:
        said = _lines(need, found, end, arguments)
        _show([_curve(found), _walls(walls), _moved(moved)], [*cluster.said, *NOTES, *said])
    _draw((lambda: picture(found)) if arguments.plot else None, arguments)
    return 0


NOTES = (
    "bounds by arithmetic: overlapped = all communication hides behind the products; exposed = none does. "
    "State is resident, rows are one document each, meshes are of data, fsdp and tensor, "
    "of a mixture of experts of expert too.",
)


def _lines(need: Demand, found: list[Point], end: limits.Ends, arguments: argparse.Namespace) -> list[str]:
    shortest = end.shortest
    said = [
        f"shortest step, however many devices: {need.layers} layers × "
        f"{shortest / need.layers * 1e6:.0f} µs = {shortest * 1e3:.1f} ms; "
        f"shortest run of {need.steps:,} steps: {_duration(shortest * need.steps)}"
    ]
    fastest = max(found, key=lambda point: point.tokens_per_second)
    said.append(
        f"fastest here: {fastest.devices:,} devices, {fastest.tokens_per_second:,.0f} tokens/s, "
        f"{_duration(fastest.seconds * need.steps)} for the run"
    )
    if arguments.days:
        in_time = [point for point in found if point.seconds * need.steps <= arguments.days * DAY]
        least = f"{in_time[0].devices:,} devices at least" if in_time else "no number of devices looked at"
        said.append(f"in {arguments.days:g} days: {least}, if all is overlapped")
    where = f"to {end.overlapped:,} devices" if end.overlapped else "on no number of devices"
    exposed = f"to {end.exposed:,}" if end.exposed else "on none"
    why = f"then {WHY[end.binds]} binds" if end.binds else f"no wall up to {found[-1].devices:,}"
    said.append(f"{SHARE:.0%} of linear {where} if all is overlapped, {exposed} if nothing is; {why}")
    return said


WHY = {name: name for name in WALLS} | {
    "batch": "the batch (each row has its own devices, and a layer is split no further; train.rows)",
    "NIC": "the NIC (weights and gradients over the network)",
    "NVLink": "NVLink (activations between the parts of a layer)",
    "latency": "latency (kernels and hops, one after the other)",
    "compute": "recomputation (memory: remat.policy)",
}


def picture(found: list[Point]) -> Picture:
    """Returns tokens/s over devices, and the shares of linear."""
    devices = np.array([point.devices for point in found], float)
    first = found[0].tokens_per_second / found[0].share / found[0].devices
    lines = {
        "linear": first * devices,
        "all overlapped": np.array([point.tokens_per_second for point in found]),
        "nothing overlapped": np.array([point.tokens_per_second_exposed for point in found]),
    }
    shares = {
        "all overlapped": np.array([point.share for point in found]),
        "nothing overlapped": np.array([point.share_exposed for point in found]),
        f"{SHARE:.0%}": np.full(len(found), SHARE),
    }
    curve = Panel("tokens/s, by devices", {name: (devices, line) for name, line in lines.items()}, "xy")
    share = Panel(
        "share of linear, by devices", {name: (devices, line) for name, line in shares.items()}, "x"
    )
    return Picture((curve, share))


def _curve(found: list[Point]) -> rich.table.Table:
    # In 80 columns there is no room for edges and spaces.
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=0, show_edge=False)
    axes = "×expert\n×tensor" if "expert" in found[0].mesh else "×tensor"
    for column in ("devices", f"data×fsdp\n{axes}", "micro-\nbatches"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("remat", no_wrap=True)
    for column in ("step,\nover-\nlapped", "tokens/s", "share\nof\nlinear", "ex-\nposed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("binds", no_wrap=True)
    for point in found:
        table.add_row(
            f"{point.devices:,}",
            "×".join(str(size) for size in point.mesh.values()),
            str(point.microbatches),
            point.remat,
            _duration(point.seconds),
            f"{point.tokens_per_second:,.0f}",
            f"{point.share:.0%}",
            f"{point.share_exposed:.0%}",
            point.binds,
        )
    return table


def _walls(walls: dict[str, float]) -> rich.table.Table:
    table = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, title="\neach wall alone, by its formula", title_justify="left"
    )
    for name in walls:
        table.add_column(name, justify="right")
    table.add_row(*(f"{devices:,.0f}" for devices in walls.values()))
    return table


def _moved(moved: list[limits.Change]) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, title="what moves the walls", title_justify="left")
    table.add_column("")
    for column in ("devices at 80 %,\noverlapped", "exposed", "shortest\nstep"):
        table.add_column(column, justify="right")
    table.add_column("binds then")
    for change in moved:
        numbers = f"{change.overlapped:,}", f"{change.exposed:,}", _duration(change.shortest)
        table.add_row(change.what, *numbers, change.binds or "none")
    return table


def _json(need, cluster, found, end, walls, moved) -> dict[str, Any]:
    plain = dataclasses.asdict
    return {
        "tokens_per_step": need.tokens,
        "parameters": need.parameters,
        "flops_per_step": need.flops,
        "cluster": plain(cluster),
        "points": [plain(point) for point in found],
        "ends": plain(end) | {"shortest_run": end.shortest * need.steps},
        "closed": walls,
        "changes": [plain(change) for change in moved],
    }


def _duration(seconds: float) -> str:
    for size, unit in ((DAY, "days"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.4g} {unit}"
    return f"{seconds * 1e3:,.4g} ms"


def _draw(draw, arguments: argparse.Namespace) -> None:
    if draw is not None:
        draw().save(Path(arguments.plot))
    if not arguments.json:
        _show([], [f"plot: {arguments.plot}" if arguments.plot else "--plot FILE draws the curve"])


def _show(tables: list[rich.table.Table], lines: list[str]) -> None:
    console = rich.console.Console()
    for table in tables:
        console.print(table)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
