"""Booking finished steps: what the loop reads back of a step once the device is busy with the next."""

import time

import jax

from jaxthru.runtime import hardware
from jaxthru.training.evaluate import mean_by_source
from jaxthru.training.metrics import FinishedStep, Meter
from jaxthru.training.step import Metrics
from jaxthru.training.watchdog import Watchdog


class TrainingError(RuntimeError):
    """Training cannot go on; the message is for the user."""


class Account:
    """Hands each finished step to the record, the display and the watchdog, and ends a hopeless run."""

    def __init__(
        self, meter: Meter, sources: tuple[str, ...], skip_limit: int, record, progress, watchdog: Watchdog
    ):
        """skip_limit: updates skipped in a row that end the run."""
        self.meter, self.sources, self.skip_limit = meter, sources, skip_limit
        self.record, self.progress, self.watchdog = record, progress, watchdog
        self._pending: tuple[int, Metrics, dict[str, float | None]] | None = None
        self._checkpoint_seconds = 0.0
        self._clock = time.monotonic()

    def busy(self) -> bool:
        """Says whether the device is still at the last step dispatched."""
        return self._pending is not None and not self._pending[1]["loss"].is_ready()

    def dispatched(self, step: int, metrics: Metrics, **waits: float | None) -> None:
        """Books the step before, while the device is at this one. waits: FinishedStep's seconds waited."""
        self.settle()
        self._pending = (step, metrics, waits)

    def settle(self) -> None:
        """Waits for the last step dispatched and books it. Raises TrainingError at the skip limit."""
        if self._pending is None:
            return
        (step, metrics, waits), self._pending = self._pending, None
        values = jax.device_get(metrics)
        now = time.monotonic()
        finished = FinishedStep(
            step=step,
            loss=float(values["loss"]),
            loss_by_source=mean_by_source(self.sources, values["source_loss"], values["source_tokens"]),
            grad_norm=float(values["grad_norm"]),
            learning_rate=float(values["learning_rate"]),
            tokens=int(values["tokens"]),
            attention_span=float(values["attention_span"]),
            step_seconds=now - self._clock,
            checkpoint_seconds=self._checkpoint_seconds,
            skipped_updates=int(values["skipped"]),
            hbm_peak_bytes=hardware.peak_bytes(),
            **waits,
        )
        self._clock, self._checkpoint_seconds = now, 0.0
        row = self.meter.row(finished)
        self.record.step(row)
        self.progress.update(row)
        self.watchdog.beat()
        if int(values["skipped_in_a_row"]) >= self.skip_limit:
            raise TrainingError(
                f"step {step}: the loss or its gradient was not finite {self.skip_limit} times in a row "
                f"(train.skip_limit); the last loss was {finished.loss}"
            )

    def saved(self, seconds: float) -> None:
        """Books the time that a checkpoint kept the loop waiting; it counts into the next step."""
        self._checkpoint_seconds += seconds

    def restart_clock(self) -> None:
        """Begins the next step now: what came before belongs to no step."""
        self._clock = time.monotonic()
