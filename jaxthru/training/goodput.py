"""Goodput: which share of a run's wall time trained, over all of its starts, and what the rest went to.

goodput.jsonl has one object an event, and is only ever added to:

    start   a process has taken the run up. step: that it goes on from. ended: when the start before was last
            seen alive, None for the first. lost: seconds of steps made before that are made again, by the
            start (from 0) that had made them. time: when the process began
    NAME    so many `seconds` of a category ended at `time`
    stop    the loop was left in order, or by an error: `reason`

`time` is seconds since 1970. What the steps took stands in metrics.jsonl, of which a resumed run cuts those
that it makes again: `lost` is what was cut. The categories are those of Google's ml-goodput-measurement.
"""

import bisect
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.distributed import is_primary
from jaxthru.training.rows import Row, every
from jaxthru.training.start import StartTimes

FILE, PICTURE = "goodput.jsonl", "goodput.svg"
LEAST = 1e-3
"""Seconds of what is an event."""

PRODUCTIVE = "productive"
INITIALIZATION = "tpu_initialization"
PREPARATION = "training_prep"
STARTUP = "program_startup"
DATA = "data_loading_sync"
SAVE = "unproductive_checkpoint_save_time"
RESTORE = "unproductive_checkpoint_restore_time"
WASTED = "wasted_progress_from_disruption"
RECOVERY = "infrastructure_recovery_from_disruption"
EVALUATION, PLACEMENT, PROFILE, SKIPPED = (
    f"custom_badput_events.{name}" for name in ("evaluation", "expert_placement", "profile", "skipped")
)
OTHER = "other"
CATEGORIES = {
    PRODUCTIVE: "steps that count",
    INITIALIZATION: "starting Python and the devices",
    PREPARATION: "preparing data and the first state",
    STARTUP: "compiling",
    DATA: "waiting for data",
    SAVE: "saving checkpoints",
    RESTORE: "restoring a checkpoint",
    WASTED: "steps made again after a restart",
    RECOVERY: "between an end and the next start",
    EVALUATION: "evaluating",
    PLACEMENT: "placing experts",
    PROFILE: "profiling",
    SKIPPED: "updates skipped as not finite",
    OTHER: "not accounted for",
}
"""Category -> what it is, in words."""
PARTS = {"python": INITIALIZATION, "data": PREPARATION, "compile": STARTUP}
"""A part of a start, as `StartTimes` notes it -> its category; `state` is one of two."""


def open_goodput(folder: Path, step: int, times: StartTimes) -> "GoodputLog":
    """Returns the log of this start of a run, which goes on from a step. Its rows behind that are there
    still."""
    sizes = {"processes": jax.process_count(), "devices": jax.device_count()}
    return GoodputLog(folder, step, times.parts, times.began, writes=is_primary(), **sizes)


class GoodputLog(contextlib.AbstractContextManager):
    """Writes the events of one start. A context manager around the loop; only process 0's writes."""

    def __init__(
        self,
        folder: Path,
        step: int,
        parts: Mapping[str, float],
        began: float,
        *,
        writes: bool = True,
        processes: int = 1,
        devices: int = 1,
    ):
        """folder: the run directory, whose rows behind `step` have not been cut yet. step: that the run goes
        on from. parts: seconds of each part of the start so far. began: time.monotonic() when it began."""
        self._path, self._writes, self._ready = folder / FILE, writes, time.monotonic()
        if not writes:
            return
        before = read(folder)
        now = time.time()
        ended, lost = last_seen(folder, before), before.seconds_behind(step)
        start = min(now, max(ended or 0.0, now - (time.monotonic() - began)))
        self._write(
            "start", at=start, step=step, processes=processes, devices=devices, ended=ended, lost=lost
        )
        for part, seconds in parts.items():
            category = PARTS.get(part) or (RESTORE if step else PREPARATION)
            self._write(category, seconds=seconds)

    def ready(self) -> None:
        """Says that the loop begins."""
        self._spent(PREPARATION, self._ready)

    @contextlib.contextmanager
    def spending(self, category: str) -> Iterator[None]:
        """Books what happens within, which is no part of a step's own time."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._spent(category, began)

    def _spent(self, category: str, began: float) -> None:
        if (seconds := time.monotonic() - began) >= LEAST:
            self._write(category, seconds=seconds)

    def __exit__(self, kind, error, trace) -> None:
        self._write("stop", reason="ended" if kind is None else kind.__name__)
        if self._writes:
            from jaxthru.training.goodput_picture import picture

            # Of a full disk, say: the run has ended well without.
            with contextlib.suppress(ValueError, OSError):
                write_atomically(self._path.with_name(PICTURE), picture(account(self._path.parent)))

    def _write(self, event: str, at: float | None = None, **more: Any) -> None:
        if not self._writes:
            return
        line = json.dumps({"time": round(at or time.time(), 3), "event": event, **_rounded(more)}) + "\n"
        with contextlib.suppress(OSError), self._path.open("ab+") as file:  # no run ends for want of this
            # What a kill or a full disk has torn is a line of its own.
            torn = file.tell() and (file.seek(-1, 2), file.read(1))[1] != b"\n"
            file.write((b"\n" if torn else b"") + line.encode())


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values with seconds to the millisecond."""
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}


@dataclasses.dataclass
class Start:
    """One start of a run. began, ended: seconds since 1970. step: that it went on from. reason: of its end,
    None if it was not left in order. seconds: by category, of what was booked."""

    began: float
    step: int
    processes: int = 1
    devices: int = 1
    ended: float | None = None
    reason: str | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, category: str, seconds: float) -> None:
        """Books seconds of a category."""
        self.seconds[category] = self.seconds.get(category, 0.0) + seconds


@dataclasses.dataclass(frozen=True)
class Events:
    """What goodput.jsonl and metrics.jsonl say: the starts, and the rows of steps that were not made
    again."""

    starts: list[Start]
    rows: list[Row]

    def seconds_behind(self, step: int) -> dict[str, float]:
        """Returns the seconds of the steps behind a step, by the start that made them."""
        found: dict[str, float] = {}
        owner = owners(self.starts)
        for row in self.rows:
            if row["step"] > step and self.starts:
                start = str(owner(row["step"]))
                found[start] = round(found.get(start, 0.0) + _own(row), 3)
        return found


def _own(row: Row) -> float:
    """Returns the seconds of a step without its checkpoint, which is an event of its own."""
    return max(0.0, (row.get("step_seconds") or 0.0) - (row.get("checkpoint_seconds") or 0.0))


def read(folder: Path) -> Events:
    """Returns what a run directory says of its starts. Lines that are torn, or say nothing that is known
    here, are passed over."""
    starts: list[Start] = []
    for line in _lines(folder / FILE):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            _take(json.loads(line), starts)
    first = min((start.step for start in starts), default=0)  # a run may be older than its account
    return Events(starts, [row for row in every(folder / "metrics.jsonl") if row["step"] > first])


def _take(event: dict[str, Any], starts: list[Start]) -> None:
    """Books an event. Raises KeyError, TypeError or ValueError for one that is damaged."""
    name, at = event["event"], float(event["time"])
    if name == "start":
        ended = event["ended"]
        if starts and ended is not None:
            starts[-1].ended = max(starts[-1].began, float(ended))
        for index, seconds in event["lost"].items():
            starts[int(index)].add(WASTED, float(seconds)) if int(index) < len(starts) else None
        counts = int(event["step"]), int(event["processes"]), int(event["devices"])
        starts.append(Start(at, *counts, ended=at))
    elif starts and name == "stop":
        starts[-1].ended, starts[-1].reason = at, str(event["reason"])
    elif starts and name in CATEGORIES:
        starts[-1].add(name, float(event["seconds"]))
        starts[-1].ended = max(at, starts[-1].ended or at)


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")
    except OSError:
        return []


def last_seen(folder: Path, events: Events) -> float | None:
    """Returns when the last start was last seen alive, None if there was none."""
    if not events.starts:
        return None
    last = events.starts[-1]
    if last.reason is not None:
        return last.ended
    with contextlib.suppress(OSError):
        return max(last.ended or last.began, (folder / "metrics.jsonl").stat().st_mtime)
    return last.ended


@dataclasses.dataclass(frozen=True)
class Account:
    """Where the wall time of a run went. starts: each with all of its seconds, by category. seconds: of all,
    by category, in the order of CATEGORIES. steps: that count."""

    starts: tuple[Start, ...]
    seconds: Mapping[str, float]
    steps: int

    @property
    def wall(self) -> float:
        """Returns the seconds from the first start to the last end."""
        return self.starts[-1].ended - self.starts[0].began

    @property
    def goodput(self) -> float:
        """Returns the share of the wall time that went to steps that count."""
        return self.seconds.get(PRODUCTIVE, 0.0) / self.wall if self.wall > 0 else 0.0

    @property
    def failures(self) -> int:
        """Returns how often the run was started again before it had ended."""
        return len(self.starts) - 1

    def _repr_svg_(self) -> str:
        from jaxthru.training.goodput_picture import picture

        return picture(self)

    def shares(self, least: float = 0.0) -> list[tuple[str, float]]:
        """Returns (category, share of the wall time) of those with this share at least."""
        found = [(name, seconds / self.wall) for name, seconds in self.seconds.items() if self.wall > 0]
        return [(name, share) for name, share in found if abs(share) >= least]


def account(folder: Path) -> Account:
    """Returns the account of a run directory. Raises ValueError before its first start."""
    events = read(folder)
    starts = [dataclasses.replace(start, seconds=dict(start.seconds)) for start in events.starts]
    if not starts:
        raise ValueError(f"{folder}: holds no goodput.jsonl with a start")
    starts[-1].ended = last_seen(folder, events)
    owner, skipped = owners(starts), 0
    for row in events.rows:
        start = starts[owner(row["step"])]
        counted = row.get("skipped_updates") or 0
        kept, skipped = counted <= skipped, counted
        waited = min(_own(row), row.get("data_wait_seconds") or 0.0)
        start.add(DATA, waited)
        start.add(PRODUCTIVE if kept else SKIPPED, _own(row) - waited)
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        rest = start.ended - start.began - sum(start.seconds.values())
        if rest < 0 and (twice := min(-rest, start.seconds.get(WASTED, 0.0))):
            # Killed as it took the run up, a start had told of what was lost, and had not cut it yet.
            start.add(WASTED, -twice)
            rest += twice
        start.add(OTHER, rest)
        if following:
            start.add(RECOVERY, max(0.0, following.began - start.ended))
    totals = {name: sum(start.seconds.get(name, 0.0) for start in starts) for name in CATEGORIES}
    seconds = {name: total for name, total in totals.items() if total}
    return Account(tuple(starts), seconds, len(events.rows))


def owners(starts: list[Start]) -> Callable[[int], int]:
    """Returns a function of a step that stands in metrics.jsonl: which start has made it, the last one that
    began before it."""
    steps: list[int] = []  # rising: a start that went back owns what those before it had made behind there
    indices: list[int] = []
    for index, start in enumerate(starts):
        while steps and steps[-1] >= start.step:
            steps.pop()
            indices.pop()
        steps.append(start.step)
        indices.append(index)
    return lambda step: indices[max(0, bisect.bisect_left(steps, step) - 1)]


def hours(seconds: float) -> str:
    """Returns a time in the unit that suits it."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
