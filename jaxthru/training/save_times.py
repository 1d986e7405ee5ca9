"""When to save, by steps or by time: at the same step in all processes, none of which waits for another."""

import time
from collections.abc import Callable

import jax

from jaxthru.runtime.distributed import Announcements
from jaxthru.training.checkpoint_config import Every, seconds


class SaveTimes:
    """Says after which steps to save. Every process asks after each step that it has dispatched, once.

    Of several processes, the clock of process 0 decides. It announces, AHEAD steps before, whether a step is
    one to save at and at which step all look again; between two looks nobody asks anybody. The looks come
    closer as the time does: half of the way to it each, APART steps at most, as steps may become slower.
    """

    # Why an announcement is there when it is looked for. Who asks about step s has dispatched s and read the
    # result of s - 1, a mean over all processes: process 0 has dispatched s - 1, and so has been through its
    # question about s - 2.
    AHEAD = 2
    APART = 64

    def __init__(
        self,
        every: Every,
        clock: Callable[[], float] = time.monotonic,
        announced: Announcements | None = None,
    ):
        """every: steps, or a time. announced: by process 0; None makes what all processes of the run see."""
        self._steps, self._seconds, self._clock = every, seconds(every), clock
        self._several = announced is not None or jax.process_count() > 1
        if self._seconds is not None and self._several:
            self._announced = announced or Announcements("jaxthru/save_at/")
        self.ago = 0.0
        """Seconds from the save before to the first step that is asked about."""
        self._due_at: float | None = None
        self._look = self._looks = 0

    def due(self, step: int) -> bool:
        """Says whether to save after a step."""
        if self._seconds is None:
            return self._steps > 0 and step % self._steps == 0
        if self._due_at is None:
            self._due_at = self._clock() + self._seconds - self.ago
            self._began, self._first, self._look = self._clock(), step, step + self.AHEAD
        if not self._several:
            if saves := self._clock() >= self._due_at:
                self._due_at = self._clock() + self._seconds
            return saves
        saves = 0
        if step == self._look:
            saves, self._look = (int(word) for word in self._announced.read(self._looks).split())
            self._looks += 1
        if self._announced.speaks and step == self._look - self.AHEAD:
            self._announced.publish(self._looks, self._decided(step))
        return bool(saves)

    def _decided(self, step: int) -> str:
        """Returns what to announce of the step to look at: whether to save, and when to look again."""
        now, made = self._clock(), step - self._first
        if not made:  # and so nothing is known of how long one takes
            return f"0 {self._look + self.AHEAD}"
        pace = max((now - self._began) / made, 1e-6)
        self._began, self._first = now, step
        then = now + self.AHEAD * pace
        if saves := then + pace / 2 >= self._due_at:
            self._due_at = then + self._seconds
        apart = min(max(int((self._due_at - then) / pace / 2), self.AHEAD), self.APART)
        return f"{int(saves)} {self._look + apart}"
