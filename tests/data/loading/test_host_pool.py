"""The data server of a host gives the batches of one process."""

import dataclasses
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from corpus import MIX, write_corpus

from jaxthru.data.loading import host_channel
from jaxthru.data.loading.batch import check_batch
from jaxthru.data.loading.batch_memory import BatchMemory
from jaxthru.data.loading.dataset import Data, DataConfig, open_data, prepare_data
from jaxthru.data.loading.host_batches import Server
from jaxthru.data.loading.host_channel import connect, receive, send
from jaxthru.data.loading.host_client import Host
from jaxthru.data.loading.host_pool import HostData
from jaxthru.data.mixture.planner import Planner
from jaxthru.runtime.errors import InputError, TrainingError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract sockets")

ROWS, SEQUENCE, STEPS = 8, 32, 12
ASKED = {"seed": 3, "rows": ROWS, "steps": STEPS, "cost": (1.0, 1.0)}


def host(trainers: int = 2) -> Host:
    return Host(f"jaxthru-test-{secrets.token_hex(8)}", trainers, sorted(os.sched_getaffinity(0)))


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> DataConfig:
    """Of a mix of an online source and a prepared one."""
    folder = tmp_path_factory.mktemp("host")
    write_corpus(folder)
    mix = folder / "small.toml"
    mix.write_text(MIX.replace("weight = 3", "online = true\nweight = 3"))
    return DataConfig(str(mix), SEQUENCE, "best_fit", str(folder / "store"), loaders=1)


@pytest.fixture(scope="module")
def keys(config) -> dict[str, str]:
    return prepare_data(config)


@pytest.fixture(scope="module")
def expected(config, keys) -> list[dict[str, np.ndarray]]:
    """The batches of a process that is alone."""
    with alone(config, keys) as data, data.train_batches(((0, data.mixture),), **ASKED) as batches:
        return [{name: array.copy() for name, array in batch.items()} for batch in batches]


def alone(config, keys) -> Data:
    return open_data(config, prepare=False, begun=keys)


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def ended(process: int, seconds: float = 10) -> bool:
    """Says whether a process has ended, or does soon."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if "\nState:\tZ" in Path(f"/proc/{process}/status").read_text():
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def children(process: int) -> list[int]:
    threads = Path(f"/proc/{process}/task").glob("*/children")
    return [int(word) for thread in threads for word in thread.read_text().split()]


@pytest.fixture
def one_core():
    """This process may use one core, as a task of a scheduler may."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield cores
    os.sched_setaffinity(0, cores)


def test_trainers_get_the_batches_of_one_process(config, keys, expected, one_core):
    place = host()._replace(cores=sorted(one_core))
    with (
        alone(config, keys) as data,
        HostData(place, config, keys) as one,
        HostData(place, config, keys) as other,
    ):
        server = one._client._server
        assert other._client._server == server != os.getpid()
        files = Path(f"/proc/{server}/fd")  # whoever reads what a trainer prints sees its end
        assert (files / "1").readlink() == (files / "2").readlink()
        facts = ("names", "mixture", "keys", "vocabulary", "segments", "rows", "pieces", "tokens", "counted")
        for name in (*facts, "account", "masked", "units"):
            assert getattr(one, name) == getattr(data, name), name
        assert (one.threads, data.threads) == (2, 4)  # of both trainers together as many
        assert one.tokenizer.identity == data.tokenizer.identity
        schedule, half = ((0, one.mixture),), ROWS // 2
        parts = [
            each.train_batches(schedule, **ASKED, local_rows=rows)
            for each, rows in ((one, slice(0, half)), (other, slice(half, ROWS)))
        ]
        for step, (first, second) in enumerate(zip(*parts, strict=True)):
            check_batch(first, half, SEQUENCE)
            joined = {name: np.concatenate([first[name], second[name]]) for name in first}
            assert same(joined, expected[step])
            with pytest.raises(ValueError, match="read-only"):
                first["tokens"][0, 0] = 0
        for part in parts:
            part.close()
        assert step == STEPS - 1
        (worker,) = children(server)
        assert os.sched_getaffinity(server) == os.sched_getaffinity(worker) == one_core
        assert same(one.dataset(**ASKED)[7], expected[7])
        held_out = {"total_rows": 20, "rows": 8, "local_rows": slice(2, 6)}
        pairs = zip(one.held_out_batches(**held_out), data.held_out_batches(**held_out), strict=True)
        assert all(same(*pair) for pair in pairs)
        ends = {"seed": 3, "rows": ROWS, "steps": STEPS}
        assert one.last_step(schedule, **ends) == data.last_step(schedule, **ends)
        found, still = one.dataset(**ASKED)[7], other.dataset(**ASKED)
        one.close()
        assert all(same(still[step], expected[step]) for step in range(STEPS))
        assert same(found, expected[7])  # nothing has been written over it
    assert ended(server)


def test_what_an_objective_asks_for_comes_with_the_batches(config, keys, expected):
    """Its answers belong to documents, which are numbered as in the server."""
    with alone(config, keys) as data, HostData(host(), config, keys) as pooled:
        assert pooled.builder.checksum() == data.builder.checksum()
        assert pooled.builder.piece_count == data.builder.piece_count
        plan = pooled.planner(((0, data.mixture),), seed=3, rows=ROWS, cost=(1.0, 1.0)).plan(2)
        where = plan.source, plan.row
        for one, other in zip(pooled.builder.pieces(*where), data.builder.pieces(*where), strict=True):
            assert np.array_equal(one, other)
        assert same(pooled.builder.build(*where), expected[2])
        values = np.arange(pooled.builder.piece_count, dtype=np.float32)
        for each in (pooled, data):
            each.builder.add_column("reference", values, data.segments)
        assert pooled.builder.columns == ("reference",)
        found = pooled.dataset(**ASKED)
        assert same(found[2], data.builder.build(*where))
        os.kill(pooled._client._server, signal.SIGKILL)
        assert same(found[2], data.builder.build(*where))


def test_a_server_that_dies_is_started_anew(config, keys, expected, caplog):
    place = host()
    with HostData(place, config, keys) as one, HostData(place, config, keys) as other:
        first = one._client._server
        found, beside = one.dataset(**ASKED), other.dataset(**ASKED)
        kept = [found[0], beside[0]]
        (worker,) = children(first)
        for number in (signal.SIGINT, signal.SIGTERM):  # which ask the whole run for a stop
            os.kill(first, number)
        assert same(found[1], expected[1]) and one._client._server == first
        os.kill(worker, signal.SIGKILL)
        assert same(found[2], expected[2]) and one._client._server == first
        os.kill(first, signal.SIGKILL)
        # Both find out at once, and one of them starts it.
        answers = {}
        ask = [
            threading.Thread(target=lambda name=name, each=each: answers.update({name: each[3]}))
            for name, each in (("one", found), ("other", beside))
        ]
        for thread in ask:
            thread.start()
        for thread in ask:
            thread.join()
        assert same(answers["one"], expected[3]) and same(answers["other"], expected[3])
        second = one._client._server
        assert second == other._client._server != first
        assert all(same(each, expected[0]) for each in kept)  # memory outlives who has written it
        (worker,) = children(second)
    assert ended(second) and ended(worker)
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert said == ["the data server of this host ended with code -9: another is started, and asked again"]


def test_what_is_wrong_is_said_in_one_line_to_each(config, keys, tmp_path):
    place = host()
    with HostData(place, config, keys):
        other = dataclasses.replace(config, sequence=64)
        with pytest.raises(InputError, match=r"^data.sequence = 64: another process .* has 32; give all"):
            HostData(place, other, keys)
        with pytest.raises(InputError, match=r"sources that differ .*: notes"):
            HostData(place, config, keys | {"notes": "0"})
        with pytest.raises(InputError, match=r"data\.mix = 'nowhere': no such mix"):
            HostData(host(), dataclasses.replace(config, mix="nowhere"), keys)
    place = host()
    gone = dataclasses.replace(config, store=str(tmp_path / "gone"))
    for _ in range(2):  # the second is told the same
        with pytest.raises(InputError, match=r"source books: not prepared in .*gone"):
            HostData(place, gone, keys)


def test_a_request_that_fails_fails_alone(config, keys, expected):
    with HostData(host(), config, keys) as data:
        server = data._client._server
        found = data.dataset(**ASKED)
        with pytest.raises(TrainingError, match=r"data server of this host: .*Error"):
            data._client.ask("rows_of", key="none", step=0)
        with pytest.raises(TrainingError, match=r"data server of this host: .*Error"):
            data._client.ask("nothing")
        assert same(found[4], expected[4]) and data._client._server == server
    with pytest.raises(InputError, match="is closed"):
        found[5]


def test_data_of_a_host_has_no_copies(config, keys):
    with HostData(host(), config, keys) as data:
        with pytest.raises(InputError, match="no copies"):
            pickle.dumps(data)
        with pytest.raises(InputError, match="mp_prefetch"):
            pickle.dumps(data.planned(((0, data.mixture),), **ASKED))
        assert "books" in repr(data)


def test_a_step_is_planned_once_for_all_trainers(config, keys, monkeypatch):
    plan, planned = Planner.plan, []

    def counted(self, step):
        planned.append(step)
        time.sleep(0.05)  # others come meanwhile
        return plan(self, step)

    monkeypatch.setattr(Planner, "plan", counted)
    with alone(config, keys) as data:
        batches = data.planned(((0, data.mixture),), **ASKED)
        threads = [threading.Thread(target=batches.plan, args=(3,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert planned == [3]


class Counted:
    """Plans whose batches are counted."""

    def __init__(self, memory: BatchMemory):
        self.memory, self.built = memory, []

    def build(self, step: int, rows: slice) -> dict[str, np.ndarray]:
        time.sleep(0.01)  # others come while it is built
        self.built.append((step, rows.start, rows.stop))
        if step == 9:
            raise InputError("damaged")
        batch = self.memory.take(rows.stop - rows.start, SEQUENCE)
        batch["tokens"].fill(step)
        return batch


@pytest.fixture
def counted():
    """A server without stores, two trainers of the same rows and one of others; and what it builds."""
    server = Server()
    plans = server.plans["plan"] = Counted(server.blocks.memory(4))
    for trainer, local in (("a", (0, 4)), ("b", (0, 4)), ("c", (4, 8))):
        server.joined(trainer)
        server.takes(trainer, "plan", local)
    return server, plans


def test_rows_that_trainers_share_are_built_once(counted):
    server, plans = counted
    found = {}
    asked = [("a", (0, 4)), ("b", (0, 4)), ("c", (4, 8))]
    for step in range(3):
        threads = [
            threading.Thread(
                target=lambda who=who, local=local, step=step: found.update(
                    {(who, step): server.batch(who, "plan", local, step)}
                )
            )
            for who, local in asked
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(plans.built) == [(step, *local) for step in range(3) for local in ((0, 4), (4, 8))]
    assert found["a", 1][1] is found["b", 1][1] and found["a", 1][0] != found["b", 1][0]
    assert not server.built
    for who in "ab":
        with pytest.raises(InputError, match="damaged"):
            server.batch(who, "plan", (0, 4), 9)
    assert not server.built


def test_memory_comes_back_from_trainers_that_release_it_or_leave(counted):
    server, plans = counted
    for step in range(20):
        number, batch = server.batch("c", "plan", (4, 8), step + 10)
        assert server.blocks.places(batch)[1]["tokens"] == 0
        del batch
        server.release("c", [number])
    assert len(server.blocks) == 1
    for step in range(5):
        server.batch("c", "plan", (4, 8), step + 40)
    assert len(server.blocks) == 5
    server.left("c")
    for step in range(3):
        server.batch("a", "plan", (4, 8), step + 60)
    assert len(server.blocks) <= 5
    number, _ = server.batch("b", "plan", (0, 4), 70)
    other = Server()
    other.release("b", [number])  # of a server before it
    other.plans["plan"] = plans
    assert other.batch("b", "plan", (0, 4), 70)[0] != number


def test_what_a_trainer_that_leaves_may_look_at_is_not_written_again(counted):
    server, _ = counted
    _, batch = server.batch("c", "plan", (4, 8), 20)
    block, _ = server.blocks.places(batch)
    del batch
    server.left("c")
    _, batch = server.batch("a", "plan", (0, 4), 21)
    assert server.blocks.places(batch)[0] is not block


def test_a_slow_trainer_holds_up_no_memory(counted):
    """Of a pair one is far ahead: what it has taken is kept for the other up to a bound, then built again."""
    server, plans = counted
    for step in range(100, 200):
        server.release("a", [server.batch("a", "plan", (0, 4), step)[0]])
    assert len(server.built) <= 2 * 16
    _, batch = server.batch("b", "plan", (0, 4), 100)
    assert (batch["tokens"] == 100).all() and plans.built.count((100, 0, 4)) == 2


def test_messages_bring_arrays_of_any_shape():
    one, other = (Connection(end.detach()) for end in socket.socketpair())
    arrays = {
        "empty": np.zeros((0, 3), np.int64),
        "number": np.float32(7).reshape(()),
        "turned": np.arange(12, dtype=np.int32).reshape(3, 4).T,
    }
    with one, other:
        send(one, {"said": "ä"}, arrays)
        message, found = receive(other)
        assert message == {"said": "ä"} and found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert np.array_equal(found[name], array) and found[name].dtype == array.dtype
            assert found[name].shape == array.shape
        send(one, {}, {"empty": arrays["empty"]})
        assert receive(other)[1]["empty"].shape == (0, 3)
        released = []
        send(one, {"number": 1}, arrays)
        message, found = receive(other, released.append)
        view = found.pop("turned")[1:]
        found.clear()
        assert not released and view[0, 0] == 1
        del view
        assert released == [message]


def test_of_strangers_none_is_served(monkeypatch):
    """Whoever knows the name may connect, and only a process of the same user is answered."""
    name = host().name
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        monkeypatch.setattr(host_channel.os, "getuid", lambda: 12345)
        with pytest.raises(InputError, match="is of another user"):
            connect(name)
