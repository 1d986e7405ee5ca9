"""Joules and dollars of steps and runs: with a counter of NVML's that is made up, and without one."""

import itertools
import json
import math
import threading
from types import SimpleNamespace

import jax
import pytest
from runs import ROOT
from test_metrics import finished
from test_step_timer import Listener, metrics

from jaxthru import config as configuration
from jaxthru.profile.account import build, ledger
from jaxthru.runtime import nvml
from jaxthru.runtime.errors import InputError
from jaxthru.training import cost, curves, display, energy
from jaxthru.training.cost import CostConfig
from jaxthru.training.energy import StepEnergy
from jaxthru.training.metrics import Meter
from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.step_timer import StepTimer


class Library:
    """NVML of two GPUs, whose counters move by 100 J and 150 J at each reading."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.millijoules = {"0": 5e6, "1": 7e6}

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):
        return bus_id

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if handle not in self.millijoules:
            raise self.NVMLError("not supported")
        self.millijoules[handle] += {"0": 100e3, "1": 150e3}[handle]
        return self.millijoules[handle]


@pytest.fixture
def gpus(monkeypatch):
    """Returns a function that gives this process GPUs of these numbers."""
    monkeypatch.setattr(nvml, "bus_ids", lambda: ("0", "1", "2"))
    found = Library()
    monkeypatch.setattr(nvml, "nvml", lambda: found)

    def give(*numbers, platform="gpu"):
        devices = [SimpleNamespace(platform=platform, local_hardware_id=number) for number in numbers]
        monkeypatch.setattr(energy.jax, "local_devices", lambda: devices)

    return give


def test_a_counter_is_of_all_devices_of_the_process(gpus):
    gpus(0, 1)
    counter = energy.counter_here()
    assert counter() - counter() == -250
    gpus(1)
    counter = energy.counter_here()
    assert counter() - counter() == -150


def test_where_a_device_does_not_count_nothing_is_known(gpus, monkeypatch):
    gpus(0, 2)
    assert energy.counter_here() is None
    gpus(0, 5)  # which CUDA does not show
    assert energy.counter_here() is None
    gpus(0, platform="cpu")
    assert energy.counter_here() is None
    gpus(0)
    monkeypatch.setattr(nvml, "nvml", lambda: None)
    assert energy.counter_here() is None
    none = StepEnergy(None)
    none.begin()
    assert none.end() is None


def counter(*joules):
    return iter(joules).__next__


def test_steps_are_charged_from_begin_to_end():
    found = StepEnergy(counter(10.0, 15.0, 18.0, 100.0, 101.0))
    found.begin()
    assert [found.end(), found.end()] == [5.0, 3.0]
    found.begin()  # an evaluation lay between
    assert found.end() == 1.0


def test_a_counter_that_ends_makes_the_rest_unknown():
    found = StepEnergy(counter(10.0, 15.0, None, 30.0))
    found.begin()
    assert [found.end(), found.end(), found.end()] == [5.0, None, None]


class Notices:
    def __init__(self, texts):
        self.texts, self.published = texts, []

    def publish(self, text):
        self.published.append(text)

    def others(self):
        return self.texts


def test_other_processes_are_added_as_they_publish(monkeypatch):
    monkeypatch.setattr(energy, "EVERY", 0.0)
    texts = {1: "7.5"}
    notices = Notices(texts)
    found = StepEnergy(counter(0.0, 5.0, 10.0, 15.0, 20.0), notices)
    found.begin()
    assert found.end() == 12.5
    assert found.end() == 5.0  # the other has not said more yet
    texts[1], texts[2] = "20.0", "1.0"
    assert found.end() == 5.0 + 12.5 + 1.0
    assert notices.published == ["5.0", "10.0", "15.0"]
    texts[2] = ""  # it does not know
    assert found.end() is None


def test_a_lost_coordinator_makes_joules_unknown_and_ends_nothing(monkeypatch):
    monkeypatch.setattr(energy, "EVERY", 0.0)

    class Lost(Notices):
        def publish(self, text):
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")

    found = StepEnergy(counter(0.0, 5.0, 10.0), Lost({}))
    found.begin()
    assert [found.end(), found.end()] == [None, None]


def test_the_loop_does_not_wait_for_a_counter():
    answers, joules = threading.Event(), itertools.count(0.0, 2.0)

    def slow():
        assert answers.wait(60)
        return next(joules)

    listener = Listener()
    meter = Meter(lambda tokens, span: tokens, None, devices=2)
    timer = StepTimer(meter, ("a", "b"), 3, listener, listener, listener, StepEnergy(slow))
    timer.restart_clock()  # as after an evaluation
    timer.dispatched(1, metrics())  # returns, though the counter does not answer
    answers.set()
    timer.finish_step()
    timer.dispatched(2, metrics())
    timer.finish_step()
    assert [row["joules"] for row in listener.rows] == [2.0, 2.0]
    assert [row["joules_per_token"] for row in listener.rows] == [1.0, 1.0]


def test_what_a_step_costs():
    own = CostConfig(dollars_per_device_hour=3.6, watts_beside=100, pue=1.5)
    row = Meter(lambda tokens, span: 1.0, None, cost=own, devices=4).row(finished(1, joules=800.0))
    assert row["joules"] == (800 + 100 * 4 * 0.5) * 1.5
    assert row["dollars"] == pytest.approx(3.6 * 4 * 0.5 / 3600)
    assert row["joules_per_token"] == row["joules"] / 1000
    assert row["dollars_per_million_tokens"] == pytest.approx(1000 * row["dollars"])


def test_nothing_is_assumed():
    row = Meter(lambda tokens, span: 1.0, None).row(finished(1))
    assert [row[field] for field in cost.FIELDS] == [None] * 4
    row = Meter(lambda tokens, span: 1.0, None).row(finished(1, joules=5.0, tokens=0))
    assert [row[field] for field in cost.FIELDS] == [5.0, None, None, None]
    assert CostConfig() == CostConfig(None, None, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [("dollars_per_device_hour", -1), ("watts_beside", math.nan), ("pue", 0.9), ("pue", math.inf)],
)
def test_impossible_costs_are_refused(key, value):
    with pytest.raises(InputError, match=f"cost.{key}"):
        CostConfig(**{key: value})


def test_costs_may_change_on_resume():
    assert configuration.changeable("cost.pue")
    config = configuration.load(ROOT / "configs" / "quickstart.py", ["cost.dollars_per_device_hour=2.5"])
    assert config.cost == CostConfig(dollars_per_device_hour=2.5)


def rows(joules, dollars=(1.0, 2.0, 3.0)):
    return [
        {"step": step, "tokens": 10, "joules": each, "dollars": price}
        for step, (each, price) in enumerate(zip(joules, dollars, strict=True), start=1)
    ]


def test_a_total_is_exact_and_unknown_where_a_step_is():
    found = cost.total(rows((0.1, 0.2, 0.3)))
    assert (found.tokens, found.joules, found.dollars) == (30, math.fsum((0.1, 0.2, 0.3)), 6.0)
    assert found.dollars_per_million_tokens == 6.0 / 30 * 1e6
    found = cost.total(rows((0.1, None, 0.3)))
    assert (found.joules, found.joules_per_token, found.dollars) == (None, None, 6.0)
    assert cost.total([]).joules is None


def test_the_final_table_has_the_sums_of_the_metrics(tmp_path):
    run = RunDirectory(tmp_path)
    meter = Meter(lambda t, s: 1.0, None, cost=CostConfig(dollars_per_device_hour=3600.0))
    for step in (1, 2):
        run.append_metrics(meter.row(finished(step, joules=1.8e6)))
    run.cut(1)  # killed after step 2, resumed from step 1
    run.append_metrics(meter.row(finished(2, joules=1.8e6)))
    found = dict(display.summary(run))
    assert found["energy of the steps"] == "1 kWh, 1.8e+06 mJ a token"
    assert found["dollars of the steps"] == "1, 500 a million tokens"
    run.append_metrics(Meter(lambda t, s: 1.0, None).row(finished(3)))
    assert not [name for name in dict(display.summary(run)) if "energy" in name or "dollars" in name]


def test_runs_are_compared_by_what_they_cost(tmp_path):
    runs = {}
    for name, joules in (("a", 800.0), ("b", None)):
        runs[name] = RunDirectory(tmp_path / name)
        runs[name].path.mkdir()
        runs[name].append_metrics(Meter(lambda t, s: 1.0, None).row(finished(1, joules=joules)))
    found = {line.title: line.values for line in curves.table_of(runs)}
    assert found["joules of the steps"] == [800, None]
    assert found["joules per token of the steps"] == [0.8, None]
    assert not [name for name in found if "dollars" in name]  # neither has a price


def test_a_ledger_has_the_means_of_the_steps_that_ran_as_ever():
    found = build._cost(rows((1.0, 2.0, 6.0)))
    assert found == ledger.Cost(3.0, 0.3, 2.0, 6.0 / 30 * 1e6)
    assert build._cost([]) == ledger.Cost()
    assert json.loads(json.dumps(found.__dict__)) == found.__dict__
