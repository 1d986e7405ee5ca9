"""The step timer: how long each step took, what of it was waiting, and its metrics, read one step late."""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxthru.engine.terms import OF_A_STEP, Terms
from jaxthru.runtime import hardware
from jaxthru.runtime.errors import TrainingError
from jaxthru.runtime.peers import NoPeers, Peers
from jaxthru.training.energy import StepEnergy
from jaxthru.training.evaluate import mean_by_source
from jaxthru.training.metrics import FinishedStep, Meter
from jaxthru.training.watchdog import Watchdog

log = logging.getLogger("jaxthru")
WAITS = ("data_wait_seconds", "host_gap_seconds", "checkpoint_seconds")
"""What is booked as it happens, and belongs to the step that finishes next."""


class StepTimer:
    """Hands each finished step to the record, the display and the watchdog, and ends a hopeless run."""

    def __init__(
        self,
        meter: Meter,
        sources: tuple[str, ...],
        skip_limit: int,
        record,
        progress,
        watchdog: Watchdog,
        energy: StepEnergy | None = None,
        peers: Peers | NoPeers | None = None,
    ):
        """skip_limit: updates skipped in a row that end the run. energy: of the steps, None where nothing
        counts it. peers: the other processes of the run."""
        self.meter, self.sources, self.skip_limit = meter, sources, skip_limit
        self.record, self.progress, self.watchdog = record, progress, watchdog
        self._energy, self._peers = energy or StepEnergy(None), peers or NoPeers()
        self._pending: tuple[int, Terms, Future[tuple[float, float | None]]] | None = None
        self._idle_since: float | None = None
        self._called = 0.0  # when the loop last called for a step, or turned to something else
        self._watcher = ThreadPoolExecutor(1, "jaxthru-step-ends")
        self.restart_clock()

    def check_idle(self) -> None:
        """Notes when the device is first seen idle, without work."""
        idle = self._pending is not None and self._pending[1]["loss"].is_ready()
        if idle and self._idle_since is None:
            self._idle_since = time.monotonic()

    def waited(self, seconds: float) -> None:
        """Books a wait for data."""
        self._waits["data_wait_seconds"] += seconds

    def saved(self, seconds: float) -> None:
        """Books the time that a checkpoint kept the loop waiting."""
        self._waits["checkpoint_seconds"] += seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Books what happens within as a wait for data."""
        asked = time.monotonic()
        yield
        self.waited(time.monotonic() - asked)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Books what happens within as a checkpoint's."""
        begun = time.monotonic()
        with self.watchdog.paused():
            yield
        self.saved(time.monotonic() - begun)

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """What happens within lies between two steps, and belongs to none."""
        self._called = time.monotonic()  # what was waited for until now is the step's before
        self.finish_step()
        with self.watchdog.paused():
            yield
        self.restart_clock()

    def restart_clock(self) -> None:
        """Begins the next step now: what came before belongs to no step."""
        self._clock, self._idle_since = time.monotonic(), None
        self._released = self._clock  # since when the host has waited for no device
        self._waits = dict.fromkeys(WAITS, 0.0)
        self._watcher.submit(self._energy.begin)  # which reads a counter; before the next end, as it is asked

    def dispatching(self) -> None:
        """Books how long the device was seen without work, now that it is about to get some."""
        self.check_idle()
        self._called = time.monotonic()
        if self._idle_since is not None:
            self._waits["host_gap_seconds"] += self._called - self._idle_since
            self._idle_since = None

    def dispatched(self, step: int, metrics: Terms, first: bool = False) -> None:
        """Books the step before, while the device is at this one. first: of a program, which is waited for
        when it runs first, and so is booked, too."""
        ended = self._watcher.submit(self._ended, metrics["loss"])
        self.finish_step()
        self._pending = (step, metrics, ended)
        if first:
            self.finish_step()
            self._idle_since = self._clock

    def finish_step(self) -> None:
        """Waits for the last step dispatched and books it. Raises TrainingError at the skip limit."""
        if self._pending is None:
            return
        (step, metrics, ended), self._pending = self._pending, None
        asked = time.monotonic()
        values = jax.device_get(metrics)
        # A layered step is dispatched for as long as it runs: the one before ended meanwhile. If the device
        # had nothing to do then, the step lasts until the next was called for: what was waited for is its.
        ended_at, joules = ended.result()
        self._peers.note(asked - self._released)
        self._released = time.monotonic()
        now = max(ended_at, self._called)
        finished = FinishedStep(
            step=step,
            loss=float(values["loss"]),
            loss_by_source=mean_by_source(self.sources, values["source_loss"], values["source_tokens"]),
            grad_norm=float(values["grad_norm"]),
            learning_rate=float(values["learning_rate"]),
            tokens=int(values["tokens"]),
            trained_tokens=round(float(values.get("trained_tokens", values["source_tokens"].sum()))),
            attention_span=float(values["attention_span"]),
            step_seconds=now - self._clock,
            skipped_updates=int(values["skipped"]),
            partly_updated=bool(values["partly_updated"]),
            hbm_peak_bytes=hardware.peak_bytes(),
            joules=joules,
            further=further_of(values, step),
            **self._waits,
        )
        self._clock, self._waits = now, dict.fromkeys(WAITS, 0.0)
        row = self.meter.row(finished) | self._peers.slowest()
        self.record.step(row)
        self.progress.update(row)
        self.watchdog.beat()
        if finished.partly_updated:
            log.warning(
                "step %d: its loss is finite, a gradient is not: the stages updated before it was met keep "
                "their update (optim.clip_rule = previous)",
                step,
            )
        if int(values["skipped_in_a_row"]) >= self.skip_limit:
            raise TrainingError(
                f"step {step}: the loss or its gradient was not finite {self.skip_limit} times in a row "
                f"(train.skip_limit); the last loss was {finished.loss}"
            )

    def _ended(self, array: jax.Array) -> tuple[float, float | None]:
        """Returns when an array was there, by the monotonic clock, and the joules of its step. The watcher
        runs it, so that reading a counter takes none of the loop's time."""
        jax.block_until_ready(array)
        return time.monotonic(), self._energy.end()


TABLES_EVERY = 10
"""Steps between two rows with metrics of two dims and more, of which one row can be longer than all else."""


def further_of(values: Mapping[str, np.ndarray], step: int) -> dict[str, Any]:
    """Returns the metrics that a model declares, as the row of a step has them: those of two dims and more,
    such as tokens by layer and expert, in the first step and in every tenth."""
    whole = step == 1 or step % TABLES_EVERY == 0
    further = {name: np.asarray(value) for name, value in values.items() if name not in OF_A_STEP}
    return {name: value.tolist() for name, value in further.items() if whole or value.ndim < 2}
