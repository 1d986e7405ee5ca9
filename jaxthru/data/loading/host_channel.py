"""Messages between a training process and the data server of its host, and who starts the server.

They meet at an abstract Unix socket, whose name the processes of a run agree on. To bind that name is what
makes a process the one that starts the server: the kernel gives it to one, and frees it when nobody holds it
any more, however they ended. A message is JSON, which runs nothing, and may have memory with it: a file
without a name, handed over as a descriptor. When the processes are gone, nothing is left behind.
"""

import contextlib
import errno
import hashlib
import json
import logging
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from jaxthru.data.loading.worker_handle import blocked
from jaxthru.data.loading.worker_process import import_paths
from jaxthru.runtime.errors import InputError, require

log = logging.getLogger("jaxthru")

Arrays = Mapping[str, np.ndarray]
Message = tuple[dict[str, Any], dict[str, np.ndarray]]
"""What is said, JSON values, and the arrays that come with it."""

BACKLOG = 4096
"""Processes, or threads of such, that may wait to be heard at once: the system's own limit is the same."""
PAUSE_SECONDS = 0.01
"""Between two looks whether a server that another process starts is there."""
STDERR = 2
NOWHERE = "-"
BOOT, NAMESPACES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns")


def meeting_place() -> str:
    """Returns a text without spaces that is the same in two processes that can share a data server: of one
    user, who sees the same files and sockets; NOWHERE where a system has no abstract sockets."""
    if sys.platform != "linux" or not BOOT.is_file() or not NAMESPACES.is_dir():
        return NOWHERE
    parts = [BOOT.read_text().strip(), str(os.getuid())]
    parts += [str((NAMESPACES / name).readlink()) for name in ("net", "mnt", "user")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class SharedBlock(mmap.mmap):
    """Memory that other processes can be given: a file without a name. file: its descriptor. left: whether
    one of them has it for good."""

    file: int
    left: bool = False

    def __new__(cls, size: int) -> "SharedBlock":
        """size: in bytes, not 0."""
        file = os.memfd_create("jaxthru-batch")
        try:
            os.ftruncate(file, size)
            block = super().__new__(cls, file, size)
        except BaseException:
            os.close(file)
            raise
        block.file = file
        weakref.finalize(block, os.close, file)
        return block


def send(connection: Connection, message: Mapping[str, Any], arrays: Arrays | None = None) -> None:
    """Sends a message, with copies of arrays. Raises OSError if the other end is closed."""
    arrays = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
    begins = np.cumsum([0, *(-(-array.nbytes // 64) * 64 for array in arrays.values())]).tolist()
    size, places = begins.pop(), dict(zip(arrays, begins, strict=True))
    block = SharedBlock(size) if size else None
    for name, array in arrays.items():
        if not array.size:
            continue
        np.frombuffer(block, array.dtype, array.size, places[name])[:] = array.reshape(-1)
    send_block(connection, message, arrays, places, block)


def send_block(
    connection: Connection,
    message: Mapping[str, Any],
    arrays: Arrays,
    places: Mapping[str, int],
    block: SharedBlock | None,
) -> None:
    """Sends a message with arrays that lie in a block, as they are. places: of each, in bytes from the
    block's begin; block: None for arrays that are empty, all of them."""
    about = {name: (array.dtype.str, array.shape, places[name]) for name, array in arrays.items()}
    said = {"message": message, "arrays": about, "bytes": len(block) if block else 0}
    connection.send_bytes(json.dumps(said).encode())
    if block:
        reduction.send_handle(connection, block.file, None)


def receive(connection: Connection, release: Any = None) -> Message:
    """Waits for a message. Its arrays are read-only, and views of memory that the sender may go on to use.

    release: is called with the message once no array, view or transfer refers to this memory. Raises EOFError
    or OSError if the other end is closed.
    """
    said = json.loads(connection.recv_bytes())
    message, about, size = said["message"], said["arrays"], said["bytes"]
    if not size:
        arrays = {name: np.zeros(shape, np.dtype(dtype)) for name, (dtype, shape, _) in about.items()}
        return message, arrays
    file = reduction.recv_handle(connection)
    try:
        # All pages at once: one by one, each would be a fault.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        memory = mmap.mmap(file, size, flags, mmap.PROT_READ)
    finally:
        os.close(file)
    # Whatever is made of this array refers to it: so it lives as long as the memory is in use.
    whole = np.frombuffer(memory, np.uint8)
    if release:
        weakref.finalize(whole, release, message).atexit = False
    arrays = {}
    for name, (dtype, shape, begin) in about.items():
        end = begin + int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        arrays[name] = whole[begin:end].view(dtype).reshape(shape)
    return message, arrays


def connect(name: str) -> Connection:
    """Returns a connection to the data server of that name, which is started if there is none. Raises
    InputError if it cannot be."""
    while (connection := _connected(name) or _start(name)) is None:
        time.sleep(PAUSE_SECONDS)  # another process is about to listen
    return connection


def hang_up(connection: Connection) -> None:
    """Ends a connection at both ends, also for a thread that waits at it, and still has to close it."""
    with (
        contextlib.suppress(OSError),  # the other end was first
        socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end,
    ):
        end.shutdown(socket.SHUT_RDWR)


def check_user(connection: Connection) -> None:
    """Raises InputError unless the other end is of this process's own user: abstract sockets have no owner
    that would keep others away."""
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        told = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", told)
    require(user == os.getuid(), f"the data server of this host is of another user, {user}")


def _connected(name: str) -> Connection | None:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.connect(f"\0{name}")
    except ConnectionRefusedError:  # nobody has the name, or does not listen yet
        end.close()
        return None
    except OSError:
        end.close()
        raise
    connection = Connection(end.detach())
    try:
        check_user(connection)
    except InputError:
        connection.close()
        raise
    return connection


def _start(name: str) -> Connection | None:
    """Starts the data server of that name. Returns a connection to it, None if another process does it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(f"\0{name}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return None
        listener.listen(BACKLOG)
        # It ends when nobody is connected any more: so this process is, before it can look.
        connection = _connected(name)
        program = [sys.executable, "-P", "-m", "jaxthru.data.loading.host_server", str(listener.fileno())]
        try:
            with blocked(signal.SIGINT, signal.SIGTERM):  # which ask it for a stop: see `worker_handle`
                server = subprocess.Popen(
                    program,
                    pass_fds=(listener.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=STDERR,  # who reads what this process says is not to wait for the server's end
                    env=os.environ | {"PYTHONPATH": import_paths()},
                )
        except OSError as error:
            raise InputError(f"the data server of this host cannot be started: {error}") from error
    # It may outlive this process, or end before it: then it is to be no zombie.
    threading.Thread(target=_see_end, args=(server,), daemon=True).start()
    return connection


def _see_end(server: subprocess.Popen) -> None:
    if code := server.wait():
        told = "the data server of this host ended with code %d: another is started, and asked again"
        log.warning(told, code)
