"""What a run says of each step: a row in metrics.jsonl, scalars in TensorBoard."""

import dataclasses
import logging
import math
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxthru.runtime.distributed import is_primary
from jaxthru.training.run_directory import RunDirectory

log = logging.getLogger(__name__)
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """tensorboard: also write event files. Every step is always written to metrics.jsonl."""

    tensorboard: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """What is measured of one update, over the whole job unless said otherwise.

    loss, loss_by_source: nats per token. tokens: without padding. attention_span: Σ document length².
    step_seconds: from the end of the step before to the end of this one. data_wait_seconds,
    checkpoint_seconds: parts of it in this process. host_gap_seconds: how long the device was seen without
    work, for whatever reason; a lower bound, as it is looked at only before and after the next batch is
    fetched. skipped_updates: since the run's first
    step. partly_updated: it was skipped, but parts had been updated when the first gradient that is not
    finite was met (optim.clip_rule = previous). hbm_peak_bytes: of the fullest device of this process.
    """

    step: int
    loss: float
    loss_by_source: Mapping[str, float | None]
    grad_norm: float
    learning_rate: float
    tokens: int
    attention_span: float
    step_seconds: float
    data_wait_seconds: float | None = None
    host_gap_seconds: float | None = None
    checkpoint_seconds: float | None = None
    skipped_updates: int = 0
    partly_updated: bool = False
    hbm_peak_bytes: int | None = None


class Meter:
    """Turns finished steps into rows of metrics.jsonl.

    goodput: the seconds of all steps since this meter was made whose updates were kept, each without its
    data wait and its checkpoint, over all seconds since `started`. Start-up, compilation, evaluation,
    waiting and skipped updates are what is missing to 1. A resumed process starts anew.
    """

    def __init__(
        self,
        flops_of: Callable[[float, float], float],
        peak_flops: float | None,
        skipped_updates: int = 0,
        started: float | None = None,
    ):
        """flops_of: (tokens, attention_span) -> FLOPs that an update needs. peak_flops: dense bf16 ones per
        second of all devices together, whatever the precision; None if unknown. skipped_updates: of the
        restored state. started: time.monotonic() at the start of the process, now if None."""
        self._flops_of = flops_of
        self._peak_flops = peak_flops
        self._skipped = skipped_updates
        self._started = time.monotonic() if started is None else started
        self._kept_seconds = 0.0

    def row(self, finished: FinishedStep) -> Row:
        """Returns the row of a finished step; call it once for each, in order."""
        seconds = finished.step_seconds
        if finished.skipped_updates == self._skipped:
            waits = (finished.data_wait_seconds or 0.0) + (finished.checkpoint_seconds or 0.0)
            self._kept_seconds += max(0.0, seconds - waits)
        self._skipped = finished.skipped_updates
        wall = time.monotonic() - self._started
        flops = self._flops_of(finished.tokens, finished.attention_span) / seconds
        row = dataclasses.asdict(finished)
        del row["attention_span"]
        return {
            **row,
            "tokens_per_second": finished.tokens / seconds,
            "model_tflops": flops / 1e12,
            "mfu": flops / self._peak_flops if self._peak_flops else None,
            "bf16_peak_tflops": self._peak_flops and self._peak_flops / 1e12,
            "goodput": min(1.0, self._kept_seconds / wall) if wall > 0 else None,
        }


class Record:
    """Writes rows to metrics.jsonl and eval.jsonl, and to TensorBoard."""

    def __init__(self, run: RunDirectory, events: "TensorBoard | NoTensorBoard"):
        self._run, self._events = run, events

    def step(self, row: Row) -> None:
        """Raises TrainingError if metrics.jsonl cannot be written."""
        self._run.append_metrics(row)
        self._events.add("train", row)

    def evaluation(self, row: Row) -> None:
        """Raises TrainingError if eval.jsonl cannot be written."""
        self._run.append_eval(row)
        self._events.add("eval", row)


class NoRecord:
    """What processes other than the first do with rows."""

    def step(self, row: Row) -> None:
        pass

    def evaluation(self, row: Row) -> None:
        pass


class TensorBoard:
    """Event files in `tensorboard/`: `train/loss`, `train/loss_by_source/prose`, `eval/loss`, ...

    Each row is written at once and by the loop's own thread: a writer's thread that a full disk ends would
    leave the loop waiting for room in its queue. All that TensorBoard shows is in metrics.jsonl too, so where
    it cannot be written the run goes on without it.
    """

    def __init__(self, run: RunDirectory, resumed: int):
        """resumed: the step that was restored, 0 at the start. What was written beyond it is hidden."""
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.record_writer import masked_crc32c

        self._event, self._summary, self._crc = event_pb2.Event, summary_pb2.Summary, masked_crc32c
        # By the nanosecond: two starts within one second would otherwise write the same file.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{time.time_ns()}"
        self._path: Path | None = run.tensorboard / name
        self._write(file_version="brain.Event:2")
        if resumed:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=resumed + 1, session_log=start)

    def add(self, group: str, row: Row) -> None:
        values = [{"tag": f"{group}/{name}", "simple_value": value} for name, value in scalars(row)]
        self._write(step=row["step"], summary=self._summary(value=values))

    def _write(self, **event) -> None:
        """Appends an event as a record: the length, its checksum, the event, its checksum."""
        if self._path is None:
            return
        data = self._event(wall_time=time.time(), **event).SerializeToString()
        parts = struct.pack("<Q", len(data)), data
        record = b"".join(part + struct.pack("<I", self._crc(part)) for part in parts)
        try:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("ab") as file:
                file.write(record)
        except OSError as error:
            where, self._path = self._path.parent, None
            log.warning("%s: cannot be written (%s); the run goes on without it", where, error.strerror)


class NoTensorBoard:
    """TensorBoard switched off."""

    def add(self, group: str, row: Row) -> None:
        pass


def scalars(row: Row) -> list[tuple[str, float]]:
    """Returns (name, value) of every finite number in a row but `step`, nested names joined by a slash."""
    found = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            found += [(f"{name}/{inner}", number) for inner, number in scalars(dict(value))]
        elif name != "step" and value is not None and math.isfinite(value):
            found.append((name, float(value)))
    return found


def open_record(config: MetricsConfig, run: RunDirectory, resumed: int = 0) -> Record | NoRecord:
    """Returns where this process's rows go. resumed: the step that was restored, 0 at the start."""
    if not is_primary():
        return NoRecord()
    return Record(run, TensorBoard(run, resumed) if config.tensorboard else NoTensorBoard())
