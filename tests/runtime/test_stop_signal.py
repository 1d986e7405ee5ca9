"""Processes that run up to a step apart stop at the same step, and seldom ask whether to."""

import random

import jax
import pytest

from jaxthru.runtime import stop_signal
from jaxthru.runtime.stop_signal import StopSignal


class Store:
    """The job's store, and the announcements of process 0: the last two are kept."""

    def __init__(self):
        self.texts, self.announced, self.asked = {}, {}, 0

    def key_value_set(self, key: str, text: str) -> None:
        if key in self.texts:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.texts[key] = text

    def try_get(self, key: str) -> str | None:
        self.asked += 1
        return self.texts.get(key)


class Board:
    def __init__(self, store: Store, speaks: bool):
        self.store, self.speaks = store, speaks

    def publish(self, number: int, text: str) -> None:
        self.store.announced[number] = text
        self.store.announced.pop(number - 2, None)

    def read(self, number: int) -> str:
        self.store.asked += 1
        return self.store.announced[number]  # KeyError: a process would have to wait


def stopped(monkeypatch, pace, requests: dict[int, int], seed: int, first: int = 1) -> tuple[int, int]:
    """Returns the step at which three processes stop, and how often they asked the store. pace: seconds of a
    step, or what returns them. requests: process -> the step at which it is asked to stop."""
    draw, now, store, count = random.Random(seed), [0.0], Store(), 3
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(stop_signal, "key_value_store", lambda: store)
    monkeypatch.setattr(stop_signal, "try_get", store.try_get)
    monkeypatch.setattr(stop_signal, "Announcements", lambda folder: Board(store, index == 0))
    stops = [StopSignal(lambda: now[0]) for _ in range(count)]
    for stop in stops:
        stop._key = "stop"
    asked, ends = [first - 1] * count, {}
    while len(ends) < count:
        # Who asks about a step has read the result of the last but one, for which all have dispatched that.
        able = [k for k in range(count) if k not in ends and asked[k] <= min(asked) + 1]
        index = draw.choice(able)
        asked[index] += 1
        if asked[index] == requests.get(index):
            stops[index].request()
        if index == 0:
            now[0] += pace(asked[0]) if callable(pace) else pace
        if stops[index].should_stop(asked[index]):
            ends[index] = asked[index]
    assert len(set(ends.values())) == 1 and all(stop.exit_code == 143 for stop in stops), ends
    return ends[0], store.asked


@pytest.mark.parametrize(("pace", "apart"), [(0.01, 8), (0.1, 8), (0.3, 2), (5.0, 1)])
def test_all_stop_at_the_same_step_soon(monkeypatch, pace, apart):
    draw = random.Random(7)
    for seed in range(150):
        at, first = draw.randrange(65, 300), draw.choice((1, 41))
        requests = {k: first + at + draw.randrange(3) for k in draw.sample(range(3), draw.choice((1, 1, 2)))}
        step, _ = stopped(monkeypatch, pace, requests, seed, first)
        soon = min(requests.values()) + StopSignal.AHEAD
        ahead = len(requests) > 1  # the process that publishes first may be a step ahead
        assert soon <= step < soon + ahead + apart, (seed, requests, step)


def test_all_stop_at_the_same_step_as_steps_become_slow_or_short(monkeypatch):
    draw = random.Random(8)
    for seed in range(150):
        before, after = draw.sample((0.01, 0.2, 0.4, 60.0), 2)
        pace = [before] * draw.randrange(300) + [after] * 600
        at = draw.randrange(300)
        step, _ = stopped(monkeypatch, pace.__getitem__, {draw.randrange(3): at + 1}, seed)
        assert at + 1 + StopSignal.AHEAD <= step <= at + StopSignal.AHEAD + StopSignal.APART, (seed, at, step)


def test_short_steps_seldom_ask_the_store(monkeypatch):
    step, asked = stopped(monkeypatch, 0.1, {1: 1000}, seed=3)
    assert 1000 < step <= 1010 and asked < 3 * (64 + 1000 / 8 + 1000 / 64 + 4)
