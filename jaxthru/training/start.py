"""Start times: where the time before the first step went."""

import logging
import os
import time
from pathlib import Path

from jaxthru.runtime.notebook import in_notebook
from jaxthru.training.metrics import Row

log = logging.getLogger("jaxthru")


class StartTimes:
    """Notes how long each part of a start took, and says it in one line once the first step has ended. A sink
    of the record. began: time.monotonic() of the start. parts: the seconds of each so far."""

    _first = True

    def __init__(self):
        self._last = self.began = time.monotonic()
        self.parts: dict[str, float] = {}
        self._ended = False
        first, StartTimes._first = StartTimes._first, False
        # Python started for the first start alone. A notebook may have been open for days.
        if first and not in_notebook() and (age := process_seconds()) is not None:
            self.parts["python"], self.began = age, self.began - age

    def note(self, part: str) -> None:
        """Books the time since the last note."""
        now = time.monotonic()
        self.parts[part], self._last = now - self._last, now

    def step(self, row: Row) -> None:
        """Takes the row of a step: the first one ends the start."""
        if self._ended:
            return
        self._ended = True
        self.note("first step")
        parts = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in self.parts.items())
        log.info("start: %s; %.0f s in all", parts, self._last - self.began)

    def evaluation(self, row: Row) -> None:
        """Takes the row of an evaluation."""


def process_seconds() -> float | None:
    """Returns the age of this process, None where the system does not say."""
    stat, uptime = Path("/proc/self/stat"), Path("/proc/uptime")
    if not (stat.is_file() and uptime.is_file()):
        return None
    started = int(stat.read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(uptime.read_text().split()[0]) - started
