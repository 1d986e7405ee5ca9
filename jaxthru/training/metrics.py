"""The row of metrics of each step, and the configuration of metrics."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxthru.runtime.errors import did_you_mean, require
from jaxthru.training.cost import CostConfig
from jaxthru.training.rows import Row

TRACKERS = ("wandb", "mlflow", "trackio")
"""Experiment trackers, each by the name of its package."""


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """tensorboard: also write TensorBoard's event files. trackers: experiment trackers that get the same
    rows, of wandb, mlflow and trackio (docs/trackers.md). Every step is always written to metrics.jsonl."""

    tensorboard: bool = True
    trackers: tuple[str, ...] = ()

    def __post_init__(self):
        for name in self.trackers:
            require(
                name in TRACKERS,
                f"metrics.trackers: {name!r} is none of {', '.join(TRACKERS)}{did_you_mean(name, TRACKERS)}",
            )
        twice = {name for name in self.trackers if self.trackers.count(name) > 1}
        require(not twice, f"metrics.trackers: names {', '.join(sorted(twice))} twice; name each once")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """What is measured of one update, over the whole job unless said otherwise.

    loss, loss_by_source: nats per trained token. tokens: without padding. trained_tokens: the targets among
    them that the loss counts. attention_span: Σ document length².
    step_seconds: from the end of the step before to the end of this one. data_wait_seconds,
    checkpoint_seconds: parts of it in this process. host_gap_seconds: how long the device was seen without
    work, for whatever reason; a lower bound, as it is looked at only before and after the next batch is
    fetched. skipped_updates: since the run's first
    step. partly_updated: it was skipped, but parts had been updated when the first gradient that is not
    finite was met (optim.clip_rule = previous). hbm_peak_bytes: of the fullest device of this process.
    joules: that the devices of all processes counted, None where one of them does not.
    further: metrics that the model declares, by name: numbers, or lists of them.
    """

    step: int
    loss: float
    loss_by_source: Mapping[str, float | None]
    grad_norm: float
    learning_rate: float
    tokens: int
    trained_tokens: int
    attention_span: float
    step_seconds: float
    data_wait_seconds: float | None = None
    host_gap_seconds: float | None = None
    checkpoint_seconds: float | None = None
    skipped_updates: int = 0
    partly_updated: bool = False
    hbm_peak_bytes: int | None = None
    joules: float | None = None
    further: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Meter:
    """Turns finished steps into rows of metrics.jsonl.

    masked_share: of the tokens, what the loss does not count the next token of. packing_fill: of a batch's
    room, what tokens fill. goodput: the seconds of all steps since this meter was made whose updates were
    kept, each without its data wait and its checkpoint, over all seconds since `started`. Start-up,
    compilation, evaluation, waiting and skipped updates are what is missing to 1. A resumed process starts
    anew.
    """

    def __init__(
        self,
        flops_of: Callable[[float, float], float],
        peak_flops: float | None,
        skipped_updates: int = 0,
        started: float | None = None,
        cost: CostConfig | None = None,
        devices: int = 1,
        batch_tokens: int | None = None,
        untrained_flops: float = 0.0,
    ):
        """flops_of: (tokens, attention_span) -> FLOPs that an update needs. peak_flops: dense bf16 ones per
        second of all devices together, whatever the precision; None if unknown. skipped_updates: of the
        restored state. started: time.monotonic() at the start of the process, now if None. cost: of each
        of the devices, which are of all processes. batch_tokens: that a batch has room for; None if unknown.
        untrained_flops: how many fewer a token needs that is not trained on.
        """
        self._flops_of, self._untrained_flops = flops_of, untrained_flops
        self._peak_flops = peak_flops
        self._skipped = skipped_updates
        self._started = time.monotonic() if started is None else started
        self._kept_seconds = 0.0
        self._cost, self._devices = cost or CostConfig(), devices
        self._batch_tokens = batch_tokens

    def row(self, finished: FinishedStep) -> Row:
        """Returns the row of a finished step; call it once for each, in order."""
        seconds = finished.step_seconds
        if finished.skipped_updates == self._skipped:
            waits = (finished.data_wait_seconds or 0.0) + (finished.checkpoint_seconds or 0.0)
            self._kept_seconds += max(0.0, seconds - waits)
        self._skipped = finished.skipped_updates
        wall = time.monotonic() - self._started
        untrained = self._untrained_flops * (finished.tokens - finished.trained_tokens)
        flops = (self._flops_of(finished.tokens, finished.attention_span) - untrained) / seconds
        row = dataclasses.asdict(finished)
        further = row.pop("further")
        return {
            **row,
            **further,
            "masked_share": 1 - finished.trained_tokens / finished.tokens if finished.tokens else None,
            "packing_fill": finished.tokens / self._batch_tokens if self._batch_tokens else None,
            "tokens_per_second": finished.tokens / seconds,
            "model_tflops": flops / 1e12,
            "mfu": flops / self._peak_flops if self._peak_flops else None,
            "bf16_peak_tflops": self._peak_flops and self._peak_flops / 1e12,
            **self._cost.of_step(finished.joules, self._devices * seconds, finished.tokens),
            "goodput": min(1.0, self._kept_seconds / wall) if wall > 0 else None,
        }
