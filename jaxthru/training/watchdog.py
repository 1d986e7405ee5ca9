"""The watchdog: ends a run that hangs, and says where it hung."""

import contextlib
import ctypes
import faulthandler
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NoReturn

from jaxthru.runtime.exit_codes import HUNG
from jaxthru.runtime.posix_timer import PosixTimer

STDERR = 2


class Watchdog:
    """Watches that steps keep finishing. A context manager around the training loop.

    A step that takes more than `factor` times the median of recent steps and more than `at_least` seconds
    ends the process: one line and the stacks of all threads on stderr, exit code 70. A collective whose
    partner died hangs for ever; a scheduler restarts a process that exits. Until `FEW` steps have finished
    there is no median, and compilation takes its time: the limit is then `first` seconds. Where a call into C
    keeps the interpreter's lock, so that no thread of Python's runs, the `Backstop` ends the process the same
    way, `at_least` seconds later.
    """

    FEW = 3
    RECENT = 50  # steps that the median is taken over

    def __init__(
        self,
        factor: float = 10.0,
        at_least: float = 60.0,
        first: float = 3600.0,
        end: Callable[[int, str], NoReturn] = lambda code, why: os._exit(code),
    ):
        """end: ends the process with an exit code, and tells others why."""
        self._exit = end
        self.factor, self.at_least, self.first = factor, at_least, first
        self._lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=self.RECENT)
        self._since = time.monotonic()
        self._whole = False  # whether all of the time since `_since` belongs to one step
        self._pauses = 0
        self._backstop: Backstop | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._since, self._backstop = time.monotonic(), Backstop()
        self._put_off()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()
        self._backstop.close()
        self._backstop = None

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
            self._put_off()
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                self._since, self._whole = time.monotonic(), False
                self._put_off()

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
                    self._put_off()
                    continue
                seconds = statistics.median(self._recent) if self._recent else None
            self._end(waited, limit, seconds)

    def _put_off(self) -> None:
        """Says that Python's threads run. Not at each step: the watchdog's own runs if any does."""
        if self._backstop:
            self._backstop.put_off(self.at_least + (self.first if self._pauses else self.limit()))

    def _end(self, waited: float, limit: float, median: float | None) -> None:
        usual = "none has yet" if median is None else f"the median is {median:.3g} s"
        line = (
            f"watchdog: no step has finished for {waited:.0f} s ({usual}, the limit {limit:.3g} s); "
            f"the stacks of all threads follow; exit code {HUNG}\n"
        )
        os.write(STDERR, line.encode())  # whatever hangs may hold sys.stderr's lock
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        self._exit(HUNG, f"hangs: no step has finished for {waited:.0f} s")


class Backstop:
    """Ends a process in which no Python runs any more: once it is put off no longer.

    Two timers of the C library and a thread of `faulthandler`'s, none of which needs the interpreter, write a
    line and the stacks of all threads to stderr, and end the process with exit code 70. Without such timers,
    as on macOS, `faulthandler` does it alone: its own line, "Timeout", the stacks, and exit code 1, for it
    has no other.
    """

    STACKS, END = 0.5, 3.0  # seconds after the line

    def __init__(self):
        self._line = ctypes.create_string_buffer(250)
        try:
            self._say = PosixTimer("warnx", ctypes.addressof(self._line))
            self._end = PosixTimer("_exit", HUNG)
        except OSError:
            self._say = self._end = None
        # A forked child would wait at its end for faulthandler's thread, which it does not have.
        os.register_at_fork(before=faulthandler.cancel_dump_traceback_later)

    def close(self) -> None:
        """Ends nothing any more."""
        faulthandler.cancel_dump_traceback_later()
        for timer in filter(None, (self._say, self._end)):
            timer.close()

    def put_off(self, seconds: float) -> None:
        """Sets the end so many seconds from now. Takes about 50 µs."""
        if self._say and self._end:
            self._line.value = (
                f"watchdog: no Python has run for {seconds:.0f} s: a call into C keeps the interpreter's "
                f"lock; the stacks of all threads follow; exit code {HUNG}"
            ).encode()
            self._say.set(seconds)
            self._end.set(seconds + self.END)
        with contextlib.suppress(RuntimeError):  # no thread can be started now
            faulthandler.dump_traceback_later(seconds + self.STACKS, exit=self._end is None, file=STDERR)
