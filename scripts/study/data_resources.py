"""What the simulated data plane is made of: cores that are shared, token workers, and a barrier; in SimPy."""

from collections.abc import Generator

import simpy

Process = Generator[simpy.Event, object, object]
NO_QUANTUM = float("inf")


class Cores:
    """Cores of one machine. Work that finds others waiting goes on after them, each time a quantum is over,
    as under the scheduler of an operating system."""

    def __init__(self, environment: simpy.Environment, count: int, quantum: float = NO_QUANTUM):
        self._environment, self._quantum = environment, quantum
        self._free = simpy.Resource(environment, count)

    def work(self, seconds: float) -> Process:
        while seconds > 0:
            with self._free.request() as turn:
                yield turn
                part = min(seconds, self._quantum)
                yield self._environment.timeout(part)
            seconds -= part


class Worker:
    """A token worker: takes the tasks of a queue in their order, each for so many seconds of work.

    A task that it is killed at begins anew once it is there again: nothing of it is lost or kept.
    """

    def __init__(
        self,
        environment: simpy.Environment,
        queue: simpy.Store,
        cores: Cores | None,
        *,
        slow: float = 1.0,
        restart: float = 0.0,
    ):
        """cores: that it shares; None is one of its own."""
        self.busy = 0.0
        self._environment, self._queue, self._cores = environment, queue, cores
        self._slow, self._restart, self._at_work = slow, restart, False
        self._process = environment.process(self._serve())

    def kill(self) -> None:
        self._process.interrupt()

    def _serve(self) -> Process:
        task, asked = None, None
        while True:
            try:
                if task is None:
                    asked = asked or self._queue.get()
                    task, asked = (yield asked), None
                seconds, done = task
                if self._cores:
                    yield from self._cores.work(seconds * self._slow)
                else:
                    yield self._environment.timeout(seconds * self._slow)
                self.busy += seconds * self._slow
                task = None
                done.succeed()
            except simpy.Interrupt:
                yield self._environment.timeout(self._restart)


class Barrier:
    """Where `parties` wait for one another, again and again."""

    def __init__(self, environment: simpy.Environment, parties: int):
        self._environment, self._parties, self._there = environment, parties, 0
        self._open = environment.event()

    def wait(self) -> simpy.Event:
        self._there, opened = self._there + 1, self._open
        if self._there == self._parties:
            self._there, self._open = 0, self._environment.event()
            opened.succeed()
        return opened
