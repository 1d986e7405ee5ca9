"""Token workers as actors of a Ray cluster, for the cores of other machines: the backend `ray` of the pool.

Ray ends a process that uses it when the node of that process dies, or the cluster's head. So the process that
trains uses none: the driver, as Ray calls what asks for actors, is a process of its own, `ray_driver.py`. It
is started again when it ends. Without RAY_ADDRESS it brings a cluster of this machine with it.
"""

import contextlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from jaxthru.data.loading.worker_handle import Answer, Ended, TokenMemory, WorkerHandle, blocked
from jaxthru.data.loading.worker_process import import_paths
from jaxthru.data.store.tokenizer_folder import Borders
from jaxthru.runtime.errors import InputError, require

log = logging.getLogger("jaxthru")

DRIVER = "jaxthru.data.loading.ray_driver"
ADDRESS = "RAY_ADDRESS"
"""The variable that names a cluster, as for Ray's own commands: host:port of its head."""
STARTS = 5
"""A driver that is started so often without an answer from any worker is given up."""
LOST = "lost"
"""The file in which a driver says why it ends itself."""
FOLDER_LENGTH = 14
"""Characters of the folder of temporary files that leave room below it for the names of Ray's sockets: their
paths may have 103. Many a scheduler's TMPDIR is longer."""
LOG_BYTES = 4096
"""Of the end of a driver's log, in which its last words are."""
OWN_CLUSTER = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5", "RAY_memory_monitor_refresh_ms": "0"}
"""Ray's settings for a cluster of this machine. Its head does not come back, so it is not waited for; and
an actor is not ended because the process that trains, beside it, has filled the host's memory."""


def check() -> None:
    """Raises InputError if Ray is not installed, or RAY_ADDRESS names no cluster that answers."""
    here = importlib.util.find_spec("ray") is not None
    require(here, 'data.workers = ray: needs Ray; pip install "jaxthru[ray]", or data.workers=processes')
    if address := os.environ.get(ADDRESS):
        host, port = address_of(address)
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            what = f"{ADDRESS} = {address}: no Ray cluster answers there ({error.strerror or error})"
            raise InputError(f"{what}; start one, or unset {ADDRESS} for one of this machine") from error


def address_of(address: str) -> tuple[str, int]:
    """Returns the host and port of a RAY_ADDRESS. Raises InputError."""
    host, _, port = address.rpartition(":")
    said = f"{ADDRESS} = {address!r}: must be HOST:PORT of the head of a cluster whose node this machine is"
    require(bool(host) and "/" not in host and port.isdecimal(), said)
    return host.strip("[]"), int(port)


class RayWorkers:
    """The driver as the training process sees it: `workers` sockets to it, one a worker, and one memory.

    tokenizer: the path of its tokenizer.json. borders: what its documents begin and end with.
    """

    def __init__(self, workers: int, tokenizer: Path, borders: Borders):
        self.address = os.environ.get(ADDRESS)
        self.tokenizer, self.borders = str(Path(tokenizer).absolute()), borders
        self.memory = TokenMemory(workers)
        # Ray keeps its sockets and logs there, and where a cluster of this machine is found.
        short = len(tempfile.gettempdir()) <= FOLDER_LENGTH
        self.folder = Path(tempfile.mkdtemp(prefix="jaxthru-ray-", dir=None if short else "/tmp"))
        self.starts = 0  # since a worker last answered
        self.process: subprocess.Popen | None = None
        self._sockets: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    def worker(self, number: int, hear: Callable[[WorkerHandle], None]) -> "RayWorker":
        """Starts a worker, which a thread of its own hears. Raises OSError or RuntimeError."""
        worker = RayWorker(number, self)
        worker.heard_by(hear)
        return worker

    def connect(self, number: int) -> tuple[subprocess.Popen, Connection]:
        """Returns the driver, started anew if it has ended, and the socket for a worker. Raises OSError or
        RuntimeError, and InputError when it has ended too often."""
        with self._lock:
            require(not self._closed, "the token workers are closed")
            if self.process is None or self.process.returncode is not None:
                self._start()
            return self.process, self._sockets[number]

    def _start(self) -> None:
        if self.starts:
            tries = f"Ray's driver ended {STARTS} times before any token worker had done anything"
            require(self.starts < STARTS, lambda: f"{tries}{self.last_words()}")
            told = "Ray's driver ended with code %s%s: started again, and all token workers with it"
            why = self.folder / LOST
            log.warning(told, self.process.returncode, f" ({why.read_text()})" if why.exists() else "")
            why.unlink(missing_ok=True)
        self.starts += 1
        pairs = [socket.socketpair() for _ in range(len(self.memory.regions))]
        self._sockets = [Connection(own.detach()) for own, _ in pairs]
        theirs = [other.fileno() for _, other in pairs]
        told = {
            "sockets": theirs,
            "memory": self.memory.file,
            "address": self.address,
            "tokenizer": self.tokenizer,
            "borders": self.borders,
            "folder": str(self.folder),
        }
        # Ray's chatter, and that of its processes, is kept out of the run's output.
        own = {} if self.address else OWN_CLUSTER | {"RAY_TMPDIR": str(self.folder)}
        settings = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": import_paths()} | own
        program = [sys.executable, "-P", "-m", DRIVER, json.dumps(told)]
        try:
            with (self.folder / "driver.log").open("wb") as output, blocked(signal.SIGINT, signal.SIGTERM):
                self.process = subprocess.Popen(
                    program,
                    pass_fds=(*theirs, self.memory.file),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=os.environ | settings,
                    start_new_session=True,  # so that it can be ended with all that it has started
                )
        finally:
            for _, other in pairs:
                other.close()

    def end(self, process: subprocess.Popen) -> int:
        """Ends a driver that closes its sockets, and what it has left, and returns its exit code."""
        with self._lock:
            return end_session(process)

    def last_words(self) -> str:
        """Returns `: ...`, the last line of the driver's log, or nothing."""
        try:
            with (self.folder / "driver.log").open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - LOG_BYTES, 0))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        said = [line.strip() for line in lines if line.strip()]
        return f": {said[-1]}" if said else ""

    def close(self) -> None:
        """Ends the driver, with a cluster that it has started, and the actors."""
        with self._lock:
            self._closed = True
            if self.process:
                end_session(self.process)
        self.memory.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class RayWorker(WorkerHandle):
    """An actor. Its tasks and answers go through the driver, which says when it ends."""

    def __init__(self, number: int, driver: RayWorkers):
        self.driver = driver
        regions = driver.memory.regions
        super().__init__(number, regions[number], first=number * regions[number].size)
        self.start()

    def _connect(self) -> Connection:
        self._process, self._socket = self.driver.connect(self.number)
        self._send(None)  # starts an actor
        return self._socket

    def receive(self) -> Answer | Ended:
        try:
            number, *said = json.loads(self._socket.recv_bytes())
        except (EOFError, OSError):
            code = self.driver.end(self._process)
            why = f"was lost with Ray's driver, which ended with code {code}"
            return Ended(why, blamed=False, told=True)
        if number is None:
            return Ended(*said)
        self.driver.starts = 1
        return Answer(number, *said)

    def close(self) -> None:
        """It ends with the driver."""


def end_session(process: subprocess.Popen) -> int:
    """Ends a process that leads a session, or what it has left, and returns its exit code.

    A cluster of this machine has processes that outlive a killed driver for a minute. They are of its process
    group, whose number is nobody else's until the driver is waited for: that is done here alone.
    """
    if process.returncode is None:
        with contextlib.suppress(OSError):  # a system may refuse where nothing is left
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
