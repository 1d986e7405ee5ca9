"""A token worker as the pool sees it: its memory, its tasks and its answers, wherever it runs."""

import abc
import concurrent.futures
import contextlib
import dataclasses
import json
import mmap
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from jaxthru.data.sources.transforms import Transform
from jaxthru.data.store.text_store import DOCUMENT_TOKENS, TextSplit

TASK_TOKENS = 1 << 18
"""Tokens in a task, if chunks allow: some tenths of a second of a worker's work."""
REGION_TOKENS = DOCUMENT_TOKENS + TASK_TOKENS
"""Tokens that a task can have at most. The memory is taken only as far as it is used."""
DEPTH = 2
"""Tasks that a worker has at once: the next one is there when it has done one."""


@dataclasses.dataclass(eq=False)
class Task:
    """Chunks whose tokens are wanted. lengths: how many each has. tries: workers that died at it. lost: how
    often it was the first of what was lost with a machine."""

    number: int
    source: str
    split: TextSplit
    transform: Transform
    chunks: np.ndarray
    lengths: np.ndarray
    future: concurrent.futures.Future
    tries: int = 0
    lost: int = 0

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def __str__(self) -> str:
        return f"chunks {self.chunks[0]} to {self.chunks[-1]} of {self.split.split}"


class Answer(NamedTuple):
    """What a worker says of a task: its number, the seconds that it took, and what went wrong."""

    number: int
    seconds: float
    error: str | None


class Ended(NamedTuple):
    """A worker ended. why: "ended with code 1". blamed: it was the worker alone, so that the task that it had
    begun may be why; else the machine went, or what runs the workers. final: there is no use in another.
    told: the log has it, or will."""

    why: str
    blamed: bool = True
    final: bool = False
    told: bool = False


class TokenMemory:
    """Memory for the tokens of `workers` workers, which has no name in any file system: when the processes
    that have it are gone, so is it. file: its descriptor. regions: int32 [workers, DEPTH, REGION_TOKENS], a
    region for the tokens of one task."""

    def __init__(self, workers: int):
        size = workers * DEPTH * REGION_TOKENS * 4
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("jaxthru-tokens")
        else:
            with tempfile.TemporaryFile() as file:
                self.file = os.dup(file.fileno())
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            os.ftruncate(self.file, size)
            memory = mmap.mmap(self.file, size)
            self.regions = np.frombuffer(memory, np.int32).reshape(workers, DEPTH, REGION_TOKENS)
            undo.pop_all()

    def close(self) -> None:
        os.close(self.file)


class WorkerHandle(abc.ABC):
    """A worker, the socket to it, and the memory that it writes tokens to.

    regions: int32 [DEPTH, REGION_TOKENS]. first: where they begin in the memory that the worker has, in
    tokens. in_flight: {number of a task: (the task, its region)}, those that the worker has, in the order in
    which it has got them. free: regions of no task. deaths: that are its own, since it last answered.
    """

    def __init__(self, number: int, regions: np.ndarray, first: int = 0):
        self.number, self.regions, self.first, self.deaths = number, regions, first, 0
        self.in_flight: dict[int, tuple[Task, int]] = {}
        self.free = list(range(DEPTH))
        self._socket: Connection | None = None

    def start(self) -> None:
        """Starts the worker, anew if there was one. Raises OSError, RuntimeError or InputError."""
        self.in_flight, self.free = {}, list(range(DEPTH))
        self._socket = self._connect()

    def heard_by(self, hear: Callable[["WorkerHandle"], None]) -> None:
        """Has a thread of its own call `hear` with this: to receive answers, and to start the worker anew."""
        threading.Thread(target=hear, args=(self,), daemon=True).start()

    def give(self, task: Task) -> None:
        """Sends a task to the worker.

        The chunks go by way of the memory for the tokens: a socket holds so much, and while one that is
        full waits for a busy worker, the lock of the pool would be held.
        """
        region = self.free.pop()
        self.in_flight[task.number] = task, region
        split, count = task.split, len(task.chunks)
        self.regions[region].view(np.int64)[:count] = task.chunks
        transform = task.transform.name, task.transform.folder
        place = self.first + region * REGION_TOKENS
        self._send((task.number, str(split.folder), split.split, transform, count, place))

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # it has died: the thread that hears of it sees to the task
            self._socket.send_bytes(json.dumps(message).encode())

    @abc.abstractmethod
    def _connect(self) -> Connection:
        """Starts the worker and returns the socket to it."""

    @abc.abstractmethod
    def receive(self) -> Answer | Ended:
        """Waits for an answer, or for the worker's end."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the worker, and with it the thread that hears of it, which is not waited for: the interpreter
        may collect garbage, and so close a pool, in that very thread."""


@contextlib.contextmanager
def blocked(*signals: signal.Signals) -> Iterator[None]:
    """Keeps signals from this thread, and from processes that it starts until they ask for them.

    A terminal's Ctrl-C and Slurm's SIGTERM reach every process of a run, and ask it for a stop in good order,
    to which the workers still work. A mask is inherited, so there is no moment at which they would end one.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
