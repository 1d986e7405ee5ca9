"""How long the host of each process keeps the others waiting in a step, and which is the slowest."""

import statistics
from collections.abc import Mapping
from typing import Any

SLOWEST_FIELDS = ("slowest_process", "slowest_process_seconds", "median_process_seconds")
"""What a row of metrics says of the processes of a run, if there are several."""


class HostSeconds:
    """Seconds of a step in which this process's host did not wait for its devices, as a mean of late."""

    def __init__(self):
        self._seconds, self._steps, self._mean = 0.0, 0, ""

    def note(self, seconds: float) -> None:
        """Takes those of a step."""
        self._seconds, self._steps = self._seconds + seconds, self._steps + 1

    def mean(self) -> str:
        """Returns the mean since it was last asked for, or the one before if no step has ended since, as
        text; empty before the first."""
        seconds, steps = self._seconds, self._steps
        self._seconds, self._steps = 0.0, 0
        self._mean = f"{seconds / steps:.6f}" if steps else self._mean
        return self._mean


def slowest(seconds: Mapping[int, float]) -> dict[str, Any]:
    """Returns SLOWEST_FIELDS of the processes that have said their means; None without any."""
    slow = max(seconds, key=seconds.__getitem__, default=None)
    median = statistics.median_low(seconds.values()) if seconds else None
    return dict(zip(SLOWEST_FIELDS, (slow, seconds.get(slow), median), strict=True))
