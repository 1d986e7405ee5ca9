"""Compiles a step as one of several candidates, and says what memory it takes as compiled."""

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax

from jaxthru.build import choices
from jaxthru.build.least_offload import fitted
from jaxthru.build.memory_estimate import MemoryPlan, Room, fullest, gib
from jaxthru.build.proposals import Candidate
from jaxthru.build.step import Assembled
from jaxthru.config import RunConfig
from jaxthru.engine import programs
from jaxthru.engine.dispatched import DispatchedStep
from jaxthru.engine.inline import CompiledStep
from jaxthru.engine.offload import OffloadConfig, offloaded_state, on_device
from jaxthru.engine.rehearsed import OUTPUT, TEMPORARY
from jaxthru.models.scopes import program_of
from jaxthru.profile.read.buffers import CATEGORIES, Breakdown

log = logging.getLogger("jaxthru")

Step = CompiledStep | DispatchedStep


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes on one device of a compiled program. results: of those that take over no argument's memory."""

    arguments: int
    results: int
    temporary: int

    @property
    def peak(self) -> int:
        return self.arguments + self.results + self.temporary

    @classmethod
    def of(cls, stats: Any) -> "Sizes | None":
        """Returns those that XLA says of a program (`memory_analysis`); None where it does not."""
        if stats is None:
            return None
        results = stats.output_size_in_bytes - stats.alias_size_in_bytes
        return cls(stats.argument_size_in_bytes, max(results, 0), stats.temp_size_in_bytes)


@dataclasses.dataclass(frozen=True)
class Confirmed:
    """A candidate as it was compiled, with the offload that it then needs. compiled: None where it does not
    fit. reason: what was found, for people; empty where nothing was asked."""

    candidate: Candidate
    made: Assembled
    compiled: Step | None
    reason: str

    @property
    def config(self) -> RunConfig:
        return self.candidate.config

    def with_kernels(self, kernels: Mapping[str, Collection[str]]) -> "Confirmed":
        """Returns it with the implementations that were taken, see `choices.with_kernels`."""
        config = choices.with_kernels(self.config, kernels)
        return dataclasses.replace(self, candidate=dataclasses.replace(self.candidate, config=config))


SLOWER = 1.01
"""How much longer than it was proposed for a candidate may take as compiled before the next is tried too."""


def fastest[Found](
    candidates: Iterable[Candidate], confirm: Callable[[Candidate], tuple[Candidate, Found] | None]
) -> tuple[Candidate, Found] | None:
    """Returns what was found of the first of candidates, the fastest first and near ones last, that fits as
    compiled. Where it then needs so much more offload than by arithmetic that the next may be faster, that is
    compiled too.

    confirm: returns a candidate with the offload that it needs as compiled, and what else was found; None
    where it does not fit.
    """
    best = None
    for candidate in candidates:
        if best is not None and (candidate.near or best[0].seconds <= candidate.seconds):
            break
        if (found := confirm(candidate)) is None:
            continue
        if best is None or found[0].seconds < best[0].seconds:
            best = found
        if found[0].seconds <= SLOWER * candidate.seconds:
            break
        longer = found[0].seconds / candidate.seconds
        log.info("%s: %.3g times as long as by arithmetic; the next is tried too", found[0].said, longer)
    return best


def compile_candidate(
    asked: RunConfig,
    candidate: Candidate,
    made: Assembled,
    options: dict[str, Any],
    ask_room: Callable[[], Room] | None,
) -> Confirmed:
    """Compiles a candidate, and says whether it fits: at once where `ask_room` is None, for nothing is open.

    asked: the configuration with what is open. made: of the candidate. ask_room: asked late, for it waits for
    XLA to take the device's memory.
    """
    config = candidate.config
    if ask_room is None:
        return Confirmed(candidate, made, made.compile(options), "")
    if config.offload.layered:
        room = ask_room().full
        analyse = lambda traced: traced.lower().compile(compiler_options=options).memory_analysis()  # noqa: E731
        found = fitted(config, asked.offload.level, room, Programs(made, analyse).planned)
        if found is None:
            reason = f"{candidate.said}: as compiled it does not fit {gib(room.device)} GiB"
            return Confirmed(candidate, made, None, reason)
        config, plan, moved = found
        candidate = dataclasses.replace(candidate, config=config, moved=moved)
        made = offloaded(made, config.offload)
        size, compiled = plan.peak_device, made.compile(options)
    else:
        compiled, room = made.compile(options), ask_room().full
        size = (sizes := Sizes.of(compiled.program.memory_analysis())) and sizes.peak
    if size is None:
        return Confirmed(candidate, made, compiled, f"{candidate.said}: fits by arithmetic")
    reason, fits = f"{candidate.said}: {gib(size)} of {gib(room.device)} GiB as compiled", size <= room.device
    return Confirmed(candidate, made, compiled if fits else None, reason + ", too much" * (not fits))


def offloaded(made: Assembled, offload: OffloadConfig) -> Assembled:
    """Returns a step with another part of its state on the host."""
    whole = programs.with_shardings(made.abstract, on_device(made.abstract))
    return dataclasses.replace(made, offload=offload, abstract=offloaded_state(whole, offload))


class Programs:
    """The programs of a dispatched step, each compiled once, whatever of the state is on the host."""

    def __init__(self, made: Assembled, analyse: Callable[[jax.stages.Traced], Any]):
        """made: with any offload: the programs are the same with all. analyse: compiles one, and returns what
        XLA says of its memory."""
        self._analyse = analyse
        self._rehearsed = made.rehearsals(self._needs)  # which compiles each program

    def planned(self, offload: OffloadConfig, memory: int = 0) -> tuple[MemoryPlan, int]:
        """Returns what a step with this offload needs, and the bytes that it moves, see `Planned`."""
        found = self._rehearsed(offload, memory)
        return fullest(found.moments, ("as compiled",), found.needs), found.moved

    def _needs(self, name: str, traced: jax.stages.Traced) -> Breakdown:
        kind, device = program_of(name), dict.fromkeys(CATEGORIES, 0)
        if sizes := Sizes.of(self._analyse(traced)):
            device[TEMPORARY[kind]] += sizes.temporary
            device[OUTPUT[kind]] += sizes.results
        return Breakdown(device, dict.fromkeys(CATEGORIES, 0), sum(device.values()), 0, "")
