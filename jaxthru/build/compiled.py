"""A configuration as it runs on these devices: its step, compiled, with the data and the state for it."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from jaxthru.build import choices
from jaxthru.build.checks import asked_for, attention_by, fit
from jaxthru.build.step import assemble
from jaxthru.config import RunConfig
from jaxthru.data.batch import check_batch
from jaxthru.data.loader import Batches, Data
from jaxthru.data.placement import local_rows, to_global
from jaxthru.data.state import DataState
from jaxthru.engine.dispatched import DispatchedStep
from jaxthru.engine.inline import CompiledStep
from jaxthru.engine.step import Batch, State, Step
from jaxthru.models import family
from jaxthru.runtime import hardware, xla
from jaxthru.runtime.errors import InputError, require
from jaxthru.runtime.sharding import Layout
from jaxthru.training.account import Account
from jaxthru.training.evaluate import Evaluation, NoEvaluation
from jaxthru.training.metrics import Meter
from jaxthru.training.state import init_by_parts, sharded_init
from pallas_kernels.dispatch import Unsupported

log = logging.getLogger("jaxthru")


def row_cost(config: RunConfig) -> tuple[float, float] | None:
    """Returns the cost of a token and of a token² of a document, or None where nothing is to be balanced.

    In seconds if `data` gives what was measured, else in floating-point operations.
    """
    data = config.data
    if not data.balance:
        return None
    if data.linear_cost is not None:
        return data.linear_cost, data.attention_cost
    flops = family.module_of(config.model).train_flops
    return flops(config.model, 1, 0), flops(config.model, 0, 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Build:
    """What a configuration becomes on this machine, compiled and ready to run.

    abstract: shapes, dtypes and shardings of the state. compiled: (state, batch) -> (state, metrics).
    recompile: compiles it again, with more of XLA's options.
    """

    config: RunConfig
    data: Data
    layout: Layout
    step: Step
    abstract: State
    compiled: CompiledStep | DispatchedStep
    compile_seconds: float
    recompile: Callable[[dict], CompiledStep | DispatchedStep]

    def first_state(self) -> State:
        """Returns the state before the first update."""
        make = init_by_parts if self.config.offload.layered else sharded_init
        return make(self.step.objective.model, self.step.optimizer, self.abstract, self.config.train.seed)

    def place(self, batch: dict[str, np.ndarray], rows: int) -> Batch:
        """Returns this process's part of a batch of so many rows as the global batch on the devices."""
        check_batch(batch, len(batch["tokens"]), self.config.data.sequence)
        return to_global(batch, self.layout.sharding(("batch", "sequence")), rows)

    def batches(self, data_state: DataState) -> Batches:
        """Returns the batches of the updates after `data_state.step`, on the devices; close it."""
        train = self.config.train
        return self.data.train_batches(
            data_state.schedule,
            seed=train.seed,
            rows=train.rows,
            steps=train.steps,
            start=data_state.step,
            local_rows=self._local_rows(train.rows),
            cost=row_cost(self.config),
            place=functools.partial(self.place, rows=train.rows),
        )

    def evaluation(self) -> Evaluation | NoEvaluation:
        """Returns the held-out evaluation, compiled."""
        config = self.config.evaluate
        if config.rows == 0:
            return NoEvaluation()
        # As many rows at once as a micro-batch of training has, so that it fits the memory that fits those.
        rows = self.config.train.rows // self.config.train.microbatches
        batches = self.data.held_out_batches(
            total_rows=config.rows, rows=rows, local_rows=self._local_rows(rows)
        )
        if not batches:
            log.info("no text is held out: nothing to evaluate on")
            return NoEvaluation()
        batches = [self.place(batch, rows) for batch in batches]
        return Evaluation(config, self.compiled.loss_terms, batches, self.data.names)

    def account(self, skipped: int, started: float, *listeners) -> Account:
        """Returns the account of finished steps. listeners: the record, the display, the watchdog."""
        model, devices = self.config.model, list(self.layout.mesh.devices.flat)
        needed = functools.partial(family.module_of(model).train_flops, model)
        meter = Meter(needed, hardware.peak_flops(devices), skipped, started)
        return Account(meter, self.data.names, self.config.train.skip_limit, *listeners)

    def _local_rows(self, rows: int) -> slice:
        return local_rows(self.layout.sharding(("batch", "sequence")), rows, self.config.data.sequence)


def build_step(
    config: RunConfig, data: Data, devices: list[jax.Device] | None = None, autotuned: Path | None = None
) -> Build:
    """Returns the compiled step for a configuration. autotuned: a folder of what autotuning has chosen, by
    which it is compiled anew. Raises InputError if configuration, data and devices do not fit each other."""
    xla.configure(config.kernels.writes_to_peers)
    config = choices.ready(config)
    train = config.train
    layout = fit(config, devices)
    choices.reserve(config, list(layout.mesh.devices.flat))
    vocabulary = dict(family.chain(config.model).dims)["vocab"]  # which `fit` has found
    which = f"{config.model.key('vocab')} = {vocabulary}"
    require(data.vocabulary <= vocabulary, f"{which}: smaller than the tokenizer's {data.vocabulary}")
    if data.vocabulary < vocabulary:
        log.info("the tokenizer uses %d of %s", data.vocabulary, which)
    segments, sources = data.segments, len(data.names)
    made = assemble(config, layout, segments=segments, sources=sources, attention=attention_by(config))
    options = xla.compiler_options(
        jax.default_backend(),
        layout.mesh.size,
        train.deterministic,
        writes_to_peers=config.kernels.writes_to_peers,
        copies=config.mesh.copies,
        autotuned=autotuned,
    )
    compile_ = xla.nothing_kept(autotuned is not None)(made.compile)
    started = time.monotonic()
    try:
        compiled = compile_(options)
    except Unsupported as refusal:
        raise InputError(f"{asked_for(config, refusal)}: {refusal}") from refusal
    seconds = time.monotonic() - started
    recompile = lambda more: compile_(options | more)  # noqa: E731
    return Build(config, data, layout, made.step, made.abstract, compiled, seconds, recompile)
