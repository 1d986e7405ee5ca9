"""The settings of remat.policy, model.loop and offload that fit by arithmetic, or nearly: the fastest first.

Arithmetic alone decides nothing (build/choices.py compiles what it proposes): it is 5 % short to 8 % over,
and now and then over by more.
"""

import copy
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from jaxthru.build import loss_chunk_choice
from jaxthru.build.defaults import float8_setting, get, replaced
from jaxthru.build.least_offload import (
    LEVELS,
    ONE_PROGRAM,
    Planned,
    by_arithmetic,
    levels_with_room,
    ruling_out,
    with_least_offload,
)
from jaxthru.build.memory_estimate import MemoryPlan, Room, estimate
from jaxthru.build.step import needed_flops
from jaxthru.build.transfers_choice import ways
from jaxthru.config import RunConfig
from jaxthru.models import family
from jaxthru.models.remat import EXPERT_HIDDEN, recomputed
from jaxthru.models.stage import Stage, distinct

POLICIES = ("none", "projections", "gate", "attention", "full")
"""Of rematerialisation, the one that computes the least again first."""

SUSTAINED = 650e12
"""FLOP/s that an H200's matmuls keep up (docs/results.md): what a copy over PCIE is weighed against."""
FLOAT8 = 1.5
"""How much faster layers' matmuls are in float8, quantising included: 8 layers of Llama 3 8B save 92 of 436
ms on an H200 (docs/results.md). Copies have that much less to hide behind."""
PCIE = 87e9  # bytes/s of both directions together, fetched, updated and stored (H200, PCIe Gen5)
PCIE_ALONE = 58e9  # one direction after the other, one stage at a time: by one shape (docs/results.md)
SCANNED = {"none": 1.12, "projections": 1.06, "gate": 1.05, "attention": 1.02, "full": 1.0}
"""How much longer a step takes that loops over its layers, by remat.policy: what is kept is copied into
stacks (two Llamas in bfloat16 on an H200, docs/lab/kernels.md)."""
BY_PROGRAMS = 1.01
"""The same of a step of several programs."""
HIDDEN, HIDDEN_FORWARD = 0.9, 0.42
"""Share of the matmuls' time that copies can hide behind, and those of the optimizer's state with exact
clipping, which come and go in the forward pass: 12 and 32 layers of Llama 3 8B took 0, 0.03 and 0.30 of the
matmuls' time longer on an H200 where copies took 0.37, 0.46 and 0.74 of it. Other levels were not timed."""
UNROLLED_MOST = 64
"""Most layers that are compiled one by one: 36 take 40 s."""
FREE = 0.1
"""Share of the device that large chunks of the LM head have to leave: as compiled, too, they then fit."""
INEXACT = 1.12
"""How many times what is compiled arithmetic may say: a loop over OLMoE's 16 layers was 1.106 times as
large."""
OVER = 1.25
"""The same of a step of one program, which XLA computes parts of again where it does not fit: 56 rows of
Llama-3.2-1B with all kept, 153.9 GiB by arithmetic, take 128.9 as compiled, and 60 rows 137.0 for 163.9. What
is too large by no more is near, and compiled before a configuration is refused."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration with none of `defaults.AUTO` left open. plan: by arithmetic. matmuls: seconds of a
    step's. moved: bytes over PCIe a step, both directions together. near: it does not fit by arithmetic, and
    may fit as compiled."""

    config: RunConfig
    plan: MemoryPlan
    matmuls: float
    moved: int
    near: bool = False

    @property
    def seconds(self) -> float:
        """Of a step's matmuls and of the copies that they do not hide, to compare candidates by."""
        offload, exact = self.config.offload, self.config.optim.clip_rule == "exact"
        if not offload.prefetch:
            return self.matmuls + self.moved / PCIE_ALONE
        forward = exact and (offload.level, offload.activations) == ("optimizer", "none")
        hidden = HIDDEN_FORWARD if forward else HIDDEN
        return self.matmuls + max(0.0, self.moved / PCIE - hidden * self.matmuls)

    @property
    def said(self) -> str:
        """Its settings, for people."""
        config = self.config
        offload = f", offload {config.offload.level} {config.offload.fraction:.2g}" * config.offload.layered
        offload += ", one stage at a time" * (config.offload.layered and not config.offload.prefetch)
        copies = ", copies" * config.mesh.copies
        chunks = ", large loss chunks" * (config.train.loss_chunk == "large")
        return f"remat {config.remat.policy}, {config.model.loop}{chunks}{copies}{offload}"


def candidates(
    config: RunConfig, room: Room, *, devices: int = 1, segments: int = 1, gpu: bool = True
) -> Iterator[Candidate]:
    """Yields what a configuration's `auto` may stand for, see `likeliest`. devices, segments: as of
    `estimate`. gpu: where unrolled layers are the faster ones. Each is found once in a process, however often
    a start asks."""
    try:
        yield from copy.copy(_candidates(config, room, devices, segments, gpu))
    except GeneratorExit:
        raise
    except BaseException:
        _candidates.cache_clear()  # what was interrupted would end there for all who ask again
        raise


@functools.lru_cache(maxsize=8)
def _candidates(config: RunConfig, room: Room, devices: int, segments: int, gpu: bool) -> Iterator[Candidate]:
    levels = levels_with_room(config, room, devices)
    found = likeliest(_by_speed(config, room, devices, segments, gpu, levels), room)
    (kept,) = itertools.tee(found, 1)  # never advanced itself, so that its copies know all of it
    return kept


def fits_as_one_program(config: RunConfig, room: Room, *, devices: int = 1, segments: int = 1) -> bool:
    """Says whether by arithmetic a step of one program fits that computes again all that the configuration
    lets it: one estimate, where to find the fastest takes seconds."""
    smallest = [*_resident(config, True)][-1:]
    plans = (estimate(one, devices=devices, segments=segments)[0] for one in smallest)
    return any(room.full.holds(plan) for plan in plans)


def least_seconds(config: RunConfig, devices: int = 1) -> float:
    """Returns `Candidate.seconds` of the fastest of what a configuration may become on GPUs with memory
    enough."""
    found = (*_resident(config, True), *_layered(config))
    return min((_seconds(one, devices, True) for one in found), default=math.inf)


def left_open(config: RunConfig, room: Room, devices: int = 1, segments: int = 1) -> dict[str, Any]:
    """Returns what of `ruling_out` to change, and to what, for something to fit by arithmetic: the first that
    is enough, or all of it; nothing where that is not."""
    free = {key: ONE_PROGRAM[key][1] for key in ruling_out(config)}
    tried = [{key: value} for key, value in free.items()]
    for values in [*tried, free] if len(tried) > 1 else tried:
        found = next(candidates(replaced(config, values), room, devices=devices, segments=segments), None)
        if found and not found.near:
            return values
    return {}


def all_candidates(config: RunConfig, room: Room, devices: int = 1, segments: int = 1) -> list[Candidate]:
    """Returns what a configuration's `auto` may stand for on GPUs, the fastest first; of those that are one
    program also what does not fit."""
    levels = *LEVELS[:1], *levels_with_room(config, room, devices)
    return [*_by_speed(config, room, devices, segments, True, levels)]


def likeliest(found: Iterable[Candidate], room: Room) -> Iterator[Candidate]:
    """Yields of candidates, the fastest first, those that fit by arithmetic, and behind them near ones: the
    smallest of each form, for one that does not fit as compiled says as much of the others."""
    near: dict[tuple[str, bool, int], Candidate] = {}
    for one in found:
        if (room.full if one.config.offload.layered else room).holds(one.plan):
            yield one
        elif _at_most(room, one.config).holds(one.plan):
            form = one.config.model.loop, one.config.offload.layered, one.config.offload.prefetch
            near[form] = min(near.get(form, one), one, key=_size)
    yield from (dataclasses.replace(one, near=True) for one in sorted(near.values(), key=_size))


def _size(candidate: Candidate) -> tuple[int, bool]:
    return candidate.plan.peak_device, candidate.config.mesh.copies  # which take memory that is not in a plan


def too_large(candidate: Candidate, room: Room) -> bool:
    """Says whether a candidate does not fit, by whatever arithmetic is over."""
    return not _at_most(room, candidate.config).holds(candidate.plan)


def _at_most(room: Room, config: RunConfig) -> Room:
    over = INEXACT if config.offload.layered else OVER
    return dataclasses.replace(room, device=round(over * room.device))


def one_stage_at_a_time(config: RunConfig) -> RunConfig:
    """Returns a configuration whose offload takes the least memory: no stage is on its way beside another."""
    return replaced(config, {"offload.prefetch": 0})


def _by_speed(
    config: RunConfig, room: Room, devices: int, segments: int, gpu: bool, levels: tuple[str, ...]
) -> Iterator[Candidate]:
    """Yields candidates of these levels, the fastest first; of those that are one program also what does not
    fit."""
    order = itertools.count()
    queue: list[tuple[float, int, RunConfig | Candidate]] = []

    def add(seconds: float, one: RunConfig | Candidate) -> None:
        heapq.heappush(queue, (seconds, next(order), one))

    resident = _resident(config, gpu) if levels[:1] == LEVELS[:1] else ()
    layered = _layered(config) if levels[-1:] == LEVELS[-1:] else ()
    for tried in (*resident, *layered):
        add(_seconds(tried, devices, gpu), tried)
    while queue:
        seconds, _, one = heapq.heappop(queue)
        if isinstance(one, Candidate):
            one = _chunked(one, room, devices, segments)
            yield from (dataclasses.replace(one, config=way) for way in ways(one.config))
            continue
        found = _fitted(config, one, room, seconds, by_arithmetic(one, devices, segments))
        if found:
            add(found.seconds, found)
        if config.offload.level == "auto" and one.offload.layered and one.offload.prefetch:
            add(seconds, one_stage_at_a_time(one))  # behind what hides its copies, which is as fast at least


def _fitted(
    config: RunConfig, tried: RunConfig, room: Room, seconds: float, planned: Planned
) -> Candidate | None:
    """Returns a configuration, with the offload that it needs where `config` leaves that open, if it may fit.
    seconds: of its matmuls."""
    if config.offload.level == "auto" and tried.offload.layered:
        found = with_least_offload(tried, room.full, planned)
        found = found or with_least_offload(tried, _at_most(room, tried), planned)
        if found is None:
            return None
        tried, plan, moved = found
    else:
        plan, moved = planned(tried.offload)
    return Candidate(tried, plan, seconds, moved)


def _chunked(one: Candidate, room: Room, devices: int, segments: int) -> Candidate:
    """Returns a candidate with `train.loss_chunk` settled: large where they leave FREE of the device."""
    config = one.config
    if config.train.loss_chunk != "auto":
        return one
    most = (1 - FREE) * room.device
    if one.plan.peak_device <= most and loss_chunk_choice.gains(config, devices):
        large = replaced(config, {loss_chunk_choice.KEY: "large"})
        plan, _ = by_arithmetic(large, devices, segments)(large.offload)
        if plan.peak_device <= most:
            return dataclasses.replace(one, config=large, plan=plan)
    return dataclasses.replace(one, config=replaced(config, {loss_chunk_choice.KEY: "small"}))


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
    if ruling_out(config):
        return
    if level == "none" and config.offload.activations == "none":
        return
    for policy in _asked(config, "remat.policy", POLICIES[1:]):
        settings = {"remat.policy": policy, "model.loop": "unroll"}
        yield replaced(config, settings | ({"offload.level": LEVELS[-1]} if level == "auto" else {}))


@functools.lru_cache(maxsize=256)
def _seconds(config: RunConfig, devices: int, gpu: bool) -> float:
    """Returns how long a step's matmuls take on devices like an H200. gpu: where loops cost time. Remembered:
    a start asks several times, and adapters are traced for it."""
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
    form = 1.0
    if config.offload.layered:
        form = BY_PROGRAMS
    elif gpu and config.model.loop == "scan":
        form = SCANNED[config.remat.policy]
    return form * (needed + again) / devices / SUSTAINED


def _float8_flops(stage: Stage, config: RunConfig) -> float:
    """Returns the FLOPs per token of a stage's matrices that a setting of float8 is about."""
    plain = sum(math.prod(shape) for info, shape in stage.matrices if not info.stack)
    found = (4.0 if config.lora.on else 6.0) * plain  # no gradients of a frozen base
    if stage.mixture and config.precision.float8_experts:  # but for the gradients of their matrices
        of_all = sum(math.prod(shape) for info, shape in stage.matrices if info.stack)
        found += 4.0 * of_all * stage.mixture.top_k / stage.mixture.experts
    return found
