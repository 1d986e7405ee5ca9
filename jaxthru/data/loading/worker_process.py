"""A token worker as the training process sees it: starts it, gives it tasks, reads results, ends it.

The worker's own end is `worker.py`. Tokens come back through memory that has no name in any file
system: when the processes are gone, so is it.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from jaxthru.data.sources.transforms import Transform
from jaxthru.data.store.text_store import DOCUMENT_TOKENS, TextSplit
from jaxthru.data.store.tokenizer_folder import Borders

TASK_TOKENS = 1 << 18
"""Tokens in a task, if chunks allow: some tenths of a second of a worker's work."""
REGION_TOKENS = DOCUMENT_TOKENS + TASK_TOKENS
"""Tokens that a task can have at most. The memory is taken only as far as it is used."""
DEPTH = 2
"""Tasks that a worker has at once: the next one is there when it has done one."""


@dataclasses.dataclass(eq=False)
class Task:
    """Chunks whose tokens are wanted. lengths: how many each has. tries: workers that died at it."""

    number: int
    source: str
    split: TextSplit
    transform: Transform
    chunks: np.ndarray
    lengths: np.ndarray
    future: concurrent.futures.Future
    tries: int = 0

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def __str__(self) -> str:
        return f"chunks {self.chunks[0]} to {self.chunks[-1]} of {self.split.split}"


class WorkerProcess:
    """The process, the socket to it, and the memory that it writes tokens to.

    tokenizer: the path of its tokenizer.json. borders: what its documents begin and end with. hear: is called
    with this in a thread of its own, to receive answers and to start the process anew. regions: int32, each
    the memory for the tokens of one task.
    in_flight: {number of a task: (the task, its region)}, those that the process has, in the order in which
    it has got them. free: regions of no task. deaths: since it last answered.
    """

    def __init__(
        self, number: int, tokenizer: Path, borders: Borders, hear: Callable[["WorkerProcess"], None]
    ):
        self.number, self.tokenizer, self.borders, self.deaths = number, tokenizer, borders, 0
        size = DEPTH * REGION_TOKENS * 4
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("jaxthru-tokens")
        else:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._file)
            os.ftruncate(self._file, size)
            memory = mmap.mmap(self._file, size)
            self.regions = np.frombuffer(memory, np.int32).reshape(DEPTH, REGION_TOKENS)
            self.start()
            undo.callback(self._end)
            threading.Thread(target=hear, args=(self,), daemon=True).start()
            undo.pop_all()

    def start(self) -> None:
        """Starts the process, anew if there was one."""
        self.in_flight: dict[int, tuple[Task, int]] = {}
        self.free = list(range(DEPTH))
        own, other = socket.socketpair()
        self._socket = Connection(own.detach())
        # What this process has imported, the other is to find: not what the working directory may have first.
        program = [sys.executable, "-P", "-m", "jaxthru.data.loading.worker"]
        borders = json.dumps(self.borders)
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        with other, blocked(signal.SIGINT, signal.SIGTERM):
            self.process = subprocess.Popen(
                [*program, str(other.fileno()), str(self._file), str(self.tokenizer), borders],
                pass_fds=(other.fileno(), self._file),
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": paths},
            )

    def give(self, task: Task) -> None:
        """Sends a task to the process.

        The chunks go by way of the memory for the tokens: a socket holds so much, and while one that is
        full waits for a busy worker, the lock of the pool would be held.
        """
        region = self.free.pop()
        self.in_flight[task.number] = task, region
        split, count = task.split, len(task.chunks)
        self.regions[region].view(np.int64)[:count] = task.chunks
        transform = task.transform.name, task.transform.folder
        message = task.number, str(split.folder), split.split, transform, count, region * REGION_TOKENS
        with contextlib.suppress(OSError):  # it has died: the thread that hears of it sees to the task
            self._socket.send_bytes(json.dumps(message).encode())

    def receive(self) -> tuple[int, float, str | None] | None:
        """Waits for an answer: (number of the task, seconds, error). None if the process has ended."""
        try:
            number, seconds, error = json.loads(self._socket.recv_bytes())
        except (EOFError, OSError):
            return None
        return number, seconds, error

    def wait(self) -> int:
        """Waits for the process and returns its exit code: its end of the socket is closed."""
        try:
            return self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def close(self) -> None:
        """Ends the process, and with it the thread that hears of it, which is not waited for: the interpreter
        may collect garbage, and so close a pool, in that very thread."""
        self._end()
        os.close(self._file)

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()


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
