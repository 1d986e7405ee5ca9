"""A sign of life that needs no interpreter: bytes that the kernel sends for a process, unless it is stopped.

Heartbeats come from a thread of Python's. None comes while a call into C keeps the interpreter's lock, say as
a page of a mapped file comes late from a network's disk; and yet the process is well. So each process has a
thread within one call of `send` that lasts for hours. Its bytes fill the sockets' buffers and stay there,
until process 0 misses heartbeats and reads: from a process that lives more of them come.
"""

import contextlib
import math
import mmap
import socket
import threading

BUFFER = 1 << 14
"""Bytes, about, that are on the way before somebody reads."""
BLOCK = 1 << 30
"""Bytes of one call of `send`, all of the same page of zeros."""
WAIT_SECONDS = 5.0


def begin(host: str, port: int, process: int) -> None:
    """Has this process's sign of life go to process 0, if that can be reached."""
    threading.Thread(target=_send, args=(host, port, process), name="pulse", daemon=True).start()


def _send(host: str, port: int, process: int) -> None:
    with (
        contextlib.suppress(OSError),  # without it there are the heartbeats alone
        socket.create_connection((host, port), timeout=WAIT_SECONDS) as to,
    ):
        to.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        to.settimeout(None)
        to.sendall(process.to_bytes(4))
        zeros = mmap.mmap(-1, BLOCK, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)  # takes no memory
        while True:
            to.send(zeros)


class Pulses:
    """Where process 0 gets the others' signs of life. port: that they send to."""

    def __init__(self):
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=both)
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)  # of those that connect
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._sockets: dict[int, socket.socket] = {}
        self._silent: dict[int, int] = {}

    def silent(self, process: int) -> float:
        """Reads from a process; returns how often in a row there has been nothing, infinity if it is not
        connected, or no more. The first time there are bytes that it may have sent long ago."""
        self._accept()
        if (one := self._sockets.get(process)) is None:
            return math.inf
        found = self._read(one)
        if found is None:
            self._sockets.pop(process).close()
            return math.inf
        self._silent[process] = 0 if found else self._silent.get(process, 0) + 1
        return self._silent[process]

    def close(self) -> None:
        """Closes all sockets."""
        for one in (self._server, *self._sockets.values()):
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # BlockingIOError, once nobody waits
            while True:
                one, _ = self._server.accept()
                try:
                    one.settimeout(WAIT_SECONDS / 10)
                    process = int.from_bytes(one.recv(4))
                    one.setblocking(False)
                    self._sockets[process] = one
                except OSError:  # a stranger's, that says nothing
                    one.close()

    @staticmethod
    def _read(one: socket.socket) -> int | None:
        """Returns how many bytes there were, None if there can be no more."""
        found = 0
        try:
            while found < 64 * BUFFER:
                if not (received := len(one.recv(BUFFER))):
                    return None
                found += received
        except BlockingIOError:
            pass
        except OSError:
            return None
        return found
