"""python -m jaxthru.plan: what a configuration will do, before hardware is used."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import rich.console
import rich.table

from jaxthru import config as configuration
from jaxthru.build import attention_choice, choices, early_choices
from jaxthru.build.checks import refusals_named, validate
from jaxthru.build.confirmed import fastest
from jaxthru.build.defaults import get
from jaxthru.build.least_offload import propose
from jaxthru.build.memory_estimate import MemoryPlan, estimate, gib
from jaxthru.build.proposals import Candidate, all_candidates, candidates, likeliest, too_large
from jaxthru.build.refusal import NothingFits
from jaxthru.config import RunConfig
from jaxthru.data.loading.dataset import open_data
from jaxthru.plan import cost_command, goodput_command, limits_command, memory, network_command
from jaxthru.plan.data import forecast
from jaxthru.runtime import aot, command_line, xla
from jaxthru.runtime.errors import exit_code, require
from jaxthru.training.run_directory import RunDirectory


def main(argv: list[str] | None = None, prog: str = "python -m jaxthru.plan") -> int:
    """Runs the command; returns its exit code: 1 for a configuration that does not fit, 2 for bad input,
    130 for Ctrl-C."""
    arguments = _parser(prog).parse_args(argv)
    return exit_code(lambda: arguments.run(arguments))


def _data(arguments: argparse.Namespace) -> int:
    config = configuration.from_arguments(arguments)
    require(arguments.samples >= 1, f"--samples {arguments.samples}: must be at least 1")
    with open_data(config.data) as data:
        found = forecast(config, data, arguments.samples)
    files = [] if arguments.plot is None else [Path(arguments.plot)]
    if arguments.run_dir is not None:
        files.append(RunDirectory(arguments.run_dir).path / "plan_data.svg")
    for path in files:
        found.picture().save(path)
    if arguments.json:
        print(
            json.dumps({**found.to_tree(), "account": data.account, "plots": [str(path) for path in files]})
        )
        return 0
    _show(found.table(), [*found.lines(), *data.account])
    how = "--plot FILE draws the shares and the imbalance, --run-dir DIR draws them into a run directory"
    _show(None, [f"plot: {path}" for path in files] or [how])
    return 0


def _memory(arguments: argparse.Namespace) -> int:
    config = configuration.from_arguments(arguments)
    target, devices = aot.target(arguments.device), arguments.devices
    require(devices >= 1, f"--devices {devices}: must be at least 1")
    require(arguments.segments is None or arguments.segments >= 1, "--segments: must be at least 1")
    xla.configure()
    aot.use_cpu(devices)
    config = choices.reopened(config, choices.named(devices, target.name))
    layout = validate(config, jax.devices()[:devices], "gpu")
    room = memory.room(config, target)
    found = choices.Documents(arguments.segments, 1) if arguments.segments else choices.documents(config)
    segments = found.segments
    config, said = early_choices.for_devices(config, layout, target.name, target.capability)
    of = segments, found.mean, target.capability, room if choices.open_keys(config) else None

    def planned(tried: RunConfig, attention: str) -> tuple[RunConfig, MemoryPlan, MemoryPlan | None] | None:
        config, why = attention_choice.by_table(tried, layout, *of)
        said[attention_choice.KEY] = why or attention
        how = target, devices, arguments.segments
        if arguments.best:
            _show(None, _reasons(config, said))
            return _best(config, *how, segments, room)
        if not choices.open_keys(config):
            return config, *_plan(config, *how)
        return _settled(config, *how, segments, room)

    try:
        with refusals_named(config):
            of_run = config, layout, segments, target.capability
            settled = attention_choice.or_without_workspace(planned, *of_run)
    except NothingFits as error:
        _show(
            None, [str(error)] if arguments.best else [*room.said, *_reasons(error.config, said), str(error)]
        )
        return 1
    if settled is None:
        return 0
    config, plan, resident = settled
    plan = dataclasses.replace(plan, notes=(*_reasons(config, said), *plan.notes))
    if not aot.available():  # a plan that is compiled says so itself
        plan = dataclasses.replace(plan, notes=(*plan.notes, *found.notes))
    _show(None, [COMPILED if aot.available() else ESTIMATE])
    _show(memory.table(plan), [*room.said, *plan.notes])
    proposals = propose(config, room, resident=resident, devices=devices, segments=segments)
    _show(*memory.proposed(proposals))
    short = room.full.shortfall(plan)
    fits = f"fits: {gib(plan.peak_device)} of {gib(room.device)} GiB"
    if plan.peak_host:
        fits += f", on the host {gib(plan.peak_host)} of {gib(room.host)}"
    _show(None, short or [fits])
    return 1 if short else 0


COMPILED = "Memory of a step, compiled for the GPU:"
ESTIMATE = 'Memory of a step, an estimate by arithmetic: to compile for a GPU, pip install "jaxthru[gpu]"'


def _reasons(config: RunConfig, said: dict[str, str]) -> list[str]:
    """Returns a line for each key that was settled without a compile. said: the reasons by key."""
    return [f"{key} = auto is {get(config, key)}, {why}" for key, why in said.items() if why]


def _settled(
    config, target, devices, segments, known, room
) -> tuple[RunConfig, MemoryPlan, MemoryPlan | None]:
    """Returns a configuration with what it leaves open as a run on these devices would choose it, and what
    `_plan` does. segments, known: most documents in a row, as it was asked for, and as it is. Raises
    NothingFits."""
    tried = candidates(config, room, devices=devices, segments=known)
    confirm = lambda candidate: memory.confirm(config, candidate, target, room, devices, segments)  # noqa: E731
    if (found := fastest(tried, confirm)) is None:
        raise NothingFits(config, room, devices, known)
    asked, config, plan = config, found[0].config, found[1]
    chosen = ", ".join(f"{key} = auto is {get(config, key)}" for key in choices.open_keys(asked))
    with_level = choices.KEPT_WITH["offload.level"] if config.offload.layered else ()
    layered = "".join(f", {key} = {get(config, key):g}" for key in with_level)
    plan = dataclasses.replace(plan, notes=(chosen + layered, *plan.notes))
    return config, plan, None if config.offload.layered or not aot.available() else plan


def _best(config, target, devices, segments, known, room) -> None:
    """Shows all that `auto` may stand for, and compiles the fastest until one fits. Raises NothingFits."""
    require(bool(choices.open_keys(config)), "--best: nothing is `auto` in this configuration")
    every, found = all_candidates(config, room, devices, known), {}

    def confirm(candidate: Candidate) -> tuple[Candidate, MemoryPlan] | None:
        found[candidate.config] = memory.confirm(config, candidate, target, room, devices, segments)
        return found[candidate.config]

    fits = fastest(likeliest(every, room), confirm)
    rows = []
    for candidate in every:
        if candidate.config in found:
            confirmed, plan = found[candidate.config] or (candidate, None)
            rows.append((confirmed, plan, plan is not None))
        else:
            rows.append((candidate, None, False if too_large(candidate, room) else None))
    time = "time: by arithmetic, of the fastest; a run takes the fastest that fits as compiled"
    less = (
        [] if aot.available() else ["nothing is compiled here, without JAX's CUDA plugin: fits by arithmetic"]
    )
    table = memory.best_table(rows) if rows else None
    _show(table, [*room.said, *[time] * bool(rows), *less])
    if not fits:
        raise NothingFits(config, room, devices, known)


def _plan(config, target, devices, segments) -> tuple[MemoryPlan, MemoryPlan | None]:
    """Returns the plan of a configuration, and the same if it is that of the resident step, compiled."""
    if not aot.available():
        segments = segments or choices.documents(config)[0]
        size = memory.room(config, target).full.device
        return estimate(config, devices=devices, segments=segments, memory=size)[0], None
    if config.offload.layered:
        return memory.dispatched(config, target, devices, segments), None
    plan = memory.resident(config, target, devices, segments)
    return plan, plan


def _show(table: rich.table.Table | None, lines: list[str]) -> None:
    console = rich.console.Console()
    if table is not None:
        console.print(table)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = command_line.parser(
        prog, "Says what a run will do, before hardware is used.", "memory --config llama3_8b_one_gpu"
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Callable, config: str, says: str, does: str) -> argparse.ArgumentParser:
        ending = command_line.ending(f"{prog} {name}", f"--config {config}")
        command = commands.add_parser(name, help=says, description=does, **ending)
        command.set_defaults(run=run)
        configuration.add_arguments(command)
        return command

    data = add(
        "data",
        _data,
        "quickstart",
        "shares, tokens, epochs, padding and cuts of each source, balance",
        "Says what a run will read: shares, tokens, epochs, padding and cuts of each source,\nbalance.",
    )
    room = add(
        "memory",
        _memory,
        "llama3_8b_one_gpu",
        "bytes on a GPU and its host, and the offload level that fits",
        "Says how many bytes a run takes on a GPU and its host, and which offload level\nfits.",
    )
    network = add(
        "network",
        network_command.run,
        network_command.EXAMPLE,
        "seconds of a step's collectives on a fabric, and what would make them fewer",
        "Says what a step's own collectives take on a fabric of hosts and switches, how much\nof it "
        "the step waits for, what binds, and which settings would be faster.",
    )
    network_command.add_arguments(network)
    said = "published figures of networks beside those that `plan network` simulates"
    figures = commands.add_parser("published", help=said, description=f"Shows {said}.")
    figures.set_defaults(run=network_command.published)
    room.add_argument(
        "--device", default="h200", help=f"one of {', '.join(aot.TARGETS)}; default %(default)s"
    )
    room.add_argument("--devices", type=int, default=1, help="of one host; default %(default)s")
    room.add_argument("--best", action="store_true", help="all that `auto` may stand for, the fastest first")
    room.add_argument("--segments", type=int, help="most documents in a row; default: what the corpus has")
    data.add_argument("--samples", type=int, default=300, help="steps to plan in full, default %(default)s")
    data.add_argument("--json", action="store_true", help="all of it, of all sources, as one JSON object")
    data.add_argument("--plot", metavar="FILE", help="draw shares and load imbalance there, as SVG")
    data.add_argument("--run-dir", metavar="DIR", help="draw them into this run directory, as plan_data.svg")
    limits_command.add(commands, prog)
    cost_command.add(commands, prog)
    goodput_command.add(commands, prog)
    return parser


if __name__ == "__main__":
    sys.exit(main())
