"""The data server of a host: the stores, the planner, the token workers and the batches of all its trainers.

    python -m jaxthru.data.loading.host_server SOCKET

After OVERLORD (MegaScale-Data, arXiv:2504.09844), whose data constructors serve all ranks of a host: what
training processes share is held once. One of them starts it with the socket that it listens at (see
`host_channel`); each asks through connections of its own (see `host_pool`), one for each of its threads. It
keeps nothing that could not be asked for again: when it is killed, a trainer starts another and asks again.
It ends when nobody is connected any more, so it outlives no run; SIGINT and SIGTERM, which it is started
without, do not end it.
"""

import collections
import concurrent.futures
import logging
import os
import select
import socket
import sys
import threading
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from jaxthru.data.loading.batch_builder import BatchBuilder
from jaxthru.data.loading.batch_memory import MOST, BatchMemory
from jaxthru.data.loading.dataset import Data, DataConfig, open_data
from jaxthru.data.loading.host_channel import Arrays, SharedBlock, check_user, receive, send, send_block
from jaxthru.data.loading.planned_batches import PlannedBatches
from jaxthru.data.loading.worker import outlast_signals
from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.mixture.schedule import Schedule
from jaxthru.runtime.command_line import log_to_stderr
from jaxthru.runtime.errors import InputError, require

KEPT = 16
"""Batches that are kept for trainers that take the same rows and have not asked for them yet."""
SAME = ("sequence", "packing", "over_long", "groups")
"""Keys of `data` that decide what a batch holds: the same in all processes of a run."""


class Blocks:
    """The memory of batches. It finds the block that a batch lies in."""

    def __init__(self):
        self._at = weakref.WeakValueDictionary[int, SharedBlock]()

    def allocate(self, size: int) -> SharedBlock:
        block = SharedBlock(size)
        self._at[np.frombuffer(block, np.uint8).ctypes.data] = block
        return block

    def __len__(self) -> int:
        return len(self._at)

    def places(self, batch: Arrays) -> tuple[SharedBlock, dict[str, int]] | None:
        """Returns the block of a batch and where in it each field begins, in bytes; None if some lies
        elsewhere."""
        first = min(array.ctypes.data for array in batch.values())
        block = self._at.get(first)
        places = {name: array.ctypes.data - first for name, array in batch.items()}
        inside = block and all(places[name] + each.nbytes <= len(block) for name, each in batch.items())
        return (block, places) if inside else None


class Server:
    """What all connections share."""

    def __init__(self):
        self.data: Data | None = None
        self.blocks, self.identity = Blocks(), os.getpid()
        self.connections = collections.Counter[str]()  # of each trainer
        self._lock = threading.Lock()
        self.plans: dict[str, PlannedBatches] = {}
        self._takers = collections.defaultdict[tuple, set[str]](set)  # trainers that take such rows
        self.built: dict[tuple, Built] = {}
        self._held = collections.defaultdict[str, dict[int, Arrays]](dict)  # of each trainer
        self._numbers = iter(range(sys.maxsize))

    def open(
        self, config: dict[str, Any], keys: dict[str, str], kept: str | None, cores: list[int], trainers: int
    ):
        """Opens the data for the first trainer that asks; others must want the same. cores: that the trainers
        may use, all of them together. trainers: of this host, how many. Raises InputError."""
        with self._lock:
            if self.data is None:
                _take_cores(cores)
                how = {"prepare": False, "begun": keys, "kept": Path(kept) if kept else None}
                self.data = open_data(DataConfig(**config), **how)
                self.data.builder.memory = BatchMemory(self.blocks.allocate, trainers * MOST)
            for name in SAME:
                here = getattr(self.data.config, name)
                said = f"data.{name} = {config[name]}: another process of this run on this host has {here}"
                require(config[name] == here, f"{said}; give all the same configuration")
            other = ", ".join(name for name, key in self.data.keys.items() if keys.get(name) != key)
            require(not other, f"sources that differ between processes of this run on this host: {other}")

    def plan(self, key: str, schedule: list, **asked: Any) -> PlannedBatches:
        """Returns the plan of this key, which is made if it is new. Raises InputError."""
        with self._lock:
            if key not in self.plans:
                self.plans[key] = PlannedBatches(self.data, schedule_of(schedule), **asked)
            return self.plans[key]

    def takes(self, trainer: str, key: str, local: tuple[int, int]) -> None:
        """Notes that a trainer takes these rows of the batches of a plan."""
        with self._lock:
            self._takers[key, local].add(trainer)

    def batch(self, trainer: str, key: str, local: tuple[int, int], step: int) -> tuple[int, Arrays]:
        """Returns a number and the batch of update `step` + 1, which is held until the trainer gives the
        number back. It is built once for all trainers that take it."""
        with self._lock:
            mine = (key, local, step) not in self.built
            built = self.built.setdefault((key, local, step), Built())
        if mine:
            try:
                built.future.set_result(self.plans[key].build(step, slice(*local)))
            except BaseException as error:
                built.future.set_exception(error)
        try:
            batch = built.future.result()
        except BaseException:
            with self._lock:
                self._forget(key, local, step, built)
            raise
        with self._lock:
            built.taken.add(trainer)
            if built.taken >= self._takers[key, local]:
                self._forget(key, local, step, built)
            done = [each for each, other in self.built.items() if other.future.done()]
            for each in done[: max(len(done) - KEPT * len(self._takers), 0)]:
                del self.built[each]
            number = next(self._numbers)
            self._held[trainer][number] = batch
        return number, batch

    def release(self, trainer: str, numbers: list[int]) -> None:
        """Lets go of batches that a trainer has no use for any more."""
        for number in numbers:
            self._held[trainer].pop(number, None)

    def joined(self, trainer: str) -> None:
        """Counts a connection."""
        with self._lock:
            self.connections[trainer] += 1

    def left(self, trainer: str) -> None:
        """Forgets a connection, and a trainer with its last."""
        with self._lock:
            self.connections[trainer] -= 1
            if self.connections[trainer] <= 0:
                del self.connections[trainer]
                self._held.pop(trainer, None)
                for takers in self._takers.values():
                    takers.discard(trainer)

    def _forget(self, key: str, local: tuple[int, int], step: int, built: "Built") -> None:
        if self.built.get((key, local, step)) is built:
            del self.built[key, local, step]


class Built:
    """A batch that is built, or being built. taken: by which trainers."""

    def __init__(self):
        self.future, self.taken = concurrent.futures.Future[Arrays](), set[str]()


class Session:
    """One connection: answers one request after the other. Each method is one."""

    def __init__(self, server: Server, connection: Connection):
        self.server, self.connection, self.trainer = server, connection, ""

    def serve(self) -> None:
        """Answers until the other end is closed."""
        try:
            while True:
                message, arrays = receive(self.connection)
                self.server.release(self.trainer, message.pop("released", ()))
                try:
                    getattr(self, f"answer_{message.pop('ask')}")(arrays=arrays, **message)
                except InputError as error:
                    send(self.connection, {"error": str(error), "input": True})
                except (BrokenPipeError, ConnectionError):
                    raise
                except Exception as error:  # whatever it is, the trainer is to hear of it
                    said = f"the data server of this host: {type(error).__name__}: {error}"
                    send(self.connection, {"error": said, "input": False})
        except (EOFError, OSError):
            return
        finally:
            self.connection.close()
            if self.trainer:
                self.server.left(self.trainer)

    @property
    def data(self) -> Data:
        return self.server.data

    def answer_open(self, arrays: Arrays, trainer: str, **asked: Any) -> None:
        self.trainer = trainer
        self.server.joined(trainer)
        self.server.open(**asked)
        send(self.connection, {"server": self.server.identity})

    def answer_facts(self, arrays: Arrays) -> None:
        send(self.connection, facts(self.data))

    def answer_plan(self, arrays: Arrays, key: str, local: list[int] | None = None, **asked: Any) -> None:
        planned = self.server.plan(key, **asked)
        if local:
            self.server.takes(self.trainer, key, tuple(local))
        ends = {"end": planned.planner.end, "ended_by": planned.planner.ended_by}
        send(self.connection, {"length": len(planned)} | ends)

    def answer_batch(self, arrays: Arrays, key: str, local: list[int], step: int) -> None:
        number, batch = self.server.batch(self.trainer, key, tuple(local), step)
        if placed := self.server.blocks.places(batch):
            send_block(self.connection, {"number": number}, batch, *reversed(placed))
        else:  # it brings columns along, which lie elsewhere
            self.server.release(self.trainer, [number])
            send(self.connection, {}, batch)

    def answer_rows_of(self, arrays: Arrays, key: str, step: int) -> None:
        plan = self.server.plans[key].plan(step)
        send(self.connection, {}, {"source": plan.source, "row": plan.row})

    def answer_held_out_rows(self, arrays: Arrays, total_rows: int, rows: int) -> None:
        source, row = self.data.held_out_rows(total_rows, rows)
        send(self.connection, {}, {"source": source, "row": row})

    def answer_build(self, arrays: Arrays, split: str) -> None:
        send(self.connection, {}, self._builder(split).build(arrays["source"], arrays["row"]))

    def answer_pieces(self, arrays: Arrays, split: str) -> None:
        found = self._builder(split).pieces(arrays["source"], arrays["row"])
        send(self.connection, {}, dict(zip(("in_row", "segment", "piece"), found, strict=True)))

    def answer_checksum(self, arrays: Arrays, split: str) -> None:
        send(self.connection, {"checksum": self._builder(split).checksum()})

    def answer_column(self, arrays: Arrays, split: str, name: str, width: int) -> None:
        self._builder(split).add_column(name, arrays["values"], width)
        send(self.connection, {})

    def _builder(self, split: str) -> BatchBuilder:
        return {"train": self.data.builder, "held_out": self.data.held_out_builder}[split]


def facts(data: Data) -> dict[str, Any]:
    """Returns what a trainer has to know of its data, JSON values: see `HostData`."""
    counted = {name: each and each._asdict() for name, each in data.counted.items()}
    names = (
        "names",
        "keys",
        "vocabulary",
        "segments",
        "rows",
        "pieces",
        "tokens",
        "account",
        "masked",
        "units",
    )
    told = {name: getattr(data, name) for name in (*names, "threads")}
    return told | {"mixture": data.mixture.to_tree(), "counted": counted, "identity": data.tokenizer.identity}


def schedule_of(tree: list) -> Schedule:
    """Returns the schedule that `host_pool` described."""
    return tuple((step, Mixture.from_tree(mixture)) for step, mixture in tree)


def _take_cores(cores: list[int]) -> None:
    """Lets this process, and what it starts, run where any of its trainers may: it was started by one."""
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, allowed | set(cores))
    except OSError:  # a control group allows fewer
        logging.getLogger("jaxthru").debug("the data server keeps to %d cores", len(allowed))


def main(argv: list[str]) -> int:
    """Answers whoever connects, until nobody is connected any more."""
    outlast_signals()
    log_to_stderr(logging.INFO)
    server, sessions = Server(), 0
    wake, woken = socket.socketpair()

    def serve(connection: Connection) -> None:
        try:
            check_user(connection)
            Session(server, connection).serve()
        except InputError:
            connection.close()
        finally:
            woken.send(b"-")

    with socket.socket(fileno=int(argv[0])) as listener:
        while True:
            ready, _, _ = select.select([listener, wake], [], [])
            if listener in ready:
                connection = Connection(listener.accept()[0].detach())
                sessions += 1
                threading.Thread(target=serve, args=(connection,), daemon=True).start()
                continue
            sessions -= len(wake.recv(1))
            if not sessions:
                return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)  # token workers end with it, and no batch is wanted any more
