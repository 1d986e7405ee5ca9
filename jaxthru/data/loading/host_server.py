"""The data server of a host: the stores, the planner, the token workers and the batches of all its trainers.

    python -m jaxthru.data.loading.host_server SOCKET

After OVERLORD (MegaScale-Data, arXiv:2504.09844), whose data constructors serve all ranks of a host: what
training processes share is held once. One of them starts it with the socket that it listens at (see
`host_channel`); each asks through connections of its own (see `host_pool`), one for each of its threads. It
keeps nothing that could not be asked for again: when it is killed, a trainer starts another and asks again.
It ends when nobody is connected any more, so it outlives no run; SIGINT and SIGTERM, which it is started
without, do not end it.
"""

import logging
import os
import select
import socket
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from jaxthru.data.loading.batch_builder import BatchBuilder
from jaxthru.data.loading.dataset import Data
from jaxthru.data.loading.host_batches import Server
from jaxthru.data.loading.host_channel import Arrays, check_user, hang_up, receive, send, send_block
from jaxthru.data.loading.worker import outlast_signals
from jaxthru.runtime.command_line import log_to_stderr
from jaxthru.runtime.errors import InputError

log = logging.getLogger("jaxthru")


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
                except ConnectionError:
                    raise
                except Exception as error:  # whatever it is, the trainer is to hear of it
                    said = f"the data server of this host: {type(error).__name__}: {error}"
                    # Where it was, as a process that is alone would show; a lack of something says all.
                    if not isinstance(error, OSError | MemoryError):
                        log.error("%s", said, exc_info=True)
                    send(self.connection, {"error": said, "input": False})
        except (EOFError, OSError):
            return
        finally:
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

    def answer_epochs(self, arrays: Arrays, key: str, steps: int) -> None:
        send(self.connection, {}, {"epochs": self.server.plans[key].planner.epochs(steps)})

    def answer_held_out_rows(self, arrays: Arrays, total_rows: int, rows: int) -> None:
        source, row = self.data.held_out_rows(total_rows, rows)
        send(self.connection, {}, {"source": source, "row": row})

    def answer_build(self, arrays: Arrays, split: str) -> None:
        send(self.connection, {}, self._builder(split).build(arrays["source"], arrays["row"]))

    def answer_pieces(self, arrays: Arrays, split: str) -> None:
        send(self.connection, {}, self._builder(split).pieces(arrays["source"], arrays["row"])._asdict())

    def answer_piece_count(self, arrays: Arrays, split: str) -> None:
        send(self.connection, {"value": self._builder(split).piece_count})

    def answer_checksum(self, arrays: Arrays, split: str) -> None:
        send(self.connection, {"value": self._builder(split).checksum()})

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


def serve(server: Server, connection: Connection) -> None:
    """Answers at a connection until it ends."""
    try:
        check_user(connection)
        Session(server, connection).serve()
    except InputError:
        log.debug("another user's process has asked the data server")
    finally:
        hang_up(connection)
        connection.close()


def main(argv: list[str]) -> int:
    """Answers whoever connects, until nobody is connected any more."""
    outlast_signals()
    log_to_stderr(logging.INFO)
    server, ends = Server(), dict[int, socket.socket]()
    waiting = select.poll()
    with socket.socket(fileno=int(argv[0])) as listener:
        waiting.register(listener, select.POLLIN)
        while True:
            for file, _ in waiting.poll():
                if file == listener.fileno():
                    end, _ = listener.accept()
                    ends[end.fileno()] = end
                    # Its hang-up alone, which a thread that waits for a batch, maybe for ever, does not see.
                    waiting.register(end, 0)
                    connection = Connection(os.dup(end.fileno()))
                    threading.Thread(target=serve, args=(server, connection), daemon=True).start()
                else:
                    waiting.unregister(file)
                    ends.pop(file).close()
            if not ends:
                return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)  # token workers end with it, and no batch is wanted any more
