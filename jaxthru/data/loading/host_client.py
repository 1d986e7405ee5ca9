"""A training process asks the data server of its host, and starts it anew where it has died."""

import collections
import contextlib
import dataclasses
import threading
import uuid
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from jaxthru.data.loading.dataset import DataConfig
from jaxthru.data.loading.host_channel import Arrays, Message, connect, hang_up, receive, send
from jaxthru.runtime.errors import InputError, TrainingError, require

TRIES = 5
"""A request that ends the server, or has none that answers, so often is given up."""
CLOSED = "the data of this run is closed"


class Host(NamedTuple):
    """What the trainers of a host have agreed on. name: of their server. trainers: how many they are. cores:
    that they may use, all of them together."""

    name: str
    trainers: int
    cores: Sequence[int]


class Client:
    """Asks the data server, from any thread, and starts it anew where it has died. Close it.

    A request is a function of what is asked and of nothing before, so it is asked again of the next server;
    what a server has to know first, as a run's plan, is told to each.
    """

    def __init__(self, host: Host, config: DataConfig, keys: Mapping[str, str], kept: Path | None):
        self._name, self._closed, self._server = host.name, False, None
        self._open = {
            "config": dataclasses.asdict(config),
            "keys": dict(keys),
            "kept": str(kept) if kept else None,
            "cores": list(host.cores),
            "trainers": host.trainers,
            "trainer": uuid.uuid4().hex,
        }
        self._idle, self._connections = list[Connection](), set[Connection]()  # and all of them
        self._lock = threading.Lock()  # of both
        self._released = collections.deque[int]()  # a garbage collection may add to it, at any time
        self._told: dict[str, tuple[dict, Arrays]] = {}
        self._telling = threading.Lock()

    def ask(self, what: str, arrays: Arrays | None = None, /, **about: Any) -> Message:
        """Returns the answer to a request. Raises InputError, and TrainingError where the server fails."""
        tries = 0
        while tries < TRIES:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            # One that was idle may be of a server that died meanwhile, which says nothing about this request.
            tries += connection is None
            try:
                connection = connection or self._connect()
                answer = self._exchange(connection, what, about, arrays)
            except (EOFError, ConnectionError):  # the server has died
                self._drop(connection)
                require(not self._closed, CLOSED)
                continue
            except BaseException:
                self._drop(connection)
                raise
            with self._lock:
                self._idle.append(connection)
            if self._closed:  # meanwhile
                self.close()
            return _checked(answer)
        raise TrainingError(f"the data server of this host ended {TRIES} times at one request ({what})")

    def tell(self, topic: str, what: str, arrays: Arrays | None = None, /, **about: Any) -> dict[str, Any]:
        """Has this server, and each that takes its place, know something. topic: what was
        said of it before is replaced. Returns the answer."""
        with self._telling:
            self._told[topic] = {"ask": what} | about, arrays or {}
        message, _ = self.ask(what, arrays, **about)
        return message

    def close(self) -> None:
        """Ends the connections: who waits gets an InputError. The server ends with its last trainer."""
        self._closed = True
        with self._lock:
            idle, self._idle = self._idle, []
            for connection in self._connections:
                hang_up(connection)
        for connection in idle:
            self._drop(connection)

    def _drop(self, connection: Connection | None) -> None:
        if connection:
            with self._lock:
                self._connections.discard(connection)
                connection.close()

    def _connect(self) -> Connection:
        connection = connect(self._name)
        try:
            with self._lock:
                self._connections.add(connection)
            require(not self._closed, CLOSED)
            answer, _ = _checked(self._exchange(connection, "open", self._open, None))
            with self._telling:
                if answer["server"] != self._server:
                    for message, arrays in self._told.values():
                        what = {key: value for key, value in message.items() if key != "ask"}
                        _checked(self._exchange(connection, message["ask"], what, arrays))
                    self._server = answer["server"]
        except BaseException:
            self._drop(connection)
            raise
        return connection

    def _exchange(self, connection: Connection, what: str, about: dict, arrays: Arrays | None) -> Message:
        released = []
        with contextlib.suppress(IndexError):  # other threads take from it, too
            while True:
                released.append(self._released.popleft())
        send(connection, {"ask": what, "released": released} | about, arrays)
        return receive(connection, self._release)

    def _release(self, message: dict[str, Any]) -> None:
        if "number" in message:
            self._released.append(message["number"])


def _checked(answer: Message) -> Message:
    message, _ = answer
    if "error" in message:
        raise (InputError if message["input"] else TrainingError)(message["error"])
    return answer
