"""A token worker that is a process of this machine: starts it, reads its results, ends it.

The worker's own end is `worker.py`.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from jaxthru.data.loading.worker_handle import Answer, Ended, TokenMemory, WorkerHandle, blocked
from jaxthru.data.store.tokenizer_folder import Borders


class WorkerProcesses:
    """The backend `processes` of the pool: each worker a process. tokenizer: the path of its tokenizer.json.
    borders: what its documents begin and end with."""

    def __init__(self, tokenizer: Path, borders: Borders):
        self.tokenizer, self.borders = tokenizer, borders

    def worker(self, number: int, hear: Callable[[WorkerHandle], None]) -> "WorkerProcess":
        """Starts a worker, which a thread of its own hears. Raises OSError or RuntimeError."""
        return WorkerProcess(number, self.tokenizer, self.borders, hear)

    def close(self) -> None:
        """There is nothing but the workers."""


class WorkerProcess(WorkerHandle):
    """The process, with memory of its own. hear: see `WorkerHandle.heard_by`."""

    def __init__(self, number: int, tokenizer: Path, borders: Borders, hear: Callable[[WorkerHandle], None]):
        self.tokenizer, self.borders = tokenizer, borders
        self._memory = TokenMemory(1)
        with contextlib.ExitStack() as undo:
            undo.callback(self._memory.close)
            super().__init__(number, self._memory.regions[0])
            self.start()
            undo.callback(self._end)
            self.heard_by(hear)
            undo.pop_all()

    def _connect(self) -> Connection:
        own, other = socket.socketpair()
        mine = Connection(own.detach())
        # What this process has imported, the other is to find: not what the working directory may have first.
        program = [sys.executable, "-P", "-m", "jaxthru.data.loading.worker"]
        borders, file = json.dumps(self.borders), self._memory.file
        with other, blocked(signal.SIGINT, signal.SIGTERM):
            self.process = subprocess.Popen(
                [*program, str(other.fileno()), str(file), str(self.tokenizer), borders],
                pass_fds=(other.fileno(), file),
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": import_paths()},
            )
        return mine

    def receive(self) -> Answer | Ended:
        try:
            return Answer(*json.loads(self._socket.recv_bytes()))
        except (EOFError, OSError):
            return Ended(f"ended with code {wait_for(self.process)}")

    def close(self) -> None:
        self._end()
        self._memory.close()

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()


def import_paths() -> str:
    """Returns where this process imports from, as PYTHONPATH."""
    return os.pathsep.join(path or str(Path.cwd()) for path in sys.path)


def wait_for(process: subprocess.Popen) -> int:
    """Waits for a process whose end of a socket is closed, and returns its exit code."""
    try:
        return process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
