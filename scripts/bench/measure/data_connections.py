"""What a word between two processes of the data plane takes, and a connection: over TCP, and on one host."""

import itertools
import multiprocessing
import os
import resource
import selectors
import socket
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def answering(connections: int, messages: int, size: int = 64) -> dict[str, float]:
    """Returns what a process takes to answer `messages` of some bytes each over TCP, with so many connections
    open, from all of which they come: CPU seconds of each, and bytes of each connection, this end's."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=asking, args=(listener.getsockname(), connections, messages, size, there)
    )
    process.start()
    before, selector = memory(), selectors.DefaultSelector()
    for _ in range(connections):
        end, _ = listener.accept()
        selector.register(end, selectors.EVENT_READ)
    after, answer, left = memory(), bytes(size), messages
    here.send(True)
    began = time.thread_time()
    while left:
        for key, _ in selector.select():
            if key.fileobj.recv(64):
                key.fileobj.sendall(answer)
                left -= 1
    took = time.thread_time() - began
    process.join()
    for key in list(selector.get_map().values()):
        key.fileobj.close()
    selector.close()
    listener.close()
    return {"seconds": took / messages, "bytes": max(after - before, 0) / connections}


def asking(place: tuple, connections: int, messages: int, size: int, told: Connection) -> None:
    """The other end: sends to each connection in turn, some at once."""
    ends = [socket.create_connection(place) for _ in range(connections)]
    told.recv()
    turns = itertools.islice(itertools.cycle(ends), messages)
    for some in itertools.batched(turns, min(32, connections)):
        for end in some:
            end.sendall(b"?" * 32)
        for end in some:
            left = size
            while left:
                left -= len(end.recv(min(left, 1 << 20)))


def memory() -> int:
    """Returns this process's private bytes and the kernel's of sockets."""
    import psutil

    kernel = sum(
        int(line.split()[-1]) * resource.getpagesize()
        for line in Path("/proc/net/sockstat").read_text().splitlines()
        if line.startswith("TCP:")
    )
    return psutil.Process().memory_full_info().uss + kernel


def over_tcp(tiny: bool) -> dict[str, Any]:
    """Returns {connections: CPU seconds to answer over one of them}, the bytes of one, and the CPU seconds of
    a byte."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
    counts = (1, 100) if tiny else (1, 100, 1280, 10_240)
    counts = [count for count in counts if count + 100 < limit[1]]
    found = {count: answering(count, 200 if tiny else 20_480) for count in counts}
    big = 1 << 20
    long = answering(1, 20 if tiny else 400, big)["seconds"]
    seconds = {count: round(each["seconds"], 9) for count, each in found.items()}
    return {
        "message": seconds,
        "connection_bytes": round(found[counts[-1]]["bytes"]),
        "byte": (long - seconds[1]) / big,
    }


def handing(turns: int) -> float:
    """Returns the seconds for a word and its answer between two processes of a host, over a Unix socket."""
    here, there = socket.socketpair()
    if not (child := os.fork()):
        here.close()  # or the other would never hear that it is
        try:
            while there.recv(64):
                there.sendall(b".")
        finally:
            os._exit(0)
    there.close()
    taken = []
    for _ in range(turns):
        began = time.perf_counter()
        here.sendall(b".")
        here.recv(64)
        taken.append(time.perf_counter() - began)
    here.close()
    os.waitpid(child, 0)
    return statistics.median(taken)
