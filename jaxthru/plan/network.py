"""`plan network`: what a step's own collectives take on a fabric, and how much of it the step waits for."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import rich.box
import rich.table

from jaxthru.plan.fabric import Fabric
from jaxthru.plan.network_flows import Timed, over_queue_pairs, simulate
from jaxthru.plan.network_schedule import Program, Rates, Schedule
from jaxthru.plan.network_traffic import Collective, read, scaled
from jaxthru.profile.read import hlo
from jaxthru.runtime.errors import InputError, require
from jaxthru.training.plot import Panel, Picture

QUEUE_PAIRS = (1, 2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Point:
    """A step with so many queue pairs a connection. links, exposed, step: seconds of all collectives, of
    those that nothing hides, and of the step. mmr, jain: of the uplinks, as the collective with the most
    bytes over them loads them. slowdown: seconds of all collectives over those with a perfect spread."""

    qps: int
    links: float
    exposed: float
    step: float
    mmr: float
    jain: float
    slowdown: float


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A step on a fabric. shape, compiled: of the mesh, and of that which was compiled. collectives: what
    each takes. schedule: the step's, None where there is no program. curve: over queue pairs. measured:
    seconds of a step, where the user has them."""

    fabric: Fabric
    devices: int
    shape: dict[str, int]
    compiled: dict[str, int]
    collectives: tuple[Timed, ...]
    schedule: Schedule | None
    curve: tuple[Point, ...]
    rates: Rates | None = None
    measured: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def links(self) -> float:
        """Seconds of a step's collectives."""
        return sum(one.seconds * one.collective.runs for one in self.collectives)

    @property
    def exposed(self) -> float:
        """Seconds of a step in which only links work; all of them where there is no schedule."""
        return self.schedule.waits if self.schedule else self.links

    def waits(self, one: Timed) -> float:
        """Returns the seconds of a step that wait for one collective."""
        if self.schedule is None:
            return one.seconds * one.collective.runs
        return self.schedule.exposed.get(one.collective.name, 0.0)

    def table(self) -> rich.table.Table:
        """Returns the collectives by kind and part of the step, the longest first."""
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("collective", no_wrap=True)
        table.add_column("part of the step")
        table.add_column("over", no_wrap=True)
        for column in ("MB", "runs", "ms a\nstep", "exposed\nms", "binds"):
            table.add_column(column, justify="right", no_wrap=True)
        rows = self._rows()
        for row in rows[:ROWS]:
            table.add_row(*row.cells)
        if rest := rows[ROWS:]:
            runs, seconds, waits = (
                sum(getattr(row, name) for row in rest) for name in ("runs", "seconds", "waits")
            )
            last = f"{runs:,.0f}", number(seconds * 1e3), number(waits * 1e3)
            table.add_row(f"{len(rest)} others", "", "", "", *last, "")
        return table

    def _rows(self) -> list["_Row"]:
        found: dict[tuple, list[Timed]] = {}
        for one in self.collectives:
            of = one.collective
            found.setdefault((of.kind, of.dtype, of.layer, of.phase, of.axes, of.members), []).append(one)
        rows = [_row(key, ones, sum(map(self.waits, ones))) for key, ones in found.items()]
        return sorted(rows, key=lambda row: -row.seconds)

    def picture(self) -> Picture:
        """Returns the plots: seconds and evenness over queue pairs, and the load of each uplink."""
        x, over = np.array([point.qps for point in self.curve]), "over queue pairs"
        series = {
            name: (x, np.array([getattr(point, key) for point in self.curve]))
            for name, key in (("links", "links"), ("exposed", "exposed"), ("step", "step"))
        }
        panels = [
            Panel(f"seconds a step, {over}", series if self.schedule else {"links": series["links"]}, "x")
        ]
        slow = {
            "max/mean of uplinks": (x, np.array([point.mmr for point in self.curve])),
            "slowdown of links": (x, np.array([point.slowdown for point in self.curve])),
        }
        panels.append(Panel(f"against an even spread, {over}", slow, "x"))
        loads = {
            f"{one.collective.kind} {one.collective.layer}": (
                np.linspace(0, 100, len(one.links.even)),
                one.links.even,
            )
            for one in {one.links.even.tobytes(): one for one in self.collectives}.values()
            if len(one.links.even)
        }
        if loads:
            panels.append(Panel("load of uplinks / mean, the busiest first (% of links)", loads))
        return Picture(tuple(panels))

    def to_json(self) -> dict[str, Any]:
        """Returns all numbers as plain values, seconds and bytes."""
        return {
            "fabric": dataclasses.asdict(self.fabric),
            "oversubscription": self.fabric.oversubscription,
            "devices": self.devices,
            "mesh": self.shape,
            "compiled_mesh": self.compiled,
            "rates": self.rates and dataclasses.asdict(self.rates),
            "link_seconds": self.links,
            "exposed_seconds": self.exposed,
            "step_seconds": self.schedule and self.schedule.step,
            "compute_seconds": self.schedule and self.schedule.compute,
            "measured_seconds": self.measured,
            "collectives": [self._plain(one) for one in self.collectives],
            "queue_pairs": [dataclasses.asdict(point) for point in self.curve],
            "notes": list(self.notes),
        }

    def _plain(self, one: Timed) -> dict[str, Any]:
        of, links = one.collective, one.links
        return {
            **{
                name: getattr(of, name)
                for name in ("name", "kind", "dtype", "layer", "phase", "bytes", "runs")
            },
            "axes": list(of.axes),
            "groups": len(of.groups),
            "members": of.members,
            "seconds": one.seconds,
            "worst_seconds": one.worst,
            "perfect_seconds": one.perfect,
            "latency_seconds": one.latency,
            "exposed_seconds": self.waits(one),
            "slowdown": one.slowdown,
            "mmr": links.mmr,
            "jain": links.jain,
            "busiest": one.busiest,
            "binds": one.binds,
        }


ROWS = 14


@dataclasses.dataclass(frozen=True)
class _Row:
    cells: tuple[str, ...]
    runs: float
    seconds: float
    waits: float


def _row(key: tuple, ones: Sequence[Timed], waits: float) -> _Row:
    kind, dtype, layer, phase, axes, members = key
    runs = sum(one.collective.runs for one in ones)
    seconds = sum(one.seconds * one.collective.runs for one in ones)
    size = sum(one.collective.bytes * one.collective.runs for one in ones) / runs
    binds = max(ones, key=lambda one: one.seconds * one.collective.runs).binds
    over = f"{axes[0] if len(axes) == 1 else 'any'} {members}"
    numbers = number(size / 1e6), f"{runs:,.0f}", number(seconds * 1e3), number(waits * 1e3)
    cells = f"{kind} {dtype}", f"{layer}, {phase}", over, *numbers, binds
    return _Row(cells, runs, seconds, waits)


def number(value: float) -> str:
    """Returns a number for a table, in three digits or more."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def forecast(
    program: str | hlo.Module,
    fabric: Fabric,
    shape: dict[str, int],
    *,
    compiled: dict[str, int] | None = None,
    rates: Rates | None = None,
    kinds: Collection[str] = (),
    measured: float | None = None,
    notes: tuple[str, ...] = (),
    **draws: int,
) -> Forecast:
    """Returns what a step's collectives take on a fabric.

    program: its HLO, scheduled. shape: of the mesh it is planned for, by `runtime.mesh.AXES`; compiled: of
    the mesh it was compiled for, by default the same. rates: of a device, without which no schedule is
    walked. kinds: name scopes of the model's own. draws: `trials` and `seed` of `simulate`.
    Raises InputError for a text that is none, or for other devices, and where the fabric does not hold them.
    """
    compiled = compiled or shape
    module = program if isinstance(program, hlo.Module) else _module(program)
    small = read(module, compiled, kinds)
    walked = rates and Program(module, rates, kinds, compiled["fsdp"] / shape["fsdp"])
    found = scaled(small, compiled, shape)
    return timed(
        found, fabric, shape, walked, compiled=compiled, rates=rates, measured=measured, notes=notes, **draws
    )


def timed(
    collectives: Sequence[Collective],
    fabric: Fabric,
    shape: dict[str, int],
    program: Program | None = None,
    **others: Any,
) -> Forecast:
    """Returns what collectives take on a fabric, and of the program that has them, its schedule. others: as
    of `forecast`."""
    draws = {name: others.pop(name) for name in ("trials", "seed") if name in others}
    devices = math.prod(shape.values())

    def schedule(ones: Sequence[Timed]) -> Schedule | None:
        return program and program.schedule(
            {one.collective.name: one.seconds for one in ones},
            {one.collective.name: one.collective.runs for one in ones},
        )

    ones = tuple(simulate(collectives, fabric, devices, **draws))
    curve = []
    for qps, each in over_queue_pairs(collectives, fabric, devices, QUEUE_PAIRS, **draws).items():
        curve.append(_point(qps, each, schedule(each)))
    keys = {"compiled": shape} | others
    return Forecast(fabric, devices, shape, keys.pop("compiled"), ones, schedule(ones), tuple(curve), **keys)


def _point(qps: int, ones: Sequence[Timed], schedule: Schedule | None) -> Point:
    links = sum(one.seconds * one.collective.runs for one in ones)
    perfect = sum(one.perfect * one.collective.runs for one in ones)
    uplinks = [one for one in ones if one.links.hashed.size]
    most = max(uplinks, key=lambda one: one.collective.bytes * one.collective.runs, default=None)
    evenness = (most.links.mmr, most.links.jain) if most else (1.0, 1.0)
    exposed, step = (schedule.waits, schedule.step) if schedule else (links, links)
    return Point(qps, links, exposed, step, *evenness, links / perfect if perfect else 1.0)


def _module(text: str) -> hlo.Module:
    try:
        found = hlo.modules(text)
    except ValueError as error:
        raise InputError(f"--hlo: {error}") from error
    require(bool(found), "--hlo: not an HLO module: its text begins with 'HloModule'")
    return max(found.values(), key=lambda module: len(module.where))
