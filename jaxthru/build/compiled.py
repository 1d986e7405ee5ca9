"""A configuration as it runs on these devices: its step, compiled, with the data and the state for it."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxthru.build import attention_choice, choices, early_choices, pinned_host
from jaxthru.build.adapted_weights import published_weights, reader_of
from jaxthru.build.batches import place, train_batches
from jaxthru.build.checks import check_objective, check_vocabulary, validate
from jaxthru.build.choices import Choice
from jaxthru.build.defaults import replaced
from jaxthru.build.host_memory import check_host_memory
from jaxthru.build.kept_choices import KeptChoices
from jaxthru.build.prompt_samples import samples_of
from jaxthru.build.proposals import Candidate, fits_as_one_program
from jaxthru.build.searched import Search
from jaxthru.build.step import update_flops
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
from jaxthru.training.state import FirstState, state_of_weights, with_base, without_base
from jaxthru.training.step_timer import StepTimer

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

    def proposed(tried: RunConfig, _: str) -> Candidate:
        tried, _ = attention_choice.by_table(tried, layout, found.segments, found.mean, capability, room)
        return next(choices.proposed(tried, layout, room, found.segments))

    attention_choice.or_without_workspace(proposed, config, layout, found.segments, capability)
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
) -> Build:
    """Returns the compiled step of what `choices.resolve` has returned, on its layout: of what that leaves
    open, the fastest that fits as compiled; and has the host memory that it needs pinned.

    autotuned: a folder of what autotuning has chosen, by which it is compiled anew. weights: published ones
    to start from. asked: the configuration before anything was chosen. fresh: whether the first state will be
    made. checked: compare attention with its reference. Both are compiled on another thread, while the step
    is. Raises InputError, and TrainingError for an attention that is wrong.
    """
    check_vocabulary(config, data.vocabulary)
    check_objective(config, data.units)
    kept = KeptChoices(config, layout, lambda: choices.documents_of(data))
    search = Search(layout, data, asked or config, kept, autotuned, fresh, weights is None, checked)

    found = None
    if kept.found:
        try:
            found = search(config)
        except InputError as error:
            log.info("auto: what an earlier start chose is refused, and searched for anew: %s", error)
            kept.drop()
    if found is None:
        capability = attention_choice.capability_of(layout)
        found = attention_choice.or_without_workspace(search, config, layout, data.segments, capability)
    chosen, made = found.confirmed.config, found.confirmed.made
    pinned_host.reserve(chosen, list(layout.mesh.devices.flat))
    return Build(
        chosen,
        data,
        layout,
        made.step,
        made.abstract,
        found.confirmed.compiled,
        found.seconds,
        found.recompile,
        weights,
        samples_of(chosen, made.step.objective.model, data),
        found.decisions,
        found.first,
    )
