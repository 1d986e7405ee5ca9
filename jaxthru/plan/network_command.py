"""The command `plan network`: its arguments, what it compiles, and what it shows."""

import argparse
import json
import math
from pathlib import Path

import rich.console

from jaxthru import config as configuration
from jaxthru.build.memory_estimate import layout_of
from jaxthru.models import family
from jaxthru.plan import fabric as fabrics
from jaxthru.plan import network, network_advice, network_published
from jaxthru.plan.network_compile import PRODUCTS, TPUS, Request, asked, compiled, rates
from jaxthru.plan.network_flows import TRIALS
from jaxthru.plan.network_traffic import shape_of
from jaxthru.runtime.errors import InputError, require

EXAMPLE = "llama3_8b_8layer --devices 16 --fabric infiniband_400g"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives the command its arguments, beside those of a configuration."""
    add = parser.add_argument
    shipped = ", ".join(fabrics.shipped())
    add("--fabric", required=True, metavar="FABRIC", help=f"a .toml file, or one of {shipped}")
    change = "change one key of the fabric; may be given several times"
    add("--fabric-set", action="append", default=[], metavar="KEY=VALUE", help=change)
    add("--devices", type=int, help="of the job; default: all that the fabric has")
    add("--device", help="h200, h100, or a TPU: v5e, v5p, v6e; default: the fabric's")
    add("--segments", type=int, help="most documents in a row; default: what the corpus has")
    part = "share of the data sheet's FLOP/s that matrix products reach, default %(default)s"
    add("--products", type=float, default=PRODUCTS, help=part)
    add("--measured", type=float, metavar="SECONDS", help="of a step there, to tell links from other causes")
    add("--hlo", metavar="FILE", help="the step's HLO text, for the same mesh, in place of a compile")
    add("--trials", type=int, default=TRIALS, help="draws of the switches' hash, default %(default)s")
    add("--seed", type=int, default=0, help="of the hash and of random placement, default %(default)s")
    add("--json", action="store_true", help="print all numbers as JSON, and nothing else")
    add("--plot", metavar="FILE", help="draw the curves over queue pairs there, as SVG")


def published(arguments: argparse.Namespace) -> int:
    """Shows published figures beside the simulator's; returns the exit code."""
    console = rich.console.Console()
    console.print(network_published.table(network_published.figures()))
    for line in network_published.lines():
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code. Raises InputError."""
    config = configuration.from_arguments(arguments)
    fabric = fabrics.load(arguments.fabric, arguments.fabric_set)
    devices = fabric.devices if arguments.devices is None else arguments.devices
    for name in ("devices", "segments", "trials"):
        value = devices if name == "devices" else getattr(arguments, name)
        require(value is None or value >= 1, f"--{name} {value}: must be at least 1")
    measured = arguments.measured
    fits = measured is None or 0 < measured < math.inf
    require(fits, f"--measured {measured}: must be above 0, and finite")
    require(arguments.seed >= 0, f"--seed {arguments.seed}: must be at least 0")
    device = arguments.device or fabric.device
    keys = {"rates": rates(device, arguments.products), "measured": measured}
    require(
        bool(fabric.torus) == (device in TPUS),
        f"--device {device}: fabric {fabric.name} joins {'TPUs by a torus' if fabric.torus else 'GPUs'}",
    )
    keys["kinds"] = tuple(scope for stage in family.chain(config.model).stages for scope in stage.scopes)
    draws = {"trials": arguments.trials, "seed": arguments.seed}
    if fabric.torus:
        require(devices == fabric.devices, f"--devices {devices}: the torus has {fabric.devices}")
    else:
        fabrics.placed(fabric, devices, arguments.seed)  # before anything is compiled
    if arguments.hlo:
        shape, notes = shape_of(layout_of(config, devices).mesh.shape), (f"read from {arguments.hlo}",)
        found = network.forecast(_text(arguments.hlo), fabric, shape, notes=notes, **keys, **draws)
    else:
        per_host = math.gcd(fabric.gpus_per_host, devices)
        made, shape, notes = asked(config, device, devices, per_host, fabric.torus, arguments.segments)
        keys |= {"compiled": made.shape, "notes": (*notes, _how(made, keys["rates"]))}
        found = network.forecast(compiled(made), fabric, shape, **keys, **draws)
    _show(found, arguments, draws)
    return 0


def _text(file: str) -> str:
    try:
        return Path(file).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--hlo {file}: cannot be read ({error})") from error


def _how(made: Request, known) -> str:
    return (
        f"compiled for {math.prod(made.shape.values())} × {made.device}; computation at "
        f"{known.flops / 1e12:,.0f} TFLOP/s and {known.memory / 1e12:.2f} TB/s, "
        f"{known.launch * 1e6:.0f} µs a kernel (--products)"
    )


def _show(found: network.Forecast, arguments: argparse.Namespace, draws: dict[str, int]) -> None:
    said, better = network_advice.binds(found), network_advice.advice(found, **draws)
    if arguments.plot:
        found.picture().save(arguments.plot)
    if arguments.json:
        print(json.dumps(found.to_json() | {"binds": said, "advice": better}, indent=2))
        return
    console = rich.console.Console()
    console.print(found.table())
    schedule, fabric = found.schedule, found.fabric
    step = (
        f"step {schedule.step * 1e3:,.1f} ms: computation {schedule.compute * 1e3:,.1f}, links "
        f"{found.links * 1e3:,.1f}, of which {found.exposed * 1e3:,.1f} exposed"
    )
    over = f", leaves {fabric.oversubscription:.2g}:1 subscribed" * bool(fabric.oversubscription)
    qps = f", {fabric.qps} queue pairs" * (not fabric.torus and not fabric.spreads and fabric.leaves > 1)
    lines = [
        f"{found.devices} devices on {fabric.name}: {fabric.description}{over}{qps}",
        step,
        f"binds: {said}",
        *(f"advice: {line}" for line in better),
        *found.notes,
        *([f"plot: {arguments.plot}"] if arguments.plot else ["--plot FILE draws the curves"]),
    ]
    if not fabric.torus and fabric.leaves > 1 and not fabric.spreads:
        console.print(_curve(found))
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _curve(found: network.Forecast) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("queue pairs", "links ms", "exposed ms", "step ms", "max/mean", "Jain", "slowdown"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in found.curve:
        times = (network.number(value * 1e3) for value in (point.links, point.exposed, point.step))
        table.add_row(
            str(point.qps), *times, f"{point.mmr:.2f}", f"{point.jain:.2f}", f"{point.slowdown:.2f}"
        )
    return table
