"""Ray's driver: the process between the pool of token workers and the actors that do their tasks.

    python -m jaxthru.data.loading.ray_driver TOLD

It is started by `ray_workers.py`. Each worker has a socket and a part of the memory that all share, used as
`worker.py` does. `null` through the socket asks for an actor; what comes next are its tasks. When an actor
ends, all that it had is given back in one message, and what comes then is left alone until the next `null`:
so no task is done twice at a time, and no memory written that is another task's.

Actors run on nodes without accelerators where the cluster has such, each on a core of its own, and spread.
All nodes see the same files. The driver and a cluster that it has started end with the process that trains.
"""

import asyncio
import contextlib
import json
import mmap
import os
import shutil
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from jaxthru.data.loading.ray_workers import LOST, address_of
from jaxthru.data.loading.worker import outlast_signals, wait_for_end
from jaxthru.data.loading.worker_handle import Ended
from jaxthru.runtime.errors import InputError

PATIENCE = float(os.environ.get("JAXTHRU_RAY_PATIENCE") or 120)
"""Seconds in which a cluster has to come back, and an actor to find a free core and to start."""
LOOK_AGAIN = 30
"""Seconds after which an actor that has not started is asked for anew, then twice as many, and so on: the
nodes may have changed, or it takes its time, as where they read what it imports from a network."""
NODE_GONE, HEAD_GONE = 2, 60
"""Seconds without this machine's node, or the head, after which the cluster is lost. Actors work without the
head, and one that keeps its state elsewhere may be replaced; that of a cluster of this machine is not."""
ACCELERATORS = ("GPU", "TPU")
"""What Ray calls those of a node."""


class Actor:
    """A token worker on a node. It is sent there as it stands and imports nothing before it knows from where:
    Ray lets the working directory hide what the process that trains has imported."""

    def __init__(self, paths: list[str], folder: str):
        import os
        import sys

        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
        if os.path.isdir(folder):  # noqa: PTH112
            os.chdir(folder)
        self._maker, self._node = None, os.uname().nodename

    def open(self, tokenizer: str, borders: list) -> tuple[str, str, str | None]:
        """Returns (the node's id, its name, what is wrong)."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        try:
            from jaxthru.data.loading.worker import TokenMaker

            wrong = self._missing(tokenizer)
            self._maker = wrong or TokenMaker(tokenizer, borders)
        except Exception as error:
            wrong = f"token worker on {self._node}: {type(error).__name__}: {error}"
        return node, self._node, wrong

    def make(self, folder: str, *task) -> tuple:
        """Returns what `TokenMaker.make` does."""
        import numpy

        if wrong := self._missing(folder):
            return 0.0, numpy.zeros(0, numpy.int32), wrong
        return self._maker.make(folder, *task)

    def _missing(self, path: str) -> str | None:
        import os

        if os.path.exists(path):  # noqa: PTH110
            return None
        return (
            f"{path}: is not there on node {self._node}; all nodes of the Ray cluster must see the same files"
        )


class Cluster:
    """The cluster, as this driver uses it. told: what `ray_workers.py` says."""

    def __init__(self, told: dict):
        self.told, self.workers = told, len(told["sockets"])
        self._actor = ray.remote(max_restarts=0, max_task_retries=0, num_cpus=1)(Actor)

    def connect(self) -> None:
        """Raises InputError if there is no cluster, or none that takes this driver."""
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        if not (address := self.told["address"]):
            ray.init("local", num_cpus=self.workers, num_gpus=0, include_dashboard=False, **quiet)
            return
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                socket.create_connection(address_of(address), timeout=5).close()
                ray.init(address, **quiet)
                return
            except (OSError, RuntimeError, ValueError, RayError) as error:
                if time.monotonic() > deadline:
                    what = f"the Ray cluster at {address} has not taken this run for {PATIENCE:g} s"
                    how = f"its head must run, and this machine be a node: ray start --address={address}"
                    raise InputError(f"{what} ({first_line(error)}); {how}") from error
            ray.shutdown()
            time.sleep(1)

    async def watch(self) -> None:
        """Ends this process when the cluster is lost: Ray would wait, for long or for ever."""
        context = ray.get_runtime_context()
        here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        node, head = (here["NodeManagerAddress"], here["NodeManagerPort"]), address_of(context.gcs_address)
        allowed = {node: NODE_GONE, head: HEAD_GONE if self.told["address"] else NODE_GONE}
        seen = dict.fromkeys(allowed, time.monotonic())
        while True:
            await asyncio.sleep(0.5)
            for place, seconds in allowed.items():
                if await answers(*place):
                    seen[place] = time.monotonic()
                elif time.monotonic() - seen[place] > seconds:
                    what = "this machine's node" if place == node else "the head"
                    said = f"{what} of the Ray cluster has not answered for {seconds} s"
                    Path(self.told["folder"], LOST).write_text(said)
                    os.killpg(0, signal.SIGKILL)

    async def start(self) -> tuple[ray.actor.ActorHandle, str, str]:
        """Returns an actor that has started, the id of its node and its name. Raises InputError."""
        deadline, look = time.monotonic() + PATIENCE, LOOK_AGAIN
        while True:
            actor = None
            try:
                asked = self._actor.options(**await asyncio.to_thread(placement))
                actor = asked.remote(sys.path, str(Path.cwd()))
                opened = actor.open.remote(self.told["tokenizer"], self.told["borders"])
                node, name, wrong = await asyncio.wait_for(opened, min(look, deadline - time.monotonic()))
                if wrong:
                    raise InputError(wrong)
                return actor, node, name
            except InputError:
                raise
            except Exception as error:  # of Ray, or of a head that is gone
                if getattr(error, "actor_init_failed", False):
                    raise InputError(f"a token worker cannot start: {first_line(error)}") from error
                if time.monotonic() >= deadline:
                    raise InputError(self._no_place(error)) from error
            if actor is not None:
                end(actor)
            look *= 2
            await asyncio.sleep(1)

    def _no_place(self, error: Exception) -> str:
        said = f"the Ray cluster has not started a token worker within {PATIENCE:g} s ({first_line(error)})"
        return f"{said}; data.loaders = {self.workers} needs as many free CPUs, on nodes without accelerators"


async def answers(host: str, port: int) -> bool:
    """Says whether something listens there."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 5)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def placement() -> dict:
    """Returns where an actor may run: a node with accelerators needs its cores for what trains there."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    taken = [node["NodeID"] for node in nodes if any(map(node["Resources"].get, ACCELERATORS))]
    spread = {"scheduling_strategy": "SPREAD"}
    if 0 < len(taken) < len(nodes):
        spread["label_selector"] = {"ray.io/node-id": f"!in({','.join(taken)})"}
    return spread


class Worker:
    """One worker of the pool: its socket and its actor. place: int32, the memory of all."""

    def __init__(self, connection: Connection, place: np.ndarray, cluster: Cluster):
        self._connection, self._place, self._cluster = connection, place, cluster
        self._started: asyncio.Task | None = None  # None: has ended, and the pool is to ask for another
        self._failure: Exception | None = None
        self._doing = 0
        self._tasks = set()  # asyncio keeps no reference

    def hear(self) -> None:
        """Takes one message. It is small, so that all of it is there."""
        try:
            message = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):  # see `wait_for_end`
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            return
        if message is None:
            self._failure, self._started = None, self._spawn(self._cluster.start())
        elif self._started and not self._failure:
            self._doing += 1
            self._spawn(self._do(*message))

    def _spawn(self, coroutine) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _do(
        self, number: int, folder: str, split: str, transform: list, count: int, first: int
    ) -> None:
        try:
            chunks = self._place[first : first + 2 * count].view(np.int64).copy()
            name, where = transform
            task = split, (name, where and str(Path(where).absolute())), chunks
            actor, *_ = await asyncio.shield(self._started)
            seconds, tokens, error = await actor.make.remote(str(Path(folder).absolute()), *task)
            self._place[first : first + len(tokens)] = tokens
            self._say(number, seconds, error)
        except Exception as error:
            self._failure = self._failure or error
        self._doing -= 1
        if self._failure and not self._doing:
            started, self._started = self._started, None
            self._say(None, *await ended(started, self._failure))

    def _say(self, *message) -> None:
        self._connection.send_bytes(json.dumps(message).encode())


async def ended(started: asyncio.Task, failure: Exception) -> Ended:
    """Returns what became of an actor. started: what started it."""
    if isinstance(failure, InputError):
        return Ended(str(failure), blamed=False, final=True)
    if not isinstance(failure, RayError) or started.exception():
        return Ended(f"was lost: {first_line(failure)}", blamed=False)
    actor, node, name = started.result()
    end(actor)
    try:
        nodes = await asyncio.to_thread(ray.nodes)
    except Exception:  # the head is gone: what died has not died alone
        nodes = []
    alive = any(each["NodeID"] == node and each["Alive"] for each in nodes)
    blamed = alive and isinstance(failure, ActorDiedError)
    return Ended(f"on node {name} ended ({first_line(failure)})", blamed=blamed)


def end(actor: ray.actor.ActorHandle) -> None:
    """Ends an actor: one that is only out of reach is not to hold a core."""
    with contextlib.suppress(Exception):  # as when the head is gone
        ray.kill(actor)


def first_line(error: Exception) -> str:
    """Returns what an error says in a sentence. Ray's errors tell the class and number of an actor first."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no node has had a free CPU in time"
    if isinstance(error, ActorUnavailableError):
        return "it cannot be reached"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    said = lines[-1] if isinstance(error, ActorDiedError) else lines[0]
    return said.partition(". ")[0].rstrip(".")


async def serve(told: dict, memory: mmap.mmap, connections: list[Connection]) -> None:
    """Serves the workers for ever."""
    place, cluster = np.frombuffer(memory, np.int32), Cluster(told)
    try:
        cluster.connect()
    except (InputError, RuntimeError, OSError) as error:
        why = str(error) if isinstance(error, InputError) else f"Ray cannot be used: {first_line(error)}"
        for connection in connections:
            connection.send_bytes(json.dumps([None, *Ended(why, blamed=False, final=True)]).encode())
    else:
        outlast_signals()  # not before: until here they are blocked, which what Ray starts inherits
        for connection in connections:
            hear = Worker(connection, place, cluster).hear
            asyncio.get_running_loop().add_reader(connection.fileno(), hear)
        await cluster.watch()
    await asyncio.Event().wait()


def end_with(connection: Connection, folder: str) -> None:
    """Ends this process, and all in its process group, when the other end of a socket closes."""
    wait_for_end(connection)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main(argv: list[str]) -> int:
    """Serves tasks until the sockets close."""
    told = json.loads(argv[0])
    connections = [Connection(number) for number in told["sockets"]]
    for number in (*told["sockets"], told["memory"]):
        os.set_inheritable(number, False)
    memory = mmap.mmap(told["memory"], 0)
    threading.Thread(target=end_with, args=(connections[0], told["folder"]), daemon=True).start()
    asyncio.run(serve(told, memory, connections))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
