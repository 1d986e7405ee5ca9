"""The sink of TensorBoard's event files."""

import logging
import math
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from jaxthru.training.metrics import Row
from jaxthru.training.run_directory import RunDirectory

log = logging.getLogger(__name__)


class TensorBoard:
    """Event files in `tensorboard/`: `train/loss`, `train/loss_by_source/prose`, `eval/loss`, a list's
    numbers as `train/expert_load/0`, ...

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

    def step(self, row: Row) -> None:
        self._add("train", row)

    def evaluation(self, row: Row) -> None:
        self._add("eval", row)

    def _add(self, group: str, row: Row) -> None:
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


def scalars(row: Row) -> list[tuple[str, float]]:
    """Returns (name, value) of every finite number in a row but `step`, nested names joined by a slash. A
    table of numbers is no curve, and has none."""
    found = []
    for name, value in row.items():
        if isinstance(value, list) and any(isinstance(each, list) for each in value):
            continue
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            found += [(f"{name}/{inner}", number) for inner, number in scalars(dict(value))]
        elif name != "step" and isinstance(value, int | float) and math.isfinite(value):
            found.append((name, float(value)))
    return found
