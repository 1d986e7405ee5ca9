"""What the processes of a run hear of each other, over a store that is a dict; for real: test_faults."""

import contextlib
import socket
import subprocess
import sys
import time

import jax
import pytest

from jaxthru.runtime import peers, pulse
from jaxthru.runtime.errors import InputError, PeerError, TrainingError
from jaxthru.runtime.host_seconds import SLOWEST_FIELDS
from jaxthru.runtime.peers import Fault, NoPeers, Peers

begin = pulse.begin  # which `pair` takes away


class Store(dict):
    """The coordinator's store. gone: it answers no more."""

    gone = False

    def key_value_set(self, key, text, allow_overwrite=False):
        self.answer()
        if key in self and not allow_overwrite:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self[key] = text

    def key_value_dir_get(self, folder):
        self.answer()
        return [(key, text) for key, text in list(self.items()) if key.startswith(folder)]

    def answer(self):
        if self.gone:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")


@pytest.fixture
def pair(monkeypatch):
    """Returns the views that two processes have of each other, and the store."""
    store = Store()
    monkeypatch.setattr(peers, "key_value_store", lambda: store)
    monkeypatch.setattr(peers, "try_get", lambda key: store.answer() or store.get(key))
    monkeypatch.setattr(peers, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(peers, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(peers, "coordinator", lambda: ("127.0.0.1", 0))
    monkeypatch.setattr(pulse, "begin", lambda *_: None)
    monkeypatch.setattr(Peers, "_go", lambda self, code: (self._done.set(), self.went.append(code)))
    monkeypatch.setattr(Peers, "went", None, raising=False)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    made = []
    for index in range(2):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        monkeypatch.setattr(Peers, "_made", 0)
        made.append(Peers())
        made[-1].went = []
    yield *made, store
    for each in made:
        each.stop()
    time.sleep(0.03)


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_fault_of_one_ends_the_other(pair, capfd):
    first, second, _ = pair
    error = TrainingError("checkpoint 3 was not saved: File too large")
    assert second.failed(error) is error
    until(lambda: first.went)
    assert first.went == [1] and not second.went
    said = capfd.readouterr().err
    assert said.startswith("jaxthru: process 1 (") and said.endswith(f") {error}\n") and said.count("\n") == 1


def test_the_first_fault_counts(pair):
    first, second, _ = pair
    second.failed(InputError("no such mix"))
    first.failed(RuntimeError("later"))
    assert (first.fault, first.fault.code) == (second.fault, 2)


def test_what_nobody_foresaw_is_told_too(pair):
    first, second, _ = pair
    second.failed(ZeroDivisionError("division by zero"))
    until(lambda: first.fault)
    assert first.fault.why == "failed: ZeroDivisionError: division by zero" and first.fault.code == 1


GLOO = "UNKNOWN: Gloo AllGather failed: Read error [127.0.0.1]:29577: Connection reset by peer"


@pytest.mark.parametrize(
    "suspected",
    [None, jax.errors.JaxRuntimeError(GLOO), TrainingError(f"checkpoint 33 was not saved: {GLOO}")],
    ids=["silence", "collective", "save"],
)
def test_who_gives_no_sign_of_life_is_lost(pair, suspected, monkeypatch):
    first, second, _ = pair
    monkeypatch.setattr(peers, "LOST_BEATS", 10_000 if suspected else 30)
    until(lambda: first.host(1) != "host unknown")
    second._done.set()
    if suspected:  # by a collective that has failed: the error is said to be the peer's
        error = first.failed(suspected)
        assert isinstance(error, PeerError) and error.code == 160
        assert f"process 1 ({first.host(1)}) is lost: it has given no sign of life" in str(error)
    else:
        until(lambda: first.went)
        assert first.went == [160] and first.fault.process == 1


def test_a_process_is_waited_for_before_its_first_beat(pair, monkeypatch):
    first, second, store = pair
    monkeypatch.setattr(peers, "LOST_BEATS", 10_000)
    second._done.set()
    time.sleep(0.05)
    beat = f"{second._folder}beats/1"
    store.pop(beat, None)
    first._beats = {}
    monkeypatch.setattr(peers, "LOST_BEATS", 3)
    time.sleep(0.3)
    assert first.fault is None
    store[beat] = "1 0 "
    until(lambda: first.fault)
    assert first.fault.process == 1


def test_who_gives_a_pulse_is_not_lost(pair, monkeypatch):
    """Its beats may be late: a call into C keeps the interpreter's lock."""
    first, second, _ = pair
    monkeypatch.setattr(peers, "LOST_BEATS", 10_000)
    begin("127.0.0.1", first._pulses.port, 1)
    until(lambda: first.host(1) != "host unknown")
    monkeypatch.setattr(peers, "LOST_BEATS", 3)
    second._done.set()
    time.sleep(0.4)
    assert first.fault is None
    first._pulses._sockets[1].close()
    until(lambda: first.fault)


def test_an_error_that_somebody_handles_ends_no_process(pair, monkeypatch):
    first, second, _ = pair
    with pytest.raises(TrainingError), second.telling():
        raise TrainingError("not finite")
    first.failed(TrainingError("not finite"))
    assert first.fault.process == 1
    first.stop()
    time.sleep(0.1)
    assert not first.went and not second.went


def test_an_error_is_told_before_what_is_around_it_has_been_left(pair):
    first, second, _ = pair
    with contextlib.suppress(TrainingError), contextlib.ExitStack() as around:
        around.callback(lambda: until(lambda: first.went))
        with second.telling():
            raise TrainingError("not finite")


def test_one_that_left_without_a_word_is_the_cause_at_once(pair, monkeypatch):
    first, second, _ = pair
    monkeypatch.setattr(peers, "LOST_BEATS", 10_000)
    second.close()
    error = first.failed(jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed"))
    assert isinstance(error, PeerError) and str(error).endswith("has left the run")


def test_who_a_fault_has_ended_while_process_0_was_stopped_is_lost(pair):
    """No collective need fail: process 0 may write a checkpoint, and wait for the other's part."""
    first, second, _ = pair
    second.stop()
    second._leave(peers.GONE)
    until(lambda: first.went)
    assert (first.fault.process, first.fault.why) == (1, "has left the run")


ABORTED_AS_IT_GOES = """
import os, threading
from jaxthru.runtime.peers import Peers

one = object.__new__(Peers)
one.index, one._done, one._leave = 1, threading.Event(), lambda how: os.abort()
one.go(2)
"""


def test_who_goes_keeps_its_code_though_process_0_is_gone_first():
    """JAX's client aborts a process whose coordinator has ended, which it may as soon as it hears of this."""
    assert subprocess.run([sys.executable, "-c", ABORTED_AS_IT_GOES], check=False).returncode == 2


def test_a_coordinator_that_a_fault_has_ended_is_not_the_cause(pair, monkeypatch):
    _, second, _ = pair
    monkeypatch.setattr(peers, "coordinator_listens", lambda: False)
    assert second.coordinator_lost()[1] == 160
    second.failed(InputError("no such mix"))
    assert second.coordinator_lost() == (f"process 1 ({socket.gethostname()}) no such mix", 2)


def test_who_has_left_is_not_lost(pair, monkeypatch):
    first, second, _ = pair
    monkeypatch.setattr(peers, "LOST_BEATS", 3)
    second.close()
    time.sleep(0.2)
    assert first.fault is None


def test_no_beat_takes_the_place_of_the_last_word(pair):
    _, second, store = pair
    second.close()
    second._say("7 0 ")  # as a beat that was on its way
    assert store[f"{second._folder}beats/1"] == peers.LEFT


def test_a_coordinator_that_answers_no_more_is_lost(pair, monkeypatch):
    first, second, store = pair
    monkeypatch.setattr(peers, "LOST_BEATS", 20)
    until(lambda: second.host(0) != "host unknown")
    first._done.set()
    store.gone = True
    until(lambda: second.went)
    assert second.went == [160] and second.fault.process == 0
    assert "its coordinator has not answered" in second.fault.line


def test_the_slowest_host_is_named(pair):
    first, second, _ = pair
    first.note(0.01)
    second.note(0.5)
    until(lambda: None not in first.slowest().values() and first.slowest()["slowest_process"] == 1)
    assert first.slowest() == dict(zip(SLOWEST_FIELDS, (1, 0.5, 0.01), strict=True))
    assert NoPeers().slowest() == {} and NoPeers().fault is None


def test_a_fault_is_one_line():
    assert (
        Fault(1, "b", 1, "x\ny" * 900).line.startswith("process 1 (b) x\\ny")
        and len(Fault(1, "b", 1, "x" * 9000).line) <= 1000
    )
