"""The pool of token workers: which process tokenises which source, and recovery when one dies.

After OVERLORD (MegaScale-Data, arXiv:2504.09844): work on samples is taken out of the training process, and
each source is opened by the few processes that serve it, not by every worker of every rank. Which those are
follows what each source costs, measured, and what the coming steps want of it.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np

from jaxthru.data.loading import ray_workers
from jaxthru.data.loading.ray_workers import RayWorkers
from jaxthru.data.loading.worker_handle import (
    DEPTH,
    REGION_TOKENS,
    TASK_TOKENS,
    Answer,
    Ended,
    Task,
    WorkerHandle,
)
from jaxthru.data.loading.worker_process import WorkerProcesses
from jaxthru.data.sources.transforms import Transform
from jaxthru.data.store.text_store import TextSplit
from jaxthru.data.store.tokenizer_folder import UNSAID, Borders
from jaxthru.runtime.errors import InputError, require

log = logging.getLogger("jaxthru")

TRIES = 3
"""A task that ends its worker so often is given up."""
LOST = 10
"""And one that was lost with its machine so often: chance does not do that, but a task that ends it may."""
FIRST_GUESS = 1e-6
"""Seconds a token takes, until it is measured."""

Backend = Literal["processes", "ray"]
"""What runs token workers: processes of this machine, or the actors of a Ray cluster."""


def check_backend(backend: Backend) -> None:
    """Raises InputError, which names what is missing, if token workers cannot be run so."""
    if backend == "ray":
        ray_workers.check()


class TokenWorkers(contextlib.AbstractContextManager):
    """A pool of `processes` token workers for these sources. Close it, or use it as a context manager.

    tokenizer: the path of its tokenizer.json. transforms: of the sources that have one, as the mix says.
    borders: what the tokenizer's documents begin and end with. backend: what runs the workers; the tokens are
    the same.
    """

    def __init__(
        self,
        processes: int,
        sources: tuple[str, ...],
        tokenizer: Path,
        transforms: Mapping[str, Transform] = MappingProxyType({}),
        borders: Borders = UNSAID,
        backend: Backend = "processes",
    ):
        require(processes >= 1, f"data.loaders = {processes}: must be at least 1")
        self.sources, self.tokenizer, self.transforms = sources, tokenizer, transforms
        self.borders = borders
        self.seconds_per_token = dict.fromkeys(sources, FIRST_GUESS)
        self.restarts = 0
        self._waiting = {source: collections.deque() for source in sources}
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._ended = ""  # why nothing can be asked for any more
        self._coming = dict.fromkeys(sources, 1.0)
        self._processes, self._workers = processes, []  # started when they are first needed
        self.backend, self._runs = backend, None
        self.serves = share_out(self._coming, processes)

    def request(self, source: str, split: TextSplit, chunks: np.ndarray) -> "Tokens":
        """Returns what will be the tokens, int32, of chunks (int64 [n]) one after the other."""
        lengths = split.lengths(chunks)
        parts = []
        with self._lock:
            if not (self._workers or self._ended):
                self._start()
            require(not self._ended, self._ended)
            for part in _cut(lengths):
                future = concurrent.futures.Future()
                transform = self.transforms.get(source, Transform())
                of_part = chunks[part], lengths[part]
                task = Task(next(self._numbers), source, split, transform, *of_part, future)
                if task.tokens > REGION_TOKENS:
                    raise InputError(f"source {source}: a document of {task.tokens:,} tokens in one chunk")
                self._waiting[source].append(task)
                parts.append(future)
            self._dispatch()
        return Tokens(parts)

    def expect(self, tokens: dict[str, float]) -> None:
        """Moves workers to where they will be needed. tokens: that each source gives in the coming steps."""
        with self._lock:
            for source in self.sources:
                waiting = sum(task.tokens for task in self._waiting[source])
                self._coming[source] = (tokens.get(source, 0) + waiting) * self.seconds_per_token[source]
            self.serves = share_out(self._coming, self._processes)
            self._dispatch()

    def close(self) -> None:
        """Ends the workers. Whoever still waits for tokens gets an InputError."""
        with self._lock:
            self._fail("the token workers are closed")
            workers, self._workers = self._workers, []
            runs, self._runs = self._runs, None
        for worker in workers:
            worker.close()
        if runs:
            runs.close()

    def __exit__(self, *exception) -> None:
        self.close()

    def _start(self) -> None:
        number = 0
        try:
            if self.backend == "ray":
                self._runs = RayWorkers(self._processes, self.tokenizer, self.borders)
            else:
                self._runs = WorkerProcesses(self.tokenizer, self.borders)
            for number in range(self._processes):
                self._workers.append(self._runs.worker(number, self._hear))
        except (OSError, RuntimeError) as error:  # no process, memory, file or thread is to be had
            self._fail(f"token worker {number} of {self._processes} cannot be started: {error}")

    def _dispatch(self) -> None:
        """Gives workers what they may take, those with nothing to do first."""
        if self._ended:
            return
        idle = [worker for worker in self._workers if len(worker.free) == DEPTH]
        idle = [worker for worker in idle if not self._take(worker, self.serves[worker.number])]
        # One that finds nothing of its own helps others. It opens a store for that; but the memory of one is
        # small, and a GPU that waits is dear.
        for worker in idle:
            self._take(worker, self.sources)
        for worker in self._workers:
            while worker.free and self._take(worker, self.serves[worker.number]):
                pass

    def _take(self, worker: WorkerHandle, sources: Iterable[str]) -> bool:
        """Gives a worker the oldest task of these sources, and returns whether there was one."""
        able = [self._waiting[source] for source in sources if self._waiting[source]]
        if able:
            worker.give(min(able, key=lambda tasks: tasks[0].number).popleft())
        return bool(able)

    def _done(self, worker: WorkerHandle, answer: Answer) -> None:
        number, seconds, error = answer
        with self._lock:
            if self._ended:
                return
            task, region = worker.in_flight[number]
            tokens = worker.regions[region, : task.tokens].copy()
            del worker.in_flight[number]  # not before its tokens are here: who waits is told if that fails
            worker.deaths = 0
            if error is None:
                took = seconds / max(task.tokens, 1)
                self.seconds_per_token[task.source] += 0.2 * (took - self.seconds_per_token[task.source])
                task.future.set_result(tokens)
            else:
                task.future.set_exception(InputError(f"source {task.source}: {error}"))
            worker.free.append(region)
            self._dispatch()

    def _fail(self, message: str) -> None:
        """Has everything that is wanted, and all that will be, fail with this message."""
        with self._lock:
            if self._ended:
                return
            self._ended = message
            waiting = [task for tasks in self._waiting.values() for task in tasks]
            running = [task for worker in self._workers for task, _ in worker.in_flight.values()]
            for task in (*waiting, *running):
                task.future.set_exception(InputError(message))
            for tasks in self._waiting.values():
                tasks.clear()

    def _died(self, worker: WorkerHandle, ended: Ended) -> None:
        """Starts a worker anew and has its tasks done again, the oldest first."""
        with self._lock:
            if self._ended:
                return
            tasks = [task for task, _ in worker.in_flight.values()]
            self.restarts += 1
            worker.deaths += ended.blamed
            if ended.final:
                self._fail(ended.why)
                return
            if worker.deaths >= TRIES:
                message = f"a token worker {ended.why} {TRIES} times without doing anything"
                if tasks:  # it takes them in this order
                    message += f"; it had to begin with source {tasks[0].source}: {tasks[0]}"
                self._fail(message)
                return
            told = "token worker %d %s: started again, %d tasks repeated"
            log.log(
                logging.DEBUG if ended.told else logging.WARNING, told, worker.number, ended.why, len(tasks)
            )
            worker.in_flight.clear()
            if tasks:
                tasks[0].tries += ended.blamed
                tasks[0].lost += not ended.blamed
            for task in sorted(tasks, key=lambda task: task.number, reverse=True):
                if task.tries < TRIES and task.lost < LOST:
                    self._waiting[task.source].appendleft(task)
                    continue
                times = TRIES if task.tries >= TRIES else LOST
                message = f"source {task.source}: a token worker {ended.why} {times} times at {task}"
                task.future.set_exception(InputError(message))
            worker.start()  # last, for it may fail: then everything that waits does
            self._dispatch()

    def _hear(self, worker: WorkerHandle) -> None:
        """Hears of a worker, in a thread of its own, until nothing can be asked for any more."""
        try:
            while not self._ended:
                said = worker.receive()
                (self._died if isinstance(said, Ended) else self._done)(worker, said)
        except InputError as error:
            self._fail(str(error))
        except Exception as error:  # whatever it is: if this thread just ended, others would wait for ever
            self._fail(f"token worker {worker.number} cannot go on: {type(error).__name__}: {error}")


class Tokens:
    """The results of several futures as one array."""

    def __init__(self, parts: list[concurrent.futures.Future]):
        self._parts = parts

    def result(self) -> np.ndarray:
        """Waits for all. Raises what one of them raised."""
        return np.concatenate([part.result() for part in self._parts])


def share_out(demand: dict[str, float], workers: int) -> list[list[str]]:
    """Returns which sources each worker serves.

    The sources are laid end to end, each as long as its demand in seconds, and the line is cut into equal
    parts, one a worker. So a heavy source has several workers, light ones share one, and no more than
    sources + workers - 1 pairs exist. A source without demand still has a worker.
    """
    names = list(demand)
    ends = np.cumsum([demand[name] for name in names], dtype=float)
    scale = workers / ends[-1] if ends[-1] > 0 else 0.0
    serves: list[list[str]] = [[] for _ in range(workers)]
    begin = 0.0
    for name, end in zip(names, ends * scale, strict=True):
        first = min(int(begin), workers - 1)
        # An end that falls on a border belongs to the part before it.
        last = min(max(int(np.ceil(end - 1e-9)) - 1, first), workers - 1)
        for worker in range(first, last + 1):
            serves[worker].append(name)
        begin = float(end)
    return serves


def _cut(lengths: np.ndarray) -> list[slice]:
    """Returns the chunks in runs of about TASK_TOKENS tokens."""
    ends = np.cumsum(lengths)
    task = (ends - lengths) // TASK_TOKENS
    borders = [0, *(np.flatnonzero(np.diff(task)) + 1).tolist(), len(lengths)]
    return [slice(*pair) for pair in itertools.pairwise(borders) if pair[0] < pair[1]]
