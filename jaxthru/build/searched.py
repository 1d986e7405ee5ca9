"""The search for the step of a configuration: of what it leaves open, the fastest that fits as compiled."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxthru.build import attention_choice, choices, confirmed, early_choices, transfers_choice
from jaxthru.build.checks import attention_by, refusals_named
from jaxthru.build.choices import Choice
from jaxthru.build.compiled_beside import Beside
from jaxthru.build.confirmed import Confirmed
from jaxthru.build.defaults import get
from jaxthru.build.kept_choices import KeptChoices
from jaxthru.build.prompt_samples import samples_of
from jaxthru.build.proposals import Candidate
from jaxthru.build.refusal import NothingFits
from jaxthru.build.step import Assembled, assemble
from jaxthru.config import RunConfig
from jaxthru.data.loading.host_pool import RunData
from jaxthru.runtime import xla
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.sharding import Layout
from jaxthru.training.self_check import agree_on_attention
from jaxthru.training.state import FirstState
from pallas_kernels import dispatch

log = logging.getLogger("jaxthru")


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search has found. seconds: that it took. first: what makes the first state, if that was compiled
    beside. recompile: compiles the step again, with more options of XLA's."""

    confirmed: Confirmed
    seconds: float
    decisions: tuple[Choice, ...]
    first: FirstState | None
    recompile: Callable[[dict], Any]


@dataclasses.dataclass(frozen=True)
class Search:
    """The search for a step of one layout and its data, called with a configuration.

    asked: the configuration before anything was chosen. kept: of an earlier start. autotuned, fresh, checked:
    as of `compile_step`. drawn: whether the first state is drawn from random numbers.
    """

    layout: Layout
    data: RunData
    asked: RunConfig
    kept: KeptChoices
    autotuned: Path | None
    fresh: bool
    drawn: bool
    checked: bool

    def __call__(self, config: RunConfig, attention: str = "") -> Found:
        """Returns the fastest step that fits. attention: why it is the one that the configuration names, if
        it was not asked for. Raises NothingFits, InputError where what was kept does not fit, and
        TrainingError for an attention that is wrong."""
        config, reasons = self._settled(config, attention)
        layout, segments, started = self.layout, self.data.segments, time.monotonic()
        anew = xla.nothing_kept(self.autotuned is not None)
        room = choices.room_here(config) if choices.open_keys(config) else None
        ask_room = functools.partial(choices.room_here, config) if room or self.kept.found else None
        evaluated = self.fresh and config.evaluate.rows > 0

        def options(made: Assembled) -> dict[str, Any]:
            return made.step.model.compiler_options(config.train.deterministic, self.autotuned)

        def compiled(candidate: Candidate, made: Assembled) -> Confirmed:
            return anew(confirmed.compile_candidate)(config, candidate, made, options(made), ask_room)

        with Beside(config, segments, self.fresh and self.drawn, evaluated, self.checked) as beside:
            confirm = functools.partial(self._confirm, config, beside, compiled)
            fits = confirmed.fastest(choices.proposed(config, layout, room, segments), confirm)
            if fits is None and self.kept.found:
                raise InputError("as compiled it does not fit")
            if fits is None:
                raise NothingFits(config, room, layout.mesh.size, segments)
            beside.wait()
        _, found = fits
        seconds, made = time.monotonic() - started, found.made
        log.info("compiled in %.1f s%s", seconds, found.reason and f": {found.reason}")
        if self.checked:
            agree_on_attention(made.step.model, beside.wrong_attention)
        devices = list(layout.mesh.devices.flat)
        decisions = choices.made(self.asked, found.config, found.reason, devices, reasons)
        self.kept.keep(decisions)
        recompile = lambda more: anew(made.compile)(options(made) | more)  # noqa: E731
        return Found(found, seconds, decisions, beside.first_state(made), recompile)

    def _confirm(
        self,
        config: RunConfig,
        beside: Beside,
        compiled: Callable[[Candidate, Assembled], Confirmed],
        candidate: Candidate,
    ) -> tuple[Candidate, Confirmed] | None:
        """Returns a candidate as compiled, see `confirmed.fastest`, and begins what is compiled beside it."""
        data = self.data
        of_data = {"segments": data.segments, "sources": len(data.names), "masked": data.masked}
        made = assemble(candidate.config, self.layout, **of_data, attention=attention_by(config))
        samples_of(candidate.config, made.step.objective.model, data)  # refuses prompts before the work
        announce(made.step.model.parameters, self.layout, candidate.said)
        beside.start(made)
        with refusals_named(config), dispatch.noted() as kernels:
            found = compiled(candidate, made)
        if found.compiled is None:
            log.info("%s", found.reason)
            return None
        return found.candidate, found.with_kernels(kernels)

    def _settled(self, config: RunConfig, attention: str) -> tuple[RunConfig, dict[str, str]]:
        """Returns a configuration with what is chosen without a compile, and all that an earlier start has
        found, and the reasons by key; of what needs a compile, they are to be found anew."""
        before = config
        config, reasons = early_choices.of_run(config, self.layout)
        by_rule = get(before, transfers_choice.KEY) != get(config, transfers_choice.KEY)
        named, config = get(config, attention_choice.KEY) != "auto", self.kept.settled(config)
        room = choices.room_here(config) if choices.open_keys(config) else None
        config, why = attention_choice.of_run(config, self.layout, self.data, room)
        why = why or attention or ("" if named else self.kept.reason(attention_choice.KEY))
        reasons[attention_choice.KEY] = why
        for key, why in reasons.items():
            if why:
                log.info("%s = 'auto' is %r, %s", key, get(config, key), why)
            elif get(before, key) != get(self.asked, key):
                reasons[key] = choices.RECORDED
        if by_rule:
            reasons[transfers_choice.KEY] = transfers_choice.REASON
        return config, reasons


def announce(parameters: int, layout: Layout, settings: str) -> None:
    """Logs what is about to be compiled, and for which devices. settings: of memory and speed."""
    mesh = layout.mesh
    log.info(
        "compiling the step: %s parameters on %d × %s (%s): %s ...",
        f"{parameters:,}",
        mesh.size,
        mesh.devices.flat[0].device_kind,
        " × ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
        settings,
    )
