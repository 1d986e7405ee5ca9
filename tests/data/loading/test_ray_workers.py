"""Token workers as actors of a Ray cluster: without Ray, how the pool, the driver and its workers speak; with
it, that nothing which dies changes a batch."""

import asyncio
import collections
import contextlib
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import pytest

from jaxthru.data.loading import ray_workers
from jaxthru.data.loading import token_workers as workers_module
from jaxthru.data.loading.dataset import DataConfig, open_data
from jaxthru.data.loading.ray_workers import RayWorkers
from jaxthru.data.loading.token_workers import TokenWorkers
from jaxthru.data.loading.worker_handle import Ended
from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.sources.transforms import Transform
from jaxthru.data.store import text_store
from jaxthru.data.store import token_store as store
from jaxthru.data.store.chunks import Chunk
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.data.store.tokenizer_folder import UNSAID
from jaxthru.runtime.errors import InputError

FAKE_DRIVER = """
import json, mmap, os, selectors, sys, time
from multiprocessing.connection import Connection
import numpy as np
from jaxthru.data.loading.worker import TokenMaker
told = json.loads(sys.argv[1])
place = np.frombuffer(mmap.mmap(told["memory"], 0), np.int32)
maker = TokenMaker(told["tokenizer"], told["borders"])
waiting = selectors.DefaultSelector()
for number in told["sockets"]:
    waiting.register(number, selectors.EVENT_READ, Connection(number))
while True:
    for key, _ in waiting.select():
        try:
            message = json.loads(key.data.recv_bytes())
        except EOFError:
            sys.exit()
        if message:
            task, folder, split, transform, count, first = message
            chunks = place[first : first + 2 * count].view(np.int64).copy()
            seconds, tokens, error = maker.make(folder, split, transform, chunks)
            place[first : first + len(tokens)] = tokens
            time.sleep(0.02)
            key.data.send_bytes(json.dumps([task, seconds, error]).encode())
"""


def write_store(folder: Path, tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    ids = [each.astype(np.int32) for each in tokenizer.encode(texts)]
    parts = [Chunk(text.encode(), len(each), True) for text, each in zip(texts, ids, strict=True)]
    record = text_store.write_shard(folder, 0, {"train": parts, "held_out": []}, {})
    store.write_manifest(folder, {"kind": text_store.KIND, "shards": [record]})
    return ids


def driven_by(program: str, tmp_path: Path, monkeypatch) -> None:
    """Has a program take the place of Ray's driver."""
    (tmp_path / "driver_for_tests.py").write_text(program)
    monkeypatch.setattr(ray_workers, "DRIVER", "driver_for_tests")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_a_driver_that_dies_loses_nothing(tmp_path, tokenizer, monkeypatch, caplog):
    begun = tmp_path / "begun"  # what a cluster of this machine is to a driver that is killed
    beside = "import subprocess\nbeside = subprocess.Popen(['sleep', '600']).pid\n"
    beside += f"print(beside, file=open({str(begun)!r}, 'a'))\n"
    driven_by(beside + FAKE_DRIVER, tmp_path, monkeypatch)
    texts = [f"document {number}" for number in range(50)]
    ids = write_store(tmp_path / "s", tokenizer, texts)
    split = text_store.TextStore(tmp_path / "s").train
    with TokenWorkers(3, ("books", "notes"), tokenizer.path, backend="ray") as workers:
        for turn in range(2):
            asked = [workers.request("books", split, np.array([at, 49 - at])) for at in range(20)]
            asked[5 * turn].result()
            driver = workers._runs.process
            os.kill(driver.pid, signal.SIGKILL)
            for at, tokens in enumerate(asked):
                assert np.array_equal(tokens.result(), np.concatenate([ids[at], ids[49 - at]]))
        folder, last = workers._runs.folder, workers._runs.process
        assert folder.is_dir() and workers.restarts == 6  # two drivers with three workers each
        assert not any(worker.deaths for worker in workers._workers)  # which is not laid to their charge
    assert last.returncode == -signal.SIGKILL and not folder.exists()
    left = begun.read_text().split()
    assert len(left) == 3 and gone(left)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["Ray's driver ended with code -9: started again, and all token workers with it"] * 2


def test_rays_sockets_have_room_for_their_names(tmp_path, tokenizer, monkeypatch):
    for temporary, found in ((tmp_path, Path("/tmp")), (Path("/tmp"), Path("/tmp"))):
        monkeypatch.setattr(ray_workers.tempfile, "tempdir", str(temporary))
        driver = RayWorkers(1, tokenizer.path, UNSAID)
        assert driver.folder.parent == found and driver.folder.is_dir()
        driver.close()
        assert not driver.folder.exists()


def test_a_driver_that_cannot_start_is_an_error_not_a_loop(tmp_path, tokenizer, monkeypatch):
    driven_by("print('first'); raise SystemExit('no room on the disk')", tmp_path, monkeypatch)
    write_store(tmp_path / "s", tokenizer, ["text"])
    with TokenWorkers(2, ("books",), tokenizer.path, backend="ray") as workers:
        tokens = workers.request("books", text_store.TextStore(tmp_path / "s").train, np.array([0]))
        told = f"^Ray's driver ended {ray_workers.STARTS} times before .* done anything: no room on the disk$"
        with pytest.raises(InputError, match=told):
            tokens.result()


def test_a_task_that_is_lost_with_its_machine_again_and_again_is_named(tmp_path, tokenizer, monkeypatch):
    deadly = FAKE_DRIVER.replace(
        "task, folder, split", "os._exit(1) if message[4] == 2 else None\n            task, folder, split"
    )
    driven_by(deadly, tmp_path, monkeypatch)
    monkeypatch.setattr(workers_module, "LOST", 2)
    write_store(tmp_path / "s", tokenizer, ["one", "two", "three"])
    split = text_store.TextStore(tmp_path / "s").train
    with TokenWorkers(1, ("books",), tokenizer.path, backend="ray") as workers:
        fine = workers.request("books", split, np.array([0]))
        fatal = workers.request("books", split, np.array([1, 2]))
        with pytest.raises(
            InputError, match=r"source books: .*Ray's driver.* 2 times at chunks 1 to 2 of train"
        ):
            fatal.result()
        assert len(fine.result())


@pytest.mark.parametrize(
    ("installed", "address", "told"),
    [
        (
            False,
            None,
            r'data.workers = ray: needs Ray; pip install "jaxthru\[ray\]", or data.workers=processes',
        ),
        (True, "ray://127.0.0.1:10001", "RAY_ADDRESS = 'ray://127.0.0.1:10001': must be HOST:PORT"),
        (True, "auto", "RAY_ADDRESS = 'auto': must be HOST:PORT"),
        (True, "127.0.0.1:1", r"RAY_ADDRESS = 127.0.0.1:1: no Ray cluster answers there \(.*refused"),
    ],
)
def test_what_is_missing_is_said_before_work(tmp_path, monkeypatch, installed, address, told):
    monkeypatch.setattr(ray_workers.importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.setenv("RAY_ADDRESS", address or "")
    with pytest.raises(InputError, match=told):
        open_data(DataConfig(str(tmp_path / "no mix"), workers="ray"))


def test_processes_need_no_ray():
    program = "import jaxthru.data.loading.dataset, sys; print('ray' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


# The driver's end of a worker


class RayError(Exception):
    pass


class ActorDiedError(RayError):
    pass


class ActorUnavailableError(RayError):
    pass


@pytest.fixture
def driver(monkeypatch):
    """The driver's module, over a Ray of which it has what is asked for here."""
    fake = types.ModuleType("ray")
    fake.exceptions = types.ModuleType("ray.exceptions")
    for error in (RayError, ActorDiedError, ActorUnavailableError):
        setattr(fake.exceptions, error.__name__, error)
    fake.actor = types.SimpleNamespace(ActorHandle=object)
    fake.alive, fake.killed = ["here"], []
    fake.nodes = lambda: [{"NodeID": name, "Alive": name in fake.alive} for name in ("here", "there")]
    fake.kill = fake.killed.append
    for name, module in (("ray", fake), ("ray.exceptions", fake.exceptions)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, ray_workers.DRIVER, raising=False)
    yield importlib.import_module(ray_workers.DRIVER)
    sys.modules.pop(ray_workers.DRIVER, None)


class FakeActor:
    """Does a task when it is let; or fails."""

    def __init__(self):
        self.asked = collections.deque()
        self.make = types.SimpleNamespace(remote=self._remote)

    def _remote(self, *task):
        self.asked.append(asyncio.get_running_loop().create_future())
        return self.asked[-1]


def spoken(driver, scenario) -> list:
    """Runs a scenario over one worker of the driver; returns what the pool is told."""

    async def play():
        own, other = socket.socketpair()
        own, actors = Connection(own.detach()), []
        place = np.zeros(100, np.int32)

        async def start():
            actors.append(FakeActor())
            return actors[-1], "here", "host"

        cluster = types.SimpleNamespace(start=start)
        worker = driver.Worker(Connection(other.detach()), place, cluster)

        async def send(message):
            own.send_bytes(driver.json.dumps(message).encode())
            worker.hear()
            for _ in range(5):
                await asyncio.sleep(0)

        await scenario(send, actors, place, cluster)
        for _ in range(50):
            await asyncio.sleep(0.002)
        told = []
        while own.poll():
            told.append(driver.json.loads(own.recv_bytes()))
        return told

    return asyncio.run(play())


def task(number: int, first: int) -> list:
    return [number, "/store", "train", ["", ""], 1, first]


def test_answers_come_when_tokens_are_there(driver):
    async def scenario(send, actors, place, cluster):
        await send(None)
        await send(task(7, 0))
        await send(task(8, 50))
        first, second = actors[0].asked
        second.set_result((0.5, np.arange(3, dtype=np.int32), None))
        first.set_result((0.25, np.zeros(0, np.int32), "it is damaged"))
        await asyncio.sleep(0.01)
        assert place[50:53].tolist() == [0, 1, 2]

    assert sorted(spoken(driver, scenario)) == [[7, 0.25, "it is damaged"], [8, 0.5, None]]


@pytest.mark.parametrize(
    ("error", "alive", "blamed"),
    [
        (ActorDiedError("class: A\nIts worker process has died. Exit."), True, True),
        (ActorDiedError("class: A\nIts worker process has died. Exit."), False, False),
        (ActorUnavailableError("no route"), True, False),
    ],
)
def test_an_actor_that_ends_gives_all_back_in_one_message(driver, error, alive, blamed):
    """Who is to blame: the task, unless the node went. What comes before the next `null` is left alone."""
    sys.modules["ray"].alive = ["here"] if alive else []

    async def scenario(send, actors, place, cluster):
        await send(None)
        for number in range(3):
            await send(task(number, 10 * number))
        done, *others = actors[0].asked
        done.set_result((0.1, np.ones(1, np.int32), None))
        others[0].set_exception(error)
        await asyncio.sleep(0.01)
        await send(task(3, 0))  # is not begun: the actor has failed
        assert len(actors[0].asked) == 3
        others[1].set_exception(error)
        await asyncio.sleep(0.05)
        await send(task(4, 0))  # nor this: the pool has not heard of it
        assert len(actors) == 1
        await send(None)
        await send(task(4, 0))
        actors[1].asked[0].set_result((0.1, np.ones(1, np.int32), None))

    first, ended, last = spoken(driver, scenario)
    why = (
        "it cannot be reached" if isinstance(error, ActorUnavailableError) else "Its worker process has died"
    )
    assert first == [0, 0.1, None] and last == [4, 0.1, None]
    assert ended == [None, *Ended(f"on node host ended ({why})", blamed=blamed)]


def test_what_no_other_actor_would_mend_is_final(driver):
    async def scenario(send, actors, place, cluster):
        async def start():
            raise InputError("tokenizer.json: is not there on node n1")

        cluster.start = start
        await send(None)
        await send(task(0, 0))

    assert spoken(driver, scenario) == [
        [None, *Ended("tokenizer.json: is not there on node n1", blamed=False, final=True)]
    ]


def test_an_actor_names_what_its_node_lacks(driver, tmp_path, monkeypatch):
    runtime = types.SimpleNamespace(get_node_id=lambda: "n1")
    sys.modules["ray"].get_runtime_context = lambda: runtime
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    actor = driver.Actor([str(tmp_path)], str(tmp_path))
    assert sys.path[0] == str(tmp_path)
    lacks = (
        rf"^/gone/it: is not there on node {re.escape(os.uname().nodename)}; all nodes .* see the same files"
    )
    assert re.match(lacks, actor.open("/gone/it", [])[2])
    assert re.match(lacks, actor.make("/gone/it", "train", ("", ""), np.array([0]))[2])


@pytest.mark.parametrize(
    ("nodes", "without"),
    [
        ({"a": {"CPU": 4}}, None),
        ({"a": {"CPU": 4, "GPU": 8}}, None),
        ({"a": {"CPU": 4, "GPU": 8}, "b": {"CPU": 4}, "c": {"CPU": 1, "TPU": 4}}, "!in(a,c)"),
        ({"a": {"GPU": 8}, "b": {"CPU": 4}}, None),  # Ray itself puts nothing on a node without CPUs
        ({"a": {"CPU": 4, "GPU": 8}, "dead": {"CPU": 4}}, None),
    ],
)
def test_actors_go_where_no_accelerators_are(driver, nodes, without):
    found = [{"NodeID": name, "Alive": name != "dead", "Resources": has} for name, has in nodes.items()]
    sys.modules["ray"].nodes = lambda: found
    expected = {"label_selector": {"ray.io/node-id": without}} if without else {}
    assert driver.placement() == {"scheduling_strategy": "SPREAD"} | expected


def test_a_lack_of_cores_is_an_error_not_a_wait(driver, monkeypatch):
    never = types.SimpleNamespace(remote=lambda *_: asyncio.get_running_loop().create_future())
    asked = types.SimpleNamespace(remote=lambda *_: types.SimpleNamespace(open=never))
    actor = types.SimpleNamespace(options=lambda **_: asked)
    sys.modules["ray"].remote = lambda **settings: lambda cls: actor
    sys.modules["ray"].nodes = list
    monkeypatch.setattr(driver, "PATIENCE", 0.02)
    cluster = driver.Cluster({"sockets": [1, 2, 3], "tokenizer": "", "borders": []})
    told = r"not started a token worker within 0.02 s \(no node has .* in time\); data.loaders = 3 needs"
    with pytest.raises(InputError, match=told):
        asyncio.run(cluster.start())


# With Ray


@pytest.fixture
def descendants():
    """What returns the processes of one kind that a test has started; others may have left some."""
    before = set(psutil.Process().children(recursive=True))

    def started(kind: str = "") -> list[int]:
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found += [process.pid] * (process not in before and kind in " ".join(process.cmdline()))
        return found

    return started


def gone(pids: list[int] | list[str], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow(minutes=0.3)
def test_batches_are_those_of_processes_whatever_dies(mix, tmp_path, monkeypatch, descendants):
    """For one, two and four that train, of which each has its rows."""
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    path = mix.with_name("online.toml")
    path.write_text(mix.read_text().replace("weight = 3", "weight = 3\nonline = true"))
    schedule = ((0, Mixture.plain({"books": 1.0, "notes": 1.0})),)

    def batches(data, trainers: int):
        slices = [slice(at, at + 8 // trainers) for at in range(0, 8, 8 // trainers)]
        asked = {"seed": 0, "rows": 8, "steps": 6}
        parts = []
        for local in slices:
            with data.train_batches(schedule, local_rows=local, **asked) as made:
                parts.append(list(made))
        return [
            {name: np.concatenate([part[name] for part in step]) for name in step[0]}
            for step in zip(*parts, strict=True)
        ]

    config = {"sequence": 64, "store": str(tmp_path / "store"), "loaders": 2}
    with open_data(DataConfig(str(path), **config)) as data:
        expected = batches(data, 1)
    with open_data(DataConfig(str(path), **config, workers="ray")) as data:
        for trainers, victim in ((1, "ray::Actor"), (2, "raylet/raylet"), (4, "gcs_server"), (1, "")):
            for one, other in zip(batches(data, trainers), expected, strict=True):
                assert all(np.array_equal(one[name], other[name]) for name in other)
            if victim:
                os.kill(descendants(victim)[0], signal.SIGKILL)
                deadline, lost = time.monotonic() + 30, data.workers._runs.process
                while "actor" not in victim.lower() and lost is data.workers._runs.process:
                    assert time.monotonic() < deadline, f"nobody has seen that {victim} died"
                    time.sleep(0.1)
        assert data.workers.restarts >= 5  # an actor, and twice a driver with its two
        left = descendants()
        assert len(left) >= 5
    assert gone(left)


PROGRAM = """
import sys, numpy as np
from pathlib import Path
from jaxthru.data.store import text_store
from jaxthru.data.loading.token_workers import TokenWorkers
from jaxthru.data.sources.transforms import Transform
folder = Path(sys.argv[1])
transforms = {"hanging": Transform("hanging:change", str(folder))}
workers = TokenWorkers(1, ("hanging",), Path(sys.argv[2]), transforms, backend="ray")
workers.request("hanging", text_store.TextStore(folder / "s").train, np.array([0])).result()
"""


@pytest.mark.slow(minutes=0.3)
def test_nothing_is_left_of_a_run_that_is_killed(tmp_path, tokenizer, descendants):
    """Not even of an actor that hangs."""
    pytest.importorskip("ray")
    write_store(tmp_path / "s", tokenizer, ["one", "two"])
    mark = tmp_path / "hung"
    wait = f"import pathlib, time\ndef change(text):\n    pathlib.Path({str(mark)!r}).touch()\n"
    (tmp_path / "hanging.py").write_text(f"{wait}    time.sleep(600)\n")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(tokenizer.path)]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(command, env=environment)
    deadline = time.monotonic() + 120
    while not mark.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    left = descendants()
    process.kill()
    process.wait()
    assert len(left) >= 5 and gone(left)


@pytest.mark.slow(minutes=0.3)
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # Ray's cluster forks where JAX has threads
def test_actors_of_a_named_cluster_leave_the_cores_beside_gpus_alone(tmp_path, tokenizer, monkeypatch):
    """One that dies with its node is had on another, and a text that ends its actor is named."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    texts = [f"document {number}" for number in range(50)]
    ids = write_store(tmp_path / "s", tokenizer, texts)
    split = text_store.TextStore(tmp_path / "s").train
    (tmp_path / "deadly.py").write_text("import os\ndef change(text):\n    os.kill(os.getpid(), 9)\n")
    transforms = {"deadly": Transform("deadly:change", str(tmp_path))}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1})
    try:
        node = cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with TokenWorkers(1, ("books", "deadly"), tokenizer.path, transforms, backend="ray") as workers:
            asked = workers.request("books", split, np.arange(50))
            assert np.array_equal(asked.result(), np.concatenate(ids))
            cluster.remove_node(node, allow_graceful=False)
            asked = workers.request("books", split, np.arange(50))  # the GPU's node is better than none
            assert np.array_equal(asked.result(), np.concatenate(ids))
            # Its own driver's node lives on, so that a death on it is laid to the text.
            fatal = workers.request("deadly", split, np.array([1]))
            named = r"a token worker on node \S+ ended \(.*died\) 3 times .*source deadly: chunks 1 to 1"
            with pytest.raises(InputError, match=named):
                fatal.result()
    finally:
        cluster.shutdown()
