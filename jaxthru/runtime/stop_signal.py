"""Stopping a run in good order: SIGTERM and SIGINT end it after a whole step, the same in all processes."""

import os
import signal
import threading
import time
from collections.abc import Callable

import jax

from jaxthru.runtime import exit_codes, termination
from jaxthru.runtime.distributed import Announcements, key_value_store, try_get

STDERR = 2


class StopSignal:
    """Turns SIGTERM and SIGINT into a stop after a whole step, the same step in all processes.

    A context manager around the training loop, which asks `should_stop(step)` before it dispatches `step`.
    A second signal exits at once. Outside the main thread no handler can be installed; there the loop runs
    on until `request()`. number: the signal that stops the run, in all processes; None before.
    """

    # Why nobody has passed the published step. The loop reads the result of step n - 1 after it dispatched
    # step n, and that result needs all processes, as it is a mean over all. A process that asks about step s
    # has dispatched s - 1; the others can have read the result of s - 1, but not that of s; so they have
    # asked about s + 1 at most, and will read the store once more before they dispatch s + 2. Publishing
    # s + 2 would do; one more step is for a loop that reads later than ours. And so would any later step at
    # which all look: to ask the store costs the loop's thread 0.1 to 0.3 ms, which short steps do not have.
    AHEAD = 3

    SPAN = 64
    """Steps for which it is settled how many lie from a look to the next. In the first all look at each."""
    APART = 8
    """At most so many do: it divides SPAN, and is a power of two, as all of them are."""
    SECONDS = 1.0
    """They take no longer than this together, unless they become slower within a SPAN."""
    NOTICE = 2
    """Steps before a SPAN at which process 0 says how many do in it: as in `SaveTimes`, and AHEAD - 1."""

    SAME_SECONDS = 1.0
    """A signal that comes again within it is the same: Slurm's srun, a launcher and a terminal each hand on
    what has reached the whole group of processes already."""

    _made = 0  # the same in all processes, because they make their StopSignals in the same order

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        StopSignal._made += 1
        self._clock, self._first = clock, None
        self._apart = self._apart_before = 1  # steps from a look to the next, here and in the SPAN before
        self._key = f"jaxthru/stop_at/{StopSignal._made}"
        self._asked: signal.Signals | None = None
        self._asked_at = 0.0
        self._stop_at: int | None = None
        self.number: signal.Signals | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def request(self) -> None:
        """Asks for a stop, as SIGTERM does."""
        self._asked = signal.SIGTERM

    def should_stop(self, step: int) -> bool:
        """Says whether to stop instead of dispatching `step`. Every process must ask before each step."""
        if jax.process_count() == 1:
            self.number = self._asked
            return self._asked is not None
        if self._first is None:
            self._first, self._announced = step, Announcements("jaxthru/stop_looks/")
        made = step - self._first
        self._settle(made)
        if self._stop_at is None and (self._asked is not None or self._all_look(made)):
            self._agree(made)
        return self._stop_at is not None and step >= self._stop_at

    @property
    def exit_code(self) -> int:
        """Of a run that this has stopped."""
        return _exit_code(self.number)

    def _settle(self, made: int) -> None:
        """Takes over, as a SPAN begins, how many steps lie from a look to the next in it, which process 0
        decides by the time that steps take. made: steps asked about so far."""
        span, within = divmod(made, self.SPAN)
        if within == 0:
            apart = int(self._announced.read(span - 1)) if span else 1
            self._apart_before, self._apart = self._apart, apart
            self._began = self._clock()
        elif within == self.SPAN - self.NOTICE and self._announced.speaks:
            pace, apart = (self._clock() - self._began) / within, self.APART
            while apart > 1 and apart * pace > self.SECONDS:
                apart //= 2
            self._announced.publish(span, str(apart))

    def _all_look(self, made: int) -> bool:
        """Says whether all look at a step. In the first of a SPAN they also do as in the one before, in whose
        last steps it was not known at which they would."""
        apart = self._apart if made % self.SPAN >= self.APART else min(self._apart, self._apart_before)
        return made % apart == 0

    def _agree(self, made: int) -> None:
        """Takes over the step to stop at that the first process to ask for a stop has published, if any has,
        and the signal that it had."""
        if self._asked is not None:
            look = -(-(made + self.AHEAD) // self._apart) * self._apart
            try:
                said = f"{self._first + look} {int(self._asked)}"
                key_value_store().key_value_set(self._key, said)
            except jax.errors.JaxRuntimeError as error:
                if "ALREADY_EXISTS" not in str(error):  # another process was first; its step counts
                    raise
        if published := try_get(self._key):
            at, number = published.split()
            self._stop_at, self.number = int(at), signal.Signals(int(number))

    def _handle(self, number: int, frame) -> None:
        # os.write, because a handler may interrupt a print that holds the stream's lock.
        if self._asked is not None:
            if number == self._asked and time.monotonic() - self._asked_at < self.SAME_SECONDS:
                return
            os._exit(_exit_code(number))
        self._asked, self._asked_at = signal.Signals(number), time.monotonic()
        name = signal.Signals(number).name
        os.write(STDERR, f"\n{name}: stopping after this step; again to exit at once\n".encode())


def _exit_code(number: int | None) -> int:
    return exit_codes.INTERRUPTED if number == signal.SIGINT else termination.exit_code()
