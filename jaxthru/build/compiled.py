"""A configuration as it runs on these devices: its step, compiled, with the data and the state for it."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxthru.build import attention_choice, choices, confirmed, early_choices, pinned_host, transfers_choice
from jaxthru.build.adapted_weights import published_weights, reader_of
from jaxthru.build.batches import place, train_batches
from jaxthru.build.checks import (
    attention_by,
    check_objective,
    check_vocabulary,
    refusals_named,
    validate,
)
from jaxthru.build.choices import Choice
from jaxthru.build.compiled_beside import Beside
from jaxthru.build.confirmed import Confirmed
from jaxthru.build.defaults import get, replaced
from jaxthru.build.host_memory import check_host_memory
from jaxthru.build.kept_choices import KeptChoices
from jaxthru.build.prompt_samples import samples_of
from jaxthru.build.proposals import Candidate, fits_as_one_program
from jaxthru.build.refusal import nothing_fits
from jaxthru.build.step import Assembled, assemble, update_flops
from jaxthru.config import RunConfig
from jaxthru.data.loading.host_pool import RunData
from jaxthru.data.loading.placement import local_rows
from jaxthru.data.loading.planned_batches import Batches
from jaxthru.data.loading.state import DataState
from jaxthru.engine.dispatched import DispatchedStep
from jaxthru.engine.expert_placement import ExpertPlacement
from jaxthru.engine.inline import CompiledStep
from jaxthru.engine.step import Batch, State, Step
from jaxthru.huggingface.weights import Weights
from jaxthru.runtime import hardware, peers, xla
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.sharding import Layout
from jaxthru.training.energy import StepEnergy
from jaxthru.training.evaluate import Evaluation, NoEvaluation
from jaxthru.training.metrics import Meter
from jaxthru.training.samples import Samples
from jaxthru.training.self_check import agree_on_attention
from jaxthru.training.state import FirstState, state_of_weights, with_base, without_base
from jaxthru.training.step_timer import StepTimer
from pallas_kernels import dispatch

log = logging.getLogger("jaxthru")


@dataclasses.dataclass(frozen=True, eq=False)
class Build:
    """What a configuration becomes on this machine, compiled and ready to run.

    abstract: shapes, dtypes and shardings of the state. compiled: (state, batch) -> (state, metrics).
    recompile: compiles it again, with more of XLA's options. weights: published ones that the state before
    the first update has. samples: makes those of `evaluate.prompts`. choices: what `auto` was
    settled to. first: makes the first state. before: the configuration of the run so far, which is continued.
    """

    config: RunConfig
    data: RunData
    layout: Layout
    step: Step
    abstract: State
    compiled: CompiledStep | DispatchedStep
    compile_seconds: float
    recompile: Callable[[dict], CompiledStep | DispatchedStep]
    weights: Weights | None = None
    samples: Samples | None = None
    choices: tuple[Choice, ...] = ()
    first: FirstState | None = None
    before: RunConfig | None = None

    def first_state(self) -> State:
        """Returns the state before the first update."""
        if self.weights:
            log.info("reading the weights of %s ...", self.config.model.pretrained)
            read = reader_of(self.config, self.step.model, self.weights)
            return state_of_weights(self.step.optimizer, self.abstract, read)
        log.info("initialising the parameters ...")
        first = self.first or FirstState(self.step.model, self.step.optimizer, self.abstract)
        return first(self.config.train.seed)

    def saved_part(self, state: State) -> State:
        """Returns what of a state, or of an abstract one, its checkpoints hold: all but a frozen base."""
        return without_base(state, self.step.optimizer.infos) if self.config.lora.on else state

    def restored(self, saved: State) -> State:
        """Returns the state whose saved part this is: a frozen base is read again, and no first adapter."""
        if not self.config.lora.on:
            return saved
        config = replaced(self.config, {"lora.adapter": None})
        return with_base(saved, dataclasses.replace(self, config=config).first_state())

    def expert_placement(self) -> ExpertPlacement:
        """Returns what places experts anew as they are used; those of a frozen base stay where they are."""
        every = 0 if self.config.lora.on else self.config.mesh.place_experts_every
        return ExpertPlacement(self.step.model, every)

    def place(self, batch: dict[str, np.ndarray], rows: int) -> Batch:
        """Returns this process's part of a batch of so many rows as the global batch on the devices."""
        how = {"sequence": self.config.data.sequence, "layout": self.layout}
        columns = [name for name in self.step.objective.columns if name in batch]
        return place(batch, rows, **how, columns=columns)

    def batches(self, data_state: DataState) -> Batches:
        """Returns the batches of the updates after `data_state.step`, on the devices; close it."""
        return train_batches(self.config, self.data, self.layout, data_state)

    def evaluation(self) -> Evaluation | NoEvaluation:
        """Returns the held-out evaluation, compiled."""
        config = self.config.evaluate
        if config.rows == 0 and not config.prompts:
            return NoEvaluation()
        rows = self.config.train.rows_at_once
        local = self.local_rows(rows)
        batches = self.data.held_out_batches(total_rows=config.rows, rows=rows, local_rows=local)
        if config.rows and not batches:
            log.info("no text is held out: nothing to evaluate on")
            if not config.prompts:
                return NoEvaluation()
        batches = [self.place(batch, rows) for batch in batches]
        objective, names = self.step.objective, self.data.names
        terms = self.compiled.terms_of(objective)
        return Evaluation(config, terms, batches, names, self.samples, objective.means)

    def step_timer(self, skipped: int, started: float, *listeners) -> StepTimer:
        """Returns the step timer. listeners: the record, the display, the watchdog."""
        devices = list(self.layout.mesh.devices.flat)
        needed, unneeded = update_flops(self.config, self.step.objective)
        cost = self.config.cost, len(devices)
        room = self.config.train.rows * self.config.data.sequence
        meter = Meter(needed, hardware.peak_flops(devices), skipped, started, *cost, room, unneeded)
        limit, energy = self.config.train.skip_limit, StepEnergy.here()
        return StepTimer(meter, self.data.names, limit, *listeners, energy, peers.current())

    def local_rows(self, rows: int) -> slice:
        """Returns which of so many rows this process builds."""
        return local_rows(self.layout.sharding(("batch", "sequence")), rows, self.config.data.sequence)


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


def build_step(config: RunConfig, data: RunData, devices: list[jax.Device] | None = None) -> Build:
    """Returns the compiled step for a configuration, on all devices or these. Raises InputError if
    configuration, data and devices do not fit each other, or nothing that is `auto` fits the devices."""
    xla.configure(config.kernels.writes_to_peers)
    pinned_host.limit(config)
    config = choices.resolve(config)
    layout = fit_here(config, devices)
    return compile_step(config, layout, data, weights=published_weights(config))


def fit_here(config: RunConfig, devices: list[jax.Device] | None = None, **run: Any) -> Layout:
    """Returns the layout of a configuration, see `checks.validate`, whose step has room in the memory of
    devices and hosts. Ask it before data is prepared. run: `begun` and `kept` of `open_data`. Raises
    InputError."""
    layout, given = validate(config, devices), config
    config, _ = early_choices.of_run(config, layout)
    check_host_memory(config, layout)
    if not choices.open_keys(config):
        return layout
    found = choices.documents(config, **run)
    if KeptChoices(given, layout, lambda: found).found:
        return layout
    room = choices.room_here(config)
    if fits_as_one_program(config, room, devices=layout.mesh.size, segments=found.segments):
        return layout
    capability = attention_choice.capability_of(layout)
    config, _ = attention_choice.by_table(config, layout, found.segments, found.mean, capability, room)
    next(choices.proposed(config, layout, room, found.segments))
    return layout


def compile_step(
    config: RunConfig,
    layout: Layout,
    data: RunData,
    autotuned: Path | None = None,
    weights: Weights | None = None,
    *,
    asked: RunConfig | None = None,
    fresh: bool = True,
    checked: bool = False,
    kept: KeptChoices | None = None,
) -> Build:
    """Returns the compiled step of what `choices.resolve` has returned, on its layout: of what that leaves
    open, the fastest that fits as compiled.

    autotuned: a folder of what autotuning has chosen, by which it is compiled anew. weights: published ones
    to start from. asked: the configuration before anything was chosen. fresh: whether the first state will be
    made. checked: compare attention with its reference. Both are compiled on another thread, while the step
    is. kept: of an earlier start, by default looked up. Raises InputError, and TrainingError for an attention
    that is wrong.
    """
    check_vocabulary(config, data.vocabulary)
    check_objective(config, data.units)
    asked, segments = asked or config, data.segments
    given, kept = config, kept or KeptChoices(config, layout, lambda: choices.documents_of(data))
    config, reasons = _settled(config, asked, layout, data, kept)
    anew = xla.nothing_kept(autotuned is not None)
    room = choices.room_here(config) if choices.open_keys(config) else None
    ask_room = functools.partial(choices.room_here, config) if room or kept.found else None
    started = time.monotonic()
    evaluated = fresh and config.evaluate.rows > 0

    def options(made: Assembled) -> dict[str, Any]:
        return made.step.model.compiler_options(config.train.deterministic, autotuned)

    def compiled(candidate: Candidate, made: Assembled) -> Confirmed:
        return anew(confirmed.compile_candidate)(config, candidate, made, options(made), ask_room)

    with Beside(config, segments, fresh and weights is None, evaluated, checked) as beside:
        confirm = functools.partial(_confirm, config, layout, data, beside, compiled)
        try:
            fits = confirmed.fastest(choices.proposed(config, layout, room, segments), confirm)
        except InputError as error:
            if not kept.found:
                raise
            log.info("auto: what an earlier start chose is refused, and searched for anew: %s", error)
            fits = None
        if fits is not None:
            beside.wait()
    if fits is None and kept.found:
        kept.drop()
        how = {"asked": asked, "fresh": fresh, "checked": checked, "kept": kept}
        return compile_step(given, layout, data, autotuned, weights, **how)
    if fits is None:
        raise InputError(nothing_fits(config, room, layout.mesh.size, segments))
    _, found = fits
    seconds = time.monotonic() - started
    log.info("compiled in %.1f s%s", seconds, found.reason and f": {found.reason}")
    if checked:
        agree_on_attention(found.made.step.model, beside.wrong_attention)
    pinned_host.reserve(found.config, list(layout.mesh.devices.flat))
    made, chosen = found.made, found.config
    devices = list(layout.mesh.devices.flat)
    decisions = choices.made(asked, chosen, found.reason, devices, reasons)
    kept.keep(decisions)
    recompile = lambda more: anew(made.compile)(options(made) | more)  # noqa: E731
    return Build(
        chosen,
        data,
        layout,
        made.step,
        made.abstract,
        found.compiled,
        seconds,
        recompile,
        weights,
        samples_of(chosen, made.step.objective.model, data),
        decisions,
        beside.first_state(made),
    )


def _confirm(
    config: RunConfig,
    layout: Layout,
    data: RunData,
    beside: Beside,
    compiled: Callable[[Candidate, Assembled], Confirmed],
    candidate: Candidate,
) -> tuple[Candidate, Confirmed] | None:
    """Returns a candidate as compiled, see `confirmed.fastest`, and begins what is compiled beside it."""
    of_data = {"segments": data.segments, "sources": len(data.names), "masked": data.masked}
    made = assemble(candidate.config, layout, **of_data, attention=attention_by(config))
    samples_of(candidate.config, made.step.objective.model, data)  # refuses prompts before the work
    announce(made.step.model.parameters, layout, candidate.said)
    beside.start(made)
    with refusals_named(config), dispatch.noted() as kernels:
        found = compiled(candidate, made)
    if found.compiled is None:
        log.info("%s", found.reason)
        return None
    return found.candidate, found.with_kernels(kernels)


def _settled(
    config: RunConfig, asked: RunConfig, layout: Layout, data: RunData, kept: KeptChoices
) -> tuple[RunConfig, dict[str, str]]:
    """Returns a configuration with what is chosen without a compile, and all that an earlier start has found,
    and the reasons by key; of what needs a compile, they are to be found anew."""
    before = config
    config, reasons = early_choices.of_run(config, layout)
    by_rule = get(before, transfers_choice.KEY) != get(config, transfers_choice.KEY)
    named, config = get(config, attention_choice.KEY) != "auto", kept.settled(config)
    room = choices.room_here(config) if choices.open_keys(config) else None
    config, why = attention_choice.of_run(config, layout, data, room)
    reasons[attention_choice.KEY] = why or ("" if named else kept.reason(attention_choice.KEY))
    for key, why in reasons.items():
        if why:
            log.info("%s = 'auto' is %r, %s", key, get(config, key), why)
        elif get(before, key) != get(asked, key):
            reasons[key] = choices.RECORDED
    if by_rule:
        reasons[transfers_choice.KEY] = transfers_choice.REASON
    return config, reasons
