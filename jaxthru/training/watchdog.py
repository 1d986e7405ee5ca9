"""Ends a run that hangs, and says where it hung."""

import contextlib
import faulthandler
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator

EXIT_CODE = 70
STDERR = 2


class Watchdog:
    """Watches that steps keep finishing. A context manager around the training loop.

    A step that takes more than `factor` times the median of recent steps and more than `at_least` seconds
    ends the process: one line and the stacks of all threads on stderr, exit code 70. A collective whose
    partner died hangs for ever; a scheduler restarts a process that exits. Until `FEW` steps have finished
    there is no median, and compilation takes its time: the limit is then `first` seconds.
    """

    FEW = 3
    RECENT = 50  # steps that the median is taken over

    def __init__(self, factor: float = 10.0, at_least: float = 60.0, first: float = 3600.0):
        self.factor, self.at_least, self.first = factor, at_least, first
        self._lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=self.RECENT)
        self._since = time.monotonic()
        self._whole = False  # whether all of the time since `_since` belongs to one step
        self._pauses = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._since = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()

    def beat(self) -> None:
        """Says that a step has finished."""
        now = time.monotonic()
        with self._lock:
            if self._whole:
                self._recent.append(now - self._since)
            self._since, self._whole = now, True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens within is no part of a step: evaluation, waiting for a checkpoint."""
        with self._lock:
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                self._since, self._whole = time.monotonic(), False

    def limit(self) -> float:
        """Returns how many seconds the present step may take."""
        if len(self._recent) < self.FEW:
            return self.first
        return max(self.at_least, self.factor * statistics.median(self._recent))

    def _watch(self) -> None:
        while not self._done.wait(min(1.0, self.at_least / 10)):
            with self._lock:
                waited, limit = time.monotonic() - self._since, self.limit()
                if self._pauses or waited <= limit:
                    continue
                seconds = statistics.median(self._recent) if self._recent else None
            self._end(waited, limit, seconds)

    def _end(self, waited: float, limit: float, median: float | None) -> None:
        usual = "none has yet" if median is None else f"the median is {median:.3g} s"
        line = (
            f"watchdog: no step has finished for {waited:.0f} s ({usual}, the limit {limit:.3g} s); "
            f"the stacks of all threads follow; exit code {EXIT_CODE}\n"
        )
        os.write(STDERR, line.encode())  # whatever hangs may hold sys.stderr's lock
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        os._exit(EXIT_CODE)
