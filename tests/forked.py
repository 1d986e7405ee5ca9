"""Starts `python -m jaxthru.train`, or a script, without their imports: those take half of a short run.

For each environment one process makes them, and forks for each run; it has used no device by then. What is
forked differs in two things: no SIGTERM comes while modules are imported, and Python's seed of hashes is that
of all who are forked from the same process. So tests of those do without.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

LATE = ("XLA_FLAGS", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""What no module reads while it is imported: each run is told of its own."""


class Process:
    """A forked run, with what tests use of `subprocess.Popen`. `stdout` has both its outputs."""

    def __init__(self, output: int, said: int):
        self.stdout, self._said = os.fdopen(output), os.fdopen(said)
        self.pid = int(self._said.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, of a signal its number below 0; None while the process runs."""
        if self.returncode is None and select.select([self._said], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code once the process has ended. Raises TimeoutError after so many seconds."""
        if self.returncode is None:
            if not select.select([self._said], [], [], timeout)[0]:
                raise TimeoutError(f"process {self.pid} has not ended after {timeout} s")
            with self._said:
                self.returncode = int(self._said.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Does nothing once the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 600) -> tuple[str, None]:
        """Returns what is still to come of the output. Kills a process that takes longer, which its exit code
        then says."""
        late = threading.Timer(timeout, self.kill)
        late.start()
        with self.stdout:
            output = self.stdout.read()
        late.cancel()
        self.wait()
        return output, None


class Server:
    """The process that forks, with this environment, until it is closed; what it has forked goes on."""

    def __init__(self, environment: Mapping[str, str]):
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            nowhere = subprocess.DEVNULL  # what is not a terminal is written in blocks, as a pipe is
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdout=nowhere
            )

    def start(self, script: str, arguments: Sequence[str], late: Mapping[str, str]) -> Process:
        """Starts the command or a script, with arguments and variables of `LATE`."""
        pipes = [os.pipe(), os.pipe()]
        message = json.dumps([script, arguments, late]).encode()
        socket.send_fds(self._control, [message], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        return Process(*(read for read, _ in pipes))

    def close(self) -> None:
        self._control.close()
        self._process.wait()


_latest: dict[frozenset, Server] = {}  # those of a file of tests are few, and each holds a third of a GiB


@atexit.register
def close(keep: int = 0) -> None:
    """Ends the oldest of the processes that fork."""
    while len(_latest) > keep:
        _latest.pop(next(iter(_latest))).close()


def start(arguments: Sequence[str], environment: Mapping[str, str], script: str = "") -> Process:
    """Starts the command, or else a script, with arguments and an environment."""
    late = {name: environment[name] for name in LATE if name in environment}
    shared = {
        name: value for name, value in environment.items() if name not in (*LATE, "PYTEST_CURRENT_TEST")
    }
    key = frozenset(shared.items())
    if key not in _latest:
        close(keep=1)
        _latest[key] = Server(shared)
    return _latest[key].start(script, arguments, late)


def serve(control: socket.socket) -> None:
    """Forks for each message: what a run is told, and where its output goes and what is said of it."""
    import grain  # noqa: F401 - the command does when it needs it

    import jaxthru.train  # noqa: F401

    gc.freeze()  # no collection writes to what forks share
    # The other thread is that of NumPy's library, which stops it for a fork.
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
    while True:
        message, descriptors, *_ = socket.recv_fds(control, 1 << 20, 2)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # of runs that have ended
                pass
        if not message:  # closed
            return
        if not os.fork():
            control.close()
            if not (run := os.fork()):
                become(*json.loads(message), *descriptors)
            os.close(descriptors[0])
            os.write(descriptors[1], b"%d\n" % run)
            _, how = os.waitpid(run, 0)
            os.write(descriptors[1], b"%d\n" % os.waitstatus_to_exitcode(how))
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def become(script: str, arguments: list[str], late: dict[str, str], output: int, said: int) -> NoReturn:
    """Does what `python -m jaxthru.train` or `python -u script` does once it has imported."""
    from jaxthru import train
    from jaxthru.runtime import termination

    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.close(said)
    os.environ.update(late)
    sys.argv = [script or train.__file__, *arguments]
    if script:
        sys.path[0] = str(Path(script).parent)
        sys.stdout.reconfigure(write_through=True)
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    termination.handle()
    train.start()


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # as with -m there, and not this folder
    serve(socket.socket(fileno=int(sys.argv[1])))
