"""The level and fraction of offload that fit and move the least, by what is asked of a step's memory.

That is arithmetic, for `plan memory` and to propose what is compiled, or the compiled programs of a step.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxthru.build.defaults import get, replaced
from jaxthru.build.memory_estimate import MemoryPlan, Room, estimate, indispensable
from jaxthru.config import RunConfig
from jaxthru.engine.offload import OffloadConfig
from jaxthru.models import family
from jaxthru.optim.formats import FORMATS
from jaxthru.runtime.errors import InputError

LEVELS = ("none", "optimizer", "gradients", "parameters")

ONE_PROGRAM = {
    "remat.policy": ("none", "auto"),
    "remat.keep_parameters": (True, False),
    "model.loop": ("scan", "auto"),
}
"""Key -> its value that a step of several programs cannot have, and the one that leaves it open."""


def ruling_out(config: RunConfig) -> dict[str, Any]:
    """Returns the settings of a configuration that rule all levels but `none` out: {key: value}."""
    return {key: value for key, (value, _) in ONE_PROGRAM.items() if get(config, key) == value}


BY_PRECISION = (
    *("float32", "split_master_float32", "bfloat16", "split_master"),
    *("int8", "split_master_int8", "stochastic_rounding"),
)
"""Formats, the one nearest to float32 first: of two that cost the same, the first is proposed."""


def narrower(state: str) -> list[str]:
    """Returns the formats that may fit where this one does not: whose weights, or all of it, are smaller."""
    asked = FORMATS[state].bytes_per_parameter()
    sizes = {other: FORMATS[other].bytes_per_parameter() for other in BY_PRECISION}
    return [each for each in sizes if sizes[each].weights < asked.weights or sum(sizes[each]) < sum(asked)]


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A level and fraction of offload that fit. moved: bytes over PCIe a step, both directions together."""

    level: str
    state: str
    fraction: float
    plan: MemoryPlan
    moved: int


class Planned(Protocol):
    """What a step with some offload needs, and the bytes that it moves."""

    def __call__(self, offload: OffloadConfig, memory: int = 0) -> tuple[MemoryPlan, int]:
        """memory: bytes of the device's, for the gaps that arrays then leave to count; slower."""


def least(
    config: RunConfig, level: str, room: Room, planned: Planned, below: float = math.inf
) -> Proposal | None:
    """Returns a level with the least fraction that fits and moves less than `below` bytes, if any does."""

    # Embedding and head are stages too. The more of them are on the host, the fewer bytes are on the device;
    # with the gaps between them it now and then is the other way round.
    stages = len(family.chain(config.model).layers) + 2
    most = 0 if level == "none" else stages

    @functools.cache
    def at(hosted: int, memory: int = 0) -> tuple[MemoryPlan, int]:
        tried = dataclasses.replace(config.offload, level=level, fraction=hosted / stages or 1.0)
        return planned(tried, memory)

    first = _first_that_fits(min(1, most), most, room, lambda hosted: at(hosted)[0])
    if first is None or at(first)[1] >= below:
        return None
    last = most
    if below < math.inf:
        last = bisect.bisect_left(range(most + 1), below, lo=first, key=lambda hosted: at(hosted)[1]) - 1
    first = _first_that_fits(first, last, room, lambda hosted: at(hosted, room.device)[0])
    if first is None:
        return None
    plan, moved = at(first, room.device)
    return Proposal(level, config.optim.state, first / stages, plan, moved) if room.holds(plan) else None


def _first_that_fits(low: int, high: int, room: Room, plan: Callable[[int], MemoryPlan]) -> int | None:
    """Returns the least number of stages on the host, of `low` to `high`, whose plan fits the device; None
    where `high` does not, or one that does not fit is too much for the host already.

    A stage more on the host takes about the same from the device each time: the place is guessed from a line
    twice, and halved from then on. Where plans with gaps do not fall steadily it may be a stage too many.
    """
    if plan(low).peak_device <= room.device:
        return low
    if plan(high).peak_device > room.device:
        return None
    guesses = 2
    while high - low > 1:
        if plan(low).peak_host > room.host:
            return None
        middle = (low + high) // 2
        if guesses:
            over, under = (plan(step).peak_device for step in (low, high))
            middle = low + math.ceil((high - low) * (over - room.device) / (over - under))
            middle, guesses = min(max(middle, low + 1), high - 1), guesses - 1
        if plan(middle).peak_device <= room.device:
            high = middle
        else:
            low = middle
    return high


def cheapest(config: RunConfig, levels: Sequence[str], room: Room, planned: Planned) -> Proposal | None:
    """Returns of several levels the one that fits and moves the least."""
    best = None
    for level in levels:
        best = least(config, level, room, planned, best.moved if best else math.inf) or best
        if best and not best.moved:
            break  # none moves less
    return best


def with_least_offload(
    config: RunConfig, room: Room, planned: Planned
) -> tuple[RunConfig, MemoryPlan, int] | None:
    """Returns a configuration of several programs with the offload that fits and moves the least, what it
    needs, and the bytes that it moves."""
    levels = LEVELS[config.offload.activations == "none" :]
    if (found := cheapest(config, levels, room, planned)) is None:
        return None
    values = {"offload.level": found.level, "offload.fraction": found.fraction or 1.0}
    return replaced(config, values), found.plan, found.moved


def fitted(
    config: RunConfig, level: str, room: Room, planned: Planned
) -> tuple[RunConfig, MemoryPlan, int] | None:
    """Returns a configuration of several programs with the offload that it was asked for, or where that is
    `auto` with the least that fits; if it fits, and as `with_least_offload`. level: as it was asked for."""
    if level == "auto":
        return with_least_offload(config, room, planned)
    plan, moved = planned(config.offload, room.device)
    return (config, plan, moved) if room.holds(plan) else None


GAPS = 1.05
"""How many times the bytes of its arrays a step of several programs is taken to need, with the gaps between
them: 1.04 to 1.08 for 32 layers of Llama 3 8B that fill an H200, and more where a large array has no room."""


def by_arithmetic(
    config: RunConfig,
    devices: int,
    segments: int,
    resident: MemoryPlan | None = None,
    placed: bool = False,
) -> Planned:
    """Returns `estimate` as a function of the offload. placed: with gaps between arrays as the allocator
    leaves them, where they are to count, and else with GAPS, which is to propose what is compiled."""

    def planned(offload: OffloadConfig, memory: int = 0) -> tuple[MemoryPlan, int]:
        tried = dataclasses.replace(config, offload=offload)
        of = {"devices": devices, "segments": segments, "memory": memory * placed}
        plan, moved = estimate(tried, resident=resident, **of)
        return (plan.scaled(GAPS) if offload.layered and not placed else plan), moved

    return planned


def propose(
    config: RunConfig,
    room: Room,
    *,
    resident: MemoryPlan | None = None,
    devices: int = 1,
    segments: int = 1,
    formats: Sequence[str] = BY_PRECISION,
    levels: Sequence[str] = LEVELS,
) -> list[Proposal]:
    """Returns for each format the level, of these, and the fraction that fit and move the least, the cheapest
    format first.

    One that fits at no level is left out, or that the optimizer's other settings forbid. resident, devices,
    segments: as of `estimate`.
    """
    found = []
    for state in formats:
        try:
            tried = dataclasses.replace(config, optim=dataclasses.replace(config.optim, state=state))
        except InputError:
            continue
        possible = [level for level in levels_with_room(tried, room, devices) if level in levels]
        if config.remat.keep_parameters:  # the others keep none
            possible = [level for level in possible if level == "none"]
        planned = by_arithmetic(tried, devices, segments, resident)
        if proposal := cheapest(tried, possible, room.full, planned):
            found.append(proposal)
    return sorted(found, key=lambda proposal: proposal.moved)


def levels_with_room(config: RunConfig, room: Room, devices: int) -> tuple[str, ...]:
    """Returns the levels that are worth a rehearsal: a state is on the device or on the host, whatever level
    moves it. A model that is far too large for both is so refused at once."""
    needs = indispensable(replaced(config, {"offload.level": LEVELS[-1]}), devices)
    held, state = sum(needs.values()), needs["parameters"] + needs["optimizer"]
    resident, moved = state <= room.device, held * devices <= room.device * devices + room.host
    return LEVELS[:1] * resident + LEVELS[1:] * moved
