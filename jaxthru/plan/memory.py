"""`plan memory`: the memory that a configuration needs on a GPU, by compiling its step without that GPU."""

import dataclasses

import jax
import rich.box
import rich.table

from jaxthru.build import choices
from jaxthru.build.checks import validate
from jaxthru.build.choices import Documents, documents
from jaxthru.build.confirmed import Programs
from jaxthru.build.least_offload import Proposal, by_arithmetic, fitted
from jaxthru.build.memory_estimate import MemoryPlan, Room, fullest, gib, host_room
from jaxthru.build.proposals import PCIE, Candidate
from jaxthru.build.stand_ins import attention_stand_in, stand_ins, without_triton
from jaxthru.build.step import Assembled, assemble
from jaxthru.config import RunConfig
from jaxthru.engine.rehearsed import OUTPUT, TEMPORARY, Analysis
from jaxthru.models.scopes import PURPOSES, program_of
from jaxthru.profile.read.buffers import CATEGORIES, Breakdown, breakdown
from jaxthru.runtime import aot, xla


def room(config: RunConfig, target: aot.Target) -> Room:
    """Returns the room on a device of a kind and on this host, or the host of `offload.host_gib`."""
    share = xla.memory_fraction()
    host = host_room(config)
    said = (
        f"{target.name}: {gib(target.memory)} GiB, of which JAX takes {share:.0%}",
        f"the GPU's host: {gib(host)} GiB to pin, "
        + (
            "by offload.host_gib"
            if config.offload.host_gib
            else "taken from this machine, less what a process takes; offload.host_gib says another's"
        ),
    )
    return Room(int(target.memory * share), host, said)


def resident(
    config: RunConfig, target: aot.Target, devices: int = 1, segments: int | None = None
) -> MemoryPlan:
    """Returns the memory of the step without offload, by compiling it for the device. See `traced`."""
    made, notes, how = traced(config, target, devices, segments)
    program = compiled(made, target, devices)
    found = breakdown(program.dump, PURPOSES)
    notes += (
        how,
        f"the peak is in {found.at}",
        "parameters, optimizer and the total are exact; what lies in temporary memory is told apart by name "
        "scopes, and 'other' has the gaps between buffers",
    )
    return MemoryPlan(found.device, found.host, found.peak_device, found.peak_host, notes)


def dispatched(
    config: RunConfig, target: aot.Target, devices: int = 1, segments: int | None = None
) -> MemoryPlan:
    """Returns the memory of the dispatched step, as `resident` does of the other. Raises InputError."""
    made, notes, how = traced(config, target, devices, segments)
    notes += (
        f"each program {how}",
        "arrays are those of the step's own schedule; a copy counts on both ends until the host has waited "
        "for it; 'other' has the gaps that XLA's allocator leaves between arrays",
    )
    memory = room(config, target).full.device
    found = made.rehearsed(compiled_for(made, target, devices), memory)
    return fullest(found.moments, notes, found.needs)


def confirm(
    asked: RunConfig, candidate: Candidate, target: aot.Target, room: Room, devices: int, segments: int | None
) -> tuple[Candidate, MemoryPlan] | None:
    """Returns a candidate, with the least offload that fits where that was left open and what arithmetic says
    of that, and its memory, if it fits as compiled; or by arithmetic, where nothing can be compiled."""
    config = candidate.config
    room = room.full
    if not config.offload.layered:
        plan = resident(config, target, devices, segments) if aot.available() else candidate.plan
        return (candidate, plan) if room.holds(plan) else None
    known = segments or choices.documents(config).segments
    if not aot.available():
        planned = by_arithmetic(config, devices, known, placed=True)
        if (found := fitted(config, asked.offload.level, room, planned)) is None:
            return None
        config, plan, moved = found
        return dataclasses.replace(candidate, config=config, plan=plan, moved=moved), plan
    made, notes, how = traced(config, target, devices, segments)

    def analyse(program: jax.stages.Traced) -> object:
        return _compiled(made, program, target, devices).stats

    found = fitted(config, asked.offload.level, room, Programs(made, analyse).planned)
    if found is None:
        return None
    config, plan, moved = found
    plan = dataclasses.replace(plan, notes=(*notes, f"each program {how}", *plan.notes))
    estimated, _ = by_arithmetic(config, devices, known)(config.offload)
    return dataclasses.replace(candidate, config=config, plan=estimated, moved=moved), plan


def compiled(made: Assembled, target: aot.Target, devices: int, hosts: int = 1) -> aot.Program:
    """Returns a step in one program, compiled for GPUs as a run does it, but for `train.deterministic`."""
    return _compiled(made, made.jitted.trace(made.abstract, made.batch), target, devices, hosts)


def _compiled(
    made: Assembled, program: jax.stages.Traced, target: aot.Target, devices: int, hosts: int = 1
) -> aot.Program:
    """Returns a program of a step, compiled for GPUs with the options that its model has."""
    chosen = made.step.model.compiler_options(platform="gpu")
    return aot.compile_for(program.lower(lowering_platforms=("cuda",)), target, devices, hosts, chosen)


def compiled_for(made: Assembled, target: aot.Target, devices: int) -> Analysis:
    """Returns the analysis that compiles each program of a step for a GPU."""

    def analyse(name: str, traced: jax.stages.Traced) -> Breakdown:
        kind, dump = program_of(name), _compiled(made, traced, target, devices).dump
        return breakdown(dump, PURPOSES, lambda _: None, TEMPORARY[kind], OUTPUT[kind])

    return analyse


def traced(
    config: RunConfig, target: aot.Target, devices: int, segments: int | None
) -> tuple[Assembled, tuple[str, ...], str]:
    """Returns the step of a configuration for GPUs, on as many CPU devices, notes, and how it is compiled.

    segments: most documents in a row; None asks the prepared corpus. Raises InputError.
    """
    layout = validate(config, jax.devices()[:devices], "gpu")
    found = documents(config) if segments is None else Documents(segments, 1)
    config, named = without_triton(config)
    segments, notes, kernels = found.segments, found.notes + named, config.kernels
    if kernels.writes_to_peers:  # a CPU cannot compile that; the ring moves the same tokens
        asked = f"kernels.collective_matmul = {kernels.collective_matmul!r}"
        notes += (f"planned with the ring in place of {asked}",)
        config = dataclasses.replace(config, kernels=dataclasses.replace(kernels, collective_matmul="ring"))
    attention, _ = attention_stand_in(config, layout, segments)
    of_data = {"segments": segments, "sources": found.sources, "masked": found.masked}
    made = assemble(config, layout, attention=attention, **of_data, **stand_ins(config))
    how = f"compiled for {target.name} without autotuning; attention: {attention}"
    return made, notes, f"{how}, up to {segments} documents a row"


def table(plan: MemoryPlan) -> rich.table.Table:
    """Returns the plan's bytes by category, without those that are empty."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("GiB", no_wrap=True)
    for column in ("device", "host"):
        table.add_column(column, justify="right")
    for name in CATEGORIES:
        sizes = plan.device[name], plan.host[name]
        if any(sizes):
            table.add_row(name, *(f"{size / 2**30:,.2f}" if size else "" for size in sizes))
    table.add_row("peak", *(f"{size / 2**30:,.2f}" for size in (plan.peak_device, plan.peak_host)))
    return table


def proposed(proposals: list[Proposal]) -> tuple[rich.table.Table | None, list[str]]:
    """Returns what to show of proposals: a table, or a line where no format needs offload."""
    if not proposals:
        return None, ["Nothing fits, at any level and in any format."]
    if all(found.level == "none" for found in proposals):
        names = ", ".join(found.state for found in proposals)
        return None, [f"Without offload (offload.level = none) these formats of optim.state fit: {names}."]
    return proposal_table(proposals), []


def proposal_table(proposals: list[Proposal]) -> rich.table.Table:
    """Returns what was proposed, the cheapest first."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # 80 columns take it
    for column in ("optim.state", "offload.level"):
        table.add_column(column, no_wrap=True)
    for column in ("fraction", "device\nGiB", "host\nGiB", "moved\nGB", "PCIe\nseconds"):
        table.add_column(column, justify="right")
    for found in proposals:
        table.add_row(
            found.state,
            found.level,
            f"{found.fraction:.2f}",
            gib(found.plan.peak_device),
            gib(found.plan.peak_host),
            f"{found.moved / 1e9:,.0f}",
            f"{found.moved / PCIE:.2f}",
        )
    return table


def best_table(rows: list[tuple[Candidate, MemoryPlan | None, bool | None]]) -> rich.table.Table:
    """Returns what `auto` may stand for, the fastest first. rows: a candidate, its memory as compiled, and
    whether it fits; None is not compiled."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("remat\npolicy", "model\nloop", "offload level,\nfraction"):
        table.add_column(column, no_wrap=True)
    for column in ("\ntime", "GiB, by\nestimate", "GiB as\ncompiled", "host\nGiB", "\nfits"):
        table.add_column(column, justify="right", no_wrap=True)
    least = min(candidate.seconds for candidate, _, _ in rows)
    for candidate, plan, fits in rows:
        config, offload = candidate.config, candidate.config.offload
        table.add_row(
            config.remat.policy,
            config.model.loop + "\ncopies" * config.mesh.copies,
            offload.level
            + f" {offload.fraction:.2f}" * offload.layered
            + "\none stage\nat a time" * (offload.layered and not offload.prefetch),
            f"{candidate.seconds / least:.2f}",
            gib(candidate.plan.peak_device),
            gib(plan.peak_device) if plan and aot.available() else "",
            gib((plan or candidate.plan).peak_host) if offload.layered else "",
            {True: "yes", False: "no", None: ""}[fits],
        )
    return table
