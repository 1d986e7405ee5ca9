"""The energy of steps: what the devices of all processes count while steps run."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import jax

from jaxthru.runtime import distributed, nvml

PUBLISHED = "jaxthru/energy/"
EVERY = 0.5
"""The least seconds between two looks at what other processes have counted."""

Counter = Callable[[], float | None]
"""Returns joules since some moment, None where they are not counted."""


class Notices(Protocol):
    """What processes let each other know."""

    def publish(self, text: str) -> None:
        """Takes the place of what this process published before."""

    def others(self) -> Mapping[int, str]:
        """Returns what each other process published last, by process."""


def counter_here() -> Counter | None:
    """Returns the counter of this process's GPUs; None where there are none, or one does not count."""
    own = jax.local_devices()
    library = nvml.nvml() if own[0].platform == "gpu" else None
    if library is None:
        return None
    handles = [nvml.handle(library, name) for name in nvml.names(each.local_hardware_id for each in own)]
    if len(handles) < len(own) or None in handles or nvml.energy(library, handles) is None:
        return None
    return lambda: nvml.energy(library, handles)


class StepEnergy:
    """Adds up what is counted from the begin of a step to its end, in all processes.

    Of other processes it is what they have published by then, so that a step may get some of the joules of
    the one before; the sum is not moved by that. Ask it by a thread that the loop does not wait for.
    """

    def __init__(self, counter: Counter | None, notices: Notices | None = None):
        """notices: of the processes of the job, None if this is the only one."""
        self._counter, self._notices = counter, notices
        self._own, self._begun, self._taken = 0.0, None, 0.0
        self._known = counter is not None
        self._others: dict[int, float | None] = {}
        self._looked = -EVERY
        self._lock = threading.Lock()

    @classmethod
    def here(cls) -> "StepEnergy":
        """Returns that of this process and its job."""
        several = jax.process_count() > 1
        return cls(counter_here(), distributed.Notices(PUBLISHED) if several else None)

    def begin(self) -> None:
        """Begins a step now: what was counted until now belongs to none."""
        with self._lock:
            self._begun = self._counter() if self._known else None

    def end(self) -> float | None:
        """Returns the joules of the step that ends now, of all processes, and begins the next."""
        with self._lock:
            self._count()
            if self._notices is not None:
                self._exchange()
            sums = [self._own if self._known else None, *self._others.values()]
            if None in sums:
                return None
            taken, self._taken = self._taken, sum(sums)
            return self._taken - taken

    def _count(self) -> None:
        now = self._counter() if self._known else None
        if now is not None and self._begun is not None:
            self._own += now - self._begun
        else:
            self._known = False  # it counted, and does so no more: the sum is lost
        self._begun = now

    def _exchange(self) -> None:
        now = time.monotonic()
        if now - self._looked < EVERY:
            return
        self._looked = now
        try:
            self._notices.publish(repr(self._own) if self._known else "")
            if distributed.is_primary():
                found = self._notices.others()
                self._others = {process: float(text) if text else None for process, text in found.items()}
        except jax.errors.JaxRuntimeError:  # the coordinator is lost: for the loop to find, not for this
            self._known = False
