"""The settings of remat.policy, model.loop and offload that fit by arithmetic, the fastest first.

Arithmetic alone decides nothing (build/choices.py compiles what it proposes): it is 5 % short to 8 % over.
"""

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from jaxthru.build.defaults import float8_setting, get, replaced
from jaxthru.build.memory_estimate import MemoryPlan, Room, estimate, indispensable
from jaxthru.build.step import needed_flops
from jaxthru.build.transfers_choice import ways
from jaxthru.config import RunConfig
from jaxthru.engine.offload import OffloadConfig
from jaxthru.models import family
from jaxthru.models.remat import EXPERT_HIDDEN, recomputed
from jaxthru.models.stage import Stage, distinct
from jaxthru.optim.formats import FORMATS
from jaxthru.runtime.errors import InputError

LEVELS = ("none", "optimizer", "gradients", "parameters")
POLICIES = ("none", "projections", "gate", "attention", "full")
"""Of rematerialisation, the one that computes the least again first."""

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


SUSTAINED = 650e12
"""FLOP/s that an H200's matmuls keep up (docs/results.md): what a copy over PCIE is weighed against."""
FLOAT8 = 1.5
"""How much faster layers' matmuls are in float8, quantising included: 8 layers of Llama 3 8B save 92 of 436
ms on an H200 (docs/results.md). Copies have that much less to hide behind."""
PCIE = 87e9  # bytes/s of both directions together, fetched, updated and stored (H200, PCIe Gen5)
SCANNED = 1.05
"""How much longer a step takes that loops over its layers: 1.05 to 1.09 on an H200 (docs/results.md)."""
BY_PROGRAMS = 1.01
"""The same of a step of several programs."""
HIDDEN = 0.9
"""Share of the matmuls' time that copies can hide behind."""
UNROLLED_MOST = 64
"""Most layers that are compiled one by one: 36 take 40 s."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A level and fraction of offload that fit. moved: bytes over PCIe a step, both directions together."""

    level: str
    state: str
    fraction: float
    plan: MemoryPlan
    moved: int


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration with none of `defaults.AUTO` left open. plan: by arithmetic. matmuls: seconds of a
    step's. moved: bytes over PCIe a step, both directions together."""

    config: RunConfig
    plan: MemoryPlan
    matmuls: float
    moved: int

    @property
    def seconds(self) -> float:
        """Of a step's matmuls and of the copies that they do not hide, to compare candidates by."""
        return self.matmuls + max(0.0, self.moved / PCIE - HIDDEN * self.matmuls)

    @property
    def said(self) -> str:
        """Its settings, for people."""
        config = self.config
        offload = f", offload {config.offload.level} {config.offload.fraction:.2g}" * config.offload.layered
        copies = ", copies" * config.mesh.copies
        return f"remat {config.remat.policy}, {config.model.loop}{copies}{offload}"


Planned = Callable[[OffloadConfig], tuple[MemoryPlan, int]]
"""What a step with this offload needs, and the bytes that it moves."""


def least(config: RunConfig, level: str, room: Room, planned: Planned) -> Proposal | None:
    """Returns a level with the least fraction that fits, if any does."""

    # Embedding and head are stages too. The more of them are on the host, the less is on the device.
    stages = len(family.chain(config.model).layers) + 2
    most = 0 if level == "none" else stages

    @functools.cache
    def at(hosted: int) -> tuple[MemoryPlan, int]:
        return planned(dataclasses.replace(config.offload, level=level, fraction=hosted / stages or 1.0))

    if at(most)[0].peak_device > room.device:
        return None  # not even with all of them
    first = _first_that_fits(most, room, lambda hosted: at(hosted)[0])
    if first is None or not room.holds(at(first)[0]):
        return None
    return Proposal(level, config.optim.state, first / stages, *at(first))


def _first_that_fits(count: int, room: Room, plan: Callable[[int], MemoryPlan]) -> int | None:
    """Returns the least number of stages on the host whose plan fits the device; None where one that does not
    is too much for the host already. count: the most, which fits the device.

    A stage more on the host takes about the same from the device each time: the place is guessed from a line
    twice, and halved from then on.
    """
    if count <= 1:
        return count
    low, high = 1, count
    if plan(low).peak_device <= room.device:
        return low
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


def cheapest(config: RunConfig, levels: tuple[str, ...], room: Room, planned: Planned) -> Proposal | None:
    """Returns of several levels the one that fits and moves the least."""
    fitting: list[Proposal] = []
    for level in levels:
        if proposal := least(config, level, room, planned):
            fitting.append(proposal)
            if not proposal.moved:
                break  # none moves less
    return min(fitting, key=lambda proposal: proposal.moved, default=None)


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


def by_arithmetic(
    config: RunConfig, devices: int, segments: int, resident: MemoryPlan | None = None
) -> Planned:
    """Returns `estimate` as a function of the offload."""

    def planned(offload: OffloadConfig) -> tuple[MemoryPlan, int]:
        tried = dataclasses.replace(config, offload=offload)
        return estimate(tried, resident=resident, devices=devices, segments=segments)

    return planned


def propose(
    config: RunConfig,
    room: Room,
    *,
    resident: MemoryPlan | None = None,
    devices: int = 1,
    segments: int = 1,
    formats: Sequence[str] = BY_PRECISION,
) -> list[Proposal]:
    """Returns for each format the level and fraction that fit and move the least, the cheapest format first.

    One that fits at no level is left out, or that the optimizer's other settings forbid. resident, devices,
    segments: as of `estimate`.
    """
    found = []
    for state in formats:
        try:
            tried = dataclasses.replace(config, optim=dataclasses.replace(config.optim, state=state))
        except InputError:
            continue
        levels = levels_with_room(tried, room, devices)
        if config.remat.keep_parameters:  # the others keep none
            levels = tuple(level for level in levels if level == "none")
        if proposal := cheapest(tried, levels, room, by_arithmetic(tried, devices, segments, resident)):
            found.append(proposal)
    return sorted(found, key=lambda proposal: proposal.moved)


def candidates(
    config: RunConfig,
    room: Room,
    *,
    devices: int = 1,
    segments: int = 1,
    gpu: bool = True,
    all_of_them: bool = False,
) -> Iterator[Candidate]:
    """Yields what a configuration's `auto` may stand for, and fits by arithmetic, the fastest first.

    devices, segments: as of `estimate`. gpu: where unrolled layers are the faster ones. all_of_them: also
    those that are one program and do not fit.
    """
    order = itertools.count()
    queue: list[tuple[float, int, RunConfig | Candidate]] = []

    def add(seconds: float, one: RunConfig | Candidate) -> None:
        heapq.heappush(queue, (seconds, next(order), one))

    levels = levels_with_room(config, room, devices)
    resident = _resident(config, gpu) if all_of_them or levels[:1] == LEVELS[:1] else ()
    layered = _layered(config) if levels[-1:] == LEVELS[-1:] else ()
    for tried in (*resident, *layered):
        add(_seconds(tried, devices, gpu), tried)
    while queue:
        seconds, _, one = heapq.heappop(queue)
        if isinstance(one, Candidate):
            yield from (dataclasses.replace(one, config=way) for way in ways(one.config))
            continue
        found = _fitted(config, one, room, seconds, by_arithmetic(one, devices, segments))
        if found and (all_of_them or room.holds(found.plan)):
            add(found.seconds, found)


def levels_with_room(config: RunConfig, room: Room, devices: int) -> tuple[str, ...]:
    """Returns the levels that are worth a rehearsal: a state is on the device or on the host, whatever level
    moves it. A model that is far too large for both is so refused at once."""
    needs = indispensable(replaced(config, {"offload.level": LEVELS[-1]}), devices)
    held, state = sum(needs.values()), needs["parameters"] + needs["optimizer"]
    resident, moved = state <= room.device, held * devices <= room.device * devices + room.host
    return LEVELS[:1] * resident + LEVELS[1:] * moved


def _fitted(
    config: RunConfig, tried: RunConfig, room: Room, seconds: float, planned: Planned
) -> Candidate | None:
    """Returns a configuration, with the offload that it needs where `config` leaves that open, if it fits.
    seconds: of its matmuls."""
    if config.offload.level == "auto" and tried.offload.layered:
        if (found := with_least_offload(tried, room, planned)) is None:
            return None
        tried, plan, moved = found
    else:
        plan, moved = planned(tried.offload)
    return Candidate(tried, plan, seconds, moved)


def _asked(config: RunConfig, key: str, choices: tuple[str, ...]) -> tuple[str, ...]:
    value = get(config, key)
    return choices if value == "auto" else (value,)


def _resident(config: RunConfig, gpu: bool) -> Iterator[RunConfig]:
    """Yields the configurations that are one program."""
    if config.offload.level not in ("auto", "none") or config.offload.activations != "none":
        return
    few = len(family.chain(config.model).layers) <= UNROLLED_MOST
    for policy in _asked(config, "remat.policy", POLICIES):
        for loop in _asked(config, "model.loop", ("unroll", "scan") if gpu and few else ("scan",)):
            settings = {"remat.policy": policy, "model.loop": loop, "offload.level": "none"}
            yield replaced(config, settings)


def _layered(config: RunConfig) -> Iterator[RunConfig]:
    """Yields the configurations that are several programs; where the level is open, with the last one."""
    level = config.offload.level
    if config.model.loop == "scan" or config.remat.keep_parameters:
        return
    if level == "none" and config.offload.activations == "none":
        return
    for policy in _asked(config, "remat.policy", POLICIES[1:]):
        if policy != "none":
            settings = {"remat.policy": policy, "model.loop": "unroll"}
            yield replaced(config, settings | ({"offload.level": LEVELS[-1]} if level == "auto" else {}))


def _seconds(config: RunConfig, devices: int, gpu: bool) -> float:
    """Returns how long a step's matmuls take on devices like an H200. gpu: where loops cost time."""
    tokens = config.train.rows * config.data.sequence
    needed = needed_flops(config)(tokens, tokens * config.data.sequence)
    layers = family.chain(config.model).layers
    again = sum(recomputed(stage.matmul_flops, config.remat.policy) for stage in layers) * tokens
    if float8_setting(config):
        linear = (
            sum(layers.count(stage) * _float8_flops(stage, config) for stage in distinct(layers)) * tokens
        )
        experts = ({EXPERT_HIDDEN: stage.matmul_flops.get(EXPERT_HIDDEN, 0)} for stage in layers)
        left = sum(recomputed(each, config.remat.policy) for each in experts) * tokens
        left *= not config.precision.float8_experts
        needed, again = needed - linear + linear / FLOAT8, left + (again - left) / FLOAT8
    form = BY_PROGRAMS if config.offload.layered else SCANNED if gpu and config.model.loop == "scan" else 1.0
    return form * (needed + again) / devices / SUSTAINED


def _float8_flops(stage: Stage, config: RunConfig) -> float:
    """Returns the FLOPs per token of a stage's matrices that a setting of float8 is about."""
    plain = sum(math.prod(shape) for info, shape in stage.matrices if not info.stack)
    found = (4.0 if config.lora.on else 6.0) * plain  # no gradients of a frozen base
    if stage.mixture and config.precision.float8_experts:  # but for the gradients of their matrices
        of_all = sum(math.prod(shape) for info, shape in stage.matrices if info.stack)
        found += 4.0 * of_all * stage.mixture.top_k / stage.mixture.experts
    return found
