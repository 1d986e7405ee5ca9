"""Reports a stalled step and its cause in the log."""

import collections
import logging
import statistics
import time
from collections.abc import Callable, Mapping

import jax

from jaxthru.training.metrics import Row

log = logging.getLogger("jaxthru")

FACTOR, EXCESS = 1.5, 0.2
"""A step is stalled that takes so many times the median, and so many seconds more: small steps on a busy CPU
differ by more than the factor."""
RECENT, FEWEST = 64, 8
"""Steps that the median is of, and how many there are before any is judged."""
QUIET = 60.0
"""Seconds after a line before the next: what stalls all the time is told once a minute, and counted."""

CAUSES = {
    "data_wait_seconds": "waiting for data (data.loaders)",
    "checkpoint_seconds": "saving a checkpoint (checkpoint.every)",
    "host_gap_seconds": "the device had no work, for the host was late with it",
}
"""A part of a step's time, booked by `StepTimer` -> what it says, and the settings that move it."""

Memory = Callable[[], Mapping[str, int] | None]
"""Returns what `jax.Device.memory_stats` does."""


def memory_here() -> Mapping[str, int] | None:
    """Returns the memory statistics of this process's first device."""
    return jax.local_devices()[0].memory_stats()


class Stalls:
    """Compares each step with those before it, and logs one that is stalled. A sink of the record."""

    def __init__(self, memory: Memory = memory_here, clock: Callable[[], float] = time.monotonic):
        self._memory, self._clock = memory, clock
        self._recent: collections.deque[Row] = collections.deque(maxlen=RECENT)
        self._said, self._unsaid = -QUIET, 0

    def step(self, row: Row) -> None:
        """Takes the row of a step."""
        asked = len(self._recent) >= FEWEST and row["step_seconds"] > EXCESS  # else none is; a median costs
        usual = self._usual("step_seconds") if asked else None
        self._recent.append(row)
        if usual is None or row["step_seconds"] <= max(FACTOR * usual, usual + EXCESS):
            return
        if self._clock() - self._said < QUIET:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last such line)" * bool(self._unsaid)
        self._said, self._unsaid = self._clock(), 0
        took = f"step {row['step']} took {row['step_seconds']:.2f} s, the median is {usual:.2f} s"
        log.warning("stalled: %s: %s%s", took, self._cause(row, row["step_seconds"] - usual), more)

    def evaluation(self, row: Row) -> None:
        """Takes the row of an evaluation."""

    def _usual(self, part: str) -> float:
        return statistics.median(row[part] or 0.0 for row in self._recent)

    def _cause(self, row: Row, excess: float) -> str:
        longer = {part: (row[part] or 0.0) - self._usual(part) for part in CAUSES}
        part = max(longer, key=longer.__getitem__)
        if longer[part] >= excess / 2:
            return f"{longer[part]:.2f} s of it {CAUSES[part]}"
        return f"on the device, {self._of_memory()}"

    def _of_memory(self) -> str:
        """Returns how full the device's memory is: a step that finds no room in one piece waits for it."""
        stats = self._memory() or {}
        if not (limit := stats.get("bytes_limit")):
            return "whose memory is unknown: its clock, or another program on it"
        peak, used = stats.get("peak_bytes_in_use", 0), stats.get("bytes_in_use", 0)
        said = f"whose memory is {peak / limit:.0%} full at its peak"
        free, largest = limit - used, stats.get("largest_free_block_bytes")
        if largest is not None and largest < free / 2:
            said += f", with {largest / 2**30:.1f} GiB in one piece of the {free / 2**30:.1f} that are free"
        full = "no room in one piece: offload.level, remat.policy"
        return f"{said}: {full if peak > 0.92 * limit else 'its clock, or another program on it'}"
