"""The other processes of a run: whether they live, and why one ended. What ends one soon ends all, by name.

Each process tells the job's coordinator, which is in process 0, every 2 seconds that it lives. Process 0
sees who tells it no more. Whoever fails says so there, and the others end with its exit code, although their
main threads may wait in a collective for what never comes.
"""

import contextlib
import dataclasses
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from jaxthru.runtime import crashes, pulse
from jaxthru.runtime.distributed import (
    MEET_SECONDS,
    coordinator,
    coordinator_listens,
    key_value_store,
    try_get,
    within,
)
from jaxthru.runtime.errors import Fault, PeerError, ending, may_be_anothers
from jaxthru.runtime.exit_codes import CANNOT_GO_ON, PEER_LOST
from jaxthru.runtime.host_seconds import HostSeconds, slowest

BEAT_SECONDS = 2.0
LOST_BEATS = 9
"""After so many beats of its own without one of a process, a process takes that for lost. What is counted are
beats and no seconds: a stop of the whole job is no loss. One whose `pulse` goes on is none either."""
FIRST_BEATS = MEET_SECONDS / BEAT_SECONDS
"""The same before its first: each may have work of its own before the run."""
SUSPECTED_BEATS = 2
"""The same, once a collective has failed. So late are pulses looked at, too."""
GRACE_SECONDS = 2.0
"""How long the main thread has to end by itself, as it may know better why."""
UNWIND_SECONDS = 12.0
"""The same for one that has begun to."""
LINGER_SECONDS = 6.0
"""How long process 0 stays for the others to read why they end, at most."""
LEFT, GONE = "left", "gone"
"""What a process says last: it has done its part, or a fault ended it, maybe while process 0 was stopped."""
LEFT_THE_RUN = "has left the run"


class Peers:
    """This process's view of the others. fault: why the run ends, None while it does not."""

    _made = 0  # the same in all processes, because they make them in the same order

    def __init__(self):
        Peers._made += 1
        self._folder = f"jaxthru/peers/{Peers._made}/"
        self.index, self.count = jax.process_index(), jax.process_count()
        self.fault: Fault | None = None
        self._known, self._done, self._saying = threading.Event(), threading.Event(), threading.Lock()
        self._heard, self._suspects, self._speaks = True, False, False
        self._host_seconds = HostSeconds()
        self._beats: dict[int, tuple[str, int]] = {}  # what each said last, and how many beats ago
        self._hosts: dict[int, str] = {}
        self._slowest: dict[str, Any] = slowest({})
        self._set(f"hosts/{self.index}", socket.gethostname())
        self._pulses = None if self.index else pulse.Pulses()
        if self._pulses:
            self._set("pulse", str(self._pulses.port))
        for call in (self._beat, self._watch):
            threading.Thread(target=call, name=f"peers{call.__name__}", daemon=True).start()

    def close(self) -> None:
        """Says that this process has done its part, and watches no more."""
        self.stop()
        self._leave(LEFT)

    def stop(self) -> None:
        """Watches no more: an error that somebody handles ends no process."""
        self._done.set()
        if self._pulses:
            self._pulses.close()

    def host(self, process: int) -> str:
        """Returns the name of a process's host, as far as it has been heard of."""
        return self._hosts.get(process, "host unknown")

    def note(self, seconds: float) -> None:
        """Takes the seconds of a step in which this process's host did not wait for its devices."""
        self._host_seconds.note(seconds)

    def slowest(self) -> dict[str, Any]:
        """Returns, in process 0, what `host_seconds.slowest` does of the processes of late."""
        return self._slowest

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Within, an error is told at once, and not only once all that is around it has been left."""
        try:
            yield
        except BaseException as error:
            found = self.failed(error)
            if found is error:
                raise
            raise found from error

    def failed(self, error: BaseException) -> BaseException:
        """Tells the others what ended this process, unless they were told or it was one of them; returns what
        to raise."""
        if self._speaks:
            return error
        self._speaks = True
        own = ending(error)
        if may_be_anothers(error):
            self._suspects = True  # a collective fails where a process is lost
            fault = self._another((LOST_BEATS if own is None else SUSPECTED_BEATS + 3) * BEAT_SECONDS)
            if fault and fault.process != self.index:
                self._learn(fault)
                return PeerError(fault.line, fault.code)
        why, code = own or (f"failed: {type(error).__name__}: {error}", CANNOT_GO_ON)
        self._publish(Fault(self.index, socket.gethostname(), code, why))
        return error

    def coordinator_lost(self) -> tuple[str, int] | None:
        """Returns the line and the exit code of a lost coordinator, if it is that, or of a known fault."""
        if coordinator_listens():
            return None
        fault = self.fault or Fault(0, self.host(0), PEER_LOST, "is lost: its coordinator is gone")
        return fault.line, fault.code

    def go(self, code: int) -> NoReturn:
        """Ends this process, process 0 as the last: from its coordinator the others hear why."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self._go(code)

    def end(self, code: int, why: str) -> NoReturn:
        """Tells the others why this process ends, and ends it, though its main thread may hang."""
        self._publish(Fault(self.index, socket.gethostname(), code, why))
        self._go(code)

    def _go(self, code: int) -> NoReturn:
        self._done.set()
        if self.index:
            # Process 0 may end as soon as it reads that this one goes, which JAX's client then aborts.
            crashes.explain(signal.SIGABRT, lambda: os._exit(code))
            self._leave(GONE)
        else:
            until = time.monotonic() + LINGER_SECONDS
            while time.monotonic() < until and self._others_here():
                time.sleep(BEAT_SECONDS / 10)
        os._exit(code)

    def _others_here(self) -> bool:
        """Says whether a process that has not left and is not lost may still have to hear of the fault."""
        lost = {self.fault.process} if self.fault else set()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            texts = self._all("beats/")
            return any(texts.get(one) not in (LEFT, GONE) for one in range(1, self.count) if one not in lost)
        return True

    def _another(self, seconds: float) -> Fault | None:
        """Waits so long for the fault of another process, or for one that has left without a word."""
        until = time.monotonic() + seconds
        while not self._known.wait(BEAT_SECONDS) and time.monotonic() < until:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                for process, text in self._all("beats/").items():
                    if text in (LEFT, GONE):
                        return Fault(process, self.host(process), PEER_LOST, LEFT_THE_RUN)
        return self.fault

    def _beat(self) -> None:
        number, pulses = 0, self.index == 0
        while not self._done.wait(BEAT_SECONDS if number else BEAT_SECONDS / 10):  # the hosts are known soon
            number += 1
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the silence is noticed
                self._say(f"{number} {int(self._suspects)} {self._host_seconds.mean()}")
                if said := try_get(f"{self._folder}fault"):
                    self._learn(Fault(**json.loads(said)))
                if len(self._hosts) < self.count:
                    self._hosts = self._all("hosts/")
                if not pulses and (port := try_get(f"{self._folder}pulse")):
                    pulse.begin(coordinator()[0], int(port), self.index)
                    pulses = True
                if self.index == 0:
                    self._look()
                self._heard = True

    def _look(self) -> None:
        """Notes, in process 0, who has given a sign of life, and who is lost."""
        texts, ages = self._all("beats/"), {}
        for process in range(self.count):
            text, (before, age) = texts.get(process, ""), self._beats.get(process, ("", 0))
            ages[process] = text, age + 1 if text == before != LEFT else 0
        self._beats = ages
        said = {process: text.split() for process, text in texts.items()}
        self._slowest = slowest({process: float(words[2]) for process, words in said.items() if words[2:]})
        suspected = any(words[1:2] == ["1"] for words in said.values())
        limit, first = (SUSPECTED_BEATS,) * 2 if suspected else (LOST_BEATS, FIRST_BEATS)
        lost = {process: (math.inf, LEFT_THE_RUN) for process, text in texts.items() if text == GONE}
        for process, (text, age) in ages.items():
            silent = process and age > SUSPECTED_BEATS and self._pulses.silent(process) > 1
            if silent and age > (limit if text else first):
                lost[process] = age, f"is lost: it has given no sign of life for {age * BEAT_SECONDS:.0f} s"
        if lost and not self.fault:
            process = max(lost, key=lost.__getitem__)
            self._publish(Fault(process, self.host(process), PEER_LOST, lost[process][1]))

    def _watch(self) -> None:
        silent = 0
        while not self._known.wait(BEAT_SECONDS):
            if self._done.is_set():
                return
            silent, self._heard = (0 if self._heard else silent + 1), False
            if silent > LOST_BEATS and self.index:
                said = f"is lost: its coordinator has not answered for {silent * BEAT_SECONDS:.0f} s"
                self._learn(Fault(0, self.host(0), PEER_LOST, said))
        self._end(self.fault)

    def _end(self, fault: Fault) -> None:
        """Ends this process, unless its main thread does, or leaves the run, soon."""
        if self._done.wait(GRACE_SECONDS) or (self._speaks and self._done.wait(UNWIND_SECONDS)):
            return
        crashes.say(fault.why if fault.process == self.index else fault.line)
        self._go(fault.code)

    def _learn(self, fault: Fault) -> None:
        if self.fault is None:
            self.fault = fault
            self._known.set()

    def _publish(self, fault: Fault) -> None:
        """Has the first fault be that of the run. The coordinator may be gone, or stopped."""

        def publish() -> None:
            try:
                text = json.dumps(dataclasses.asdict(fault))
                key_value_store().key_value_set(f"{self._folder}fault", text)
                self._learn(fault)
            except jax.errors.JaxRuntimeError as error:
                if "ALREADY_EXISTS" in str(error) and (said := try_get(f"{self._folder}fault")):
                    self._learn(Fault(**json.loads(said)))

        within(3.0, publish)
        self._learn(fault)

    def _leave(self, how: str) -> None:
        within(1.0, lambda: self._say(how))

    def _say(self, text: str) -> None:
        """Says how this process is. No beat takes the place of its last word."""
        with self._saying:
            if text in (LEFT, GONE) or not self._done.is_set():
                self._set(f"beats/{self.index}", text)

    def _set(self, key: str, text: str) -> None:
        key_value_store().key_value_set(f"{self._folder}{key}", text, allow_overwrite=True)

    def _all(self, folder: str) -> dict[int, str]:
        """Returns what each process has set in a folder, by process."""
        found = key_value_store().key_value_dir_get(f"{self._folder}{folder}")
        return {int(key.rpartition("/")[2]): text for key, text in found}


class NoPeers:
    """One process alone."""

    fault = None

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """There is nobody to tell."""
        return contextlib.nullcontext()

    def note(self, seconds: float) -> None:
        """There is nobody to tell."""

    def slowest(self) -> dict[str, Any]:
        """Returns no fields."""
        return {}

    def end(self, code: int, why: str) -> NoReturn:
        """Ends the process."""
        os._exit(code)


_current: Peers | NoPeers = NoPeers()


def current() -> Peers | NoPeers:
    """Returns the peers of the run that this process is in."""
    return _current


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Within, a fault of one process is a fault of all. Call it where `distributed.initialize` was called.

    Raises PeerError in place of what a lost process makes JAX raise.
    """
    global _current
    if not jax.distributed.is_initialized():
        yield
        return
    _current = peers = Peers()
    if peers.index:
        crashes.explain(signal.SIGABRT, peers.coordinator_lost)
    try:
        with peers.telling():
            yield
    except BaseException:
        peers.stop()
        raise
    peers.close()
    _current = NoPeers()
