"""python -m jaxthru.plan: what a configuration will do, before hardware is used."""

import argparse
import dataclasses
import sys
from pathlib import Path

import rich.console
import rich.table

from jaxthru import config as configuration
from jaxthru.build import choices
from jaxthru.build.checks import asked_for
from jaxthru.build.memory_estimate import MemoryPlan, estimate, gib
from jaxthru.data.loader import open_data
from jaxthru.plan import memory
from jaxthru.plan.data import forecast
from jaxthru.plan.plot import svg
from jaxthru.runtime import aot, xla
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError, exit_code, require
from pallas_kernels.dispatch import Unsupported


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code: 1 for a configuration that does not fit, 2 for bad input,
    130 for Ctrl-C."""
    arguments = _parser().parse_args(argv)
    return exit_code(lambda: arguments.run(arguments))


def _data(arguments: argparse.Namespace) -> int:
    config = configuration.from_arguments(arguments)
    require(arguments.samples >= 1, f"--samples {arguments.samples}: must be at least 1")
    with open_data(config.data) as data:
        found = forecast(config, data, arguments.samples)
    write_atomically(Path(arguments.plot), svg(found.panels()))
    _show(found.table(), [*found.lines(), f"Plot: {arguments.plot}"])
    return 0


def _memory(arguments: argparse.Namespace) -> int:
    config = configuration.from_arguments(arguments)
    target, devices = aot.target(arguments.device), arguments.devices
    require(devices >= 1, f"--devices {devices}: must be at least 1")
    require(arguments.segments is None or arguments.segments >= 1, "--segments: must be at least 1")
    xla.configure()
    aot.use_cpu(devices)
    room = memory.room(config, target)
    segments = arguments.segments or choices.documents(config)[0]
    plan, resident = _plan(config, target, devices, arguments.segments)
    _show(memory.table(plan), [*room.said, *plan.notes])
    proposals = choices.propose(config, room, resident=resident, devices=devices, segments=segments)
    none = [] if proposals else ["Nothing fits, at any level and in any format."]
    _show(memory.proposal_table(proposals), none)
    short = room.lacks(plan)
    fits = f"fits: {gib(plan.peak_device)} of {gib(room.device)} GiB"
    if plan.peak_host:
        fits += f", on the host {gib(plan.peak_host)} of {gib(room.host)}"
    _show(None, short or [fits])
    return 1 if short else 0


def _plan(config, target, devices, segments) -> tuple[MemoryPlan, MemoryPlan | None]:
    """Returns the plan of a configuration, and the same if it is that of the resident step, compiled."""
    offload = config.offload
    if offload.level == "auto":
        room = memory.room(config, target)
        config = choices.resolve(config, room, devices, segments or choices.documents(config)[0])
        level, fraction = config.offload.level, config.offload.fraction
        found = f"offload.level = auto is {level}, offload.fraction = {fraction:g}"
        plan, resident = _plan(config, target, devices, segments)
        return dataclasses.replace(plan, notes=(found, *plan.notes)), resident
    if not aot.available():
        plan, _ = estimate(config, devices=devices, segments=segments or choices.documents(config)[0])
        note = 'an estimate by arithmetic: to compile for a GPU, pip install "jaxthru[gpu]"'
        return dataclasses.replace(plan, notes=(note, *plan.notes)), None
    try:
        if offload.layered:
            return memory.dispatched(config, target, devices, segments), None
        plan = memory.resident(config, target, devices, segments)
    except Unsupported as refusal:
        raise InputError(f"{asked_for(config, refusal)}: {refusal}") from refusal
    return plan, plan


def _show(table: rich.table.Table | None, lines: list[str]) -> None:
    console = rich.console.Console()
    if table is not None:
        console.print(table)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxthru.plan", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data", help="tokens and epochs of each source, padding, balance")
    room = commands.add_parser("memory", help="bytes on a GPU and its host, and the offload level that fits")
    for command, run in ((data, _data), (room, _memory)):
        command.set_defaults(run=run)
        configuration.add_arguments(command)
    room.add_argument(
        "--device", default="h200", help=f"one of {', '.join(aot.TARGETS)}; default %(default)s"
    )
    room.add_argument("--devices", type=int, default=1, help="of one host; default %(default)s")
    room.add_argument("--segments", type=int, help="most documents in a row; default: what the corpus has")
    data.add_argument("--samples", type=int, default=300, help="steps to plan in full, default %(default)s")
    data.add_argument("--plot", default="plan_data.svg", metavar="FILE", help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
