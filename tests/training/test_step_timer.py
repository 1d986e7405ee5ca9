"""Waits are booked to the step in whose time they fall."""

import contextlib
import time
from concurrent.futures import Future

import jax.numpy as jnp
import numpy as np
import pytest

from jaxthru.runtime.errors import TrainingError
from jaxthru.training import step_timer as module
from jaxthru.training.metrics import Meter
from jaxthru.training.sinks.tensorboard import scalars
from jaxthru.training.step_timer import StepTimer, further_of


class Listener:
    def __init__(self):
        self.rows = []

    def step(self, row):
        self.rows.append(row)

    def update(self, row):
        pass

    def beat(self):
        pass

    def paused(self):
        return contextlib.nullcontext()


def metrics(loss=1.0, in_a_row=0):
    number = lambda value: jnp.asarray(value, jnp.float32)  # noqa: E731
    return {
        "loss": number(loss),
        "source_loss": number([2.0, 0.0]),
        "source_tokens": number([2.0, 0.0]),
        "grad_norm": number(1),
        "learning_rate": number(1),
        "tokens": number(2),
        "attention_span": number(4),
        "skipped": number(in_a_row),
        "skipped_in_a_row": number(in_a_row),
        "partly_updated": number(in_a_row),
    }


def step_timer(listener, skip_limit=3):
    meter = Meter(lambda tokens, span: tokens + span, None)
    return StepTimer(meter, ("a", "b"), skip_limit, listener, listener, listener)


class AtOnce:
    """Calls in this thread: a step is over when it is dispatched, by a clock that stands meanwhile."""

    def submit(self, function, *arguments) -> Future:
        done = Future()
        done.set_result(function(*arguments))
        return done


@pytest.fixture
def later(monkeypatch):
    """Returns a function by which alone time passes."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module, "ThreadPoolExecutor", lambda *_: AtOnce())

    def pass_by(seconds: float) -> None:
        clock[0] += seconds

    return pass_by


def test_a_wait_belongs_to_the_step_that_finishes_next():
    listener = Listener()
    made = step_timer(listener)
    made.waited(0.1)
    made.dispatched(1, metrics())
    made.waited(0.2)  # while step 1 runs
    made.dispatched(2, metrics())
    made.saved(0.4)
    made.finish_step()
    first, second = listener.rows
    assert first["data_wait_seconds"] == pytest.approx(0.3) and first["checkpoint_seconds"] == 0
    assert second["data_wait_seconds"] == 0 and second["checkpoint_seconds"] == 0.4
    assert first["loss_by_source"] == {"a": 1.0, "b": None}


def test_the_first_step_is_told_of_at_once_and_what_follows_is_a_gap(later):
    listener = Listener()
    made = step_timer(listener)
    later(5.0)
    made.dispatched(1, metrics(), first=True)
    assert [(row["step"], row["step_seconds"]) for row in listener.rows] == [(1, 5.0)]
    later(0.25)  # in which its row is written and shown, and the next batch is placed
    made.dispatching()
    later(1.0)
    made.dispatched(2, metrics())
    made.finish_step()
    assert (listener.rows[1]["step_seconds"], listener.rows[1]["host_gap_seconds"]) == (1.25, 0.25)


def test_what_a_model_adds_is_passed_on_by_its_name():
    listener = Listener()
    made = step_timer(listener)
    made.dispatched(1, metrics())
    load = jnp.asarray([1, 3], jnp.int32)
    made.dispatched(2, metrics() | {"balance": jnp.asarray(0.5, jnp.bfloat16), "expert_load": load})
    made.finish_step()
    first, second = listener.rows
    assert {*second} - {*first} == {"balance", "expert_load"} and first["attention_span"] == 4
    assert (second["balance"], second["expert_load"]) == (0.5, [1, 3])


def test_an_idle_device_is_seen(later):
    listener, first, second = Listener(), metrics(), metrics()
    made = step_timer(listener)
    made.check_idle()  # nothing was dispatched yet: nobody knows
    made.dispatched(1, first)
    first["loss"].block_until_ready()
    made.check_idle()
    later(0.05)
    made.dispatching()
    later(0.2)  # a step whose dispatch takes long keeps no device waiting
    made.dispatched(2, second)
    made.finish_step()
    first, second = listener.rows
    assert first["host_gap_seconds"] == first["step_seconds"] == pytest.approx(0.05)
    assert second["host_gap_seconds"] == 0 and second["step_seconds"] == pytest.approx(0.2)


def test_what_is_always_measured_costs_next_to_nothing(monkeypatch):
    """The clock is read a few times in a step, and nothing that would wait for the device."""
    read, asked = [], []

    class Busy:
        def is_ready(self) -> bool:
            asked.append(1)
            return len(asked) % 2 == 0

        def __getattr__(self, name: str):
            raise AssertionError(f"{name} of a step that is under way")

    made = step_timer(Listener())
    made._pending = 1, dict.fromkeys(metrics(), Busy()), Future()
    monkeypatch.setattr(time, "monotonic", lambda: read.append(1) or 0.0)
    for _ in range(10):
        made.check_idle()
        with made.waiting():
            pass
        made.dispatching()
    assert len(read) <= 5 * 10 and len(asked) == 2 * 10


def test_what_lies_between_two_steps_is_part_of_neither(later):
    """As where a profile begins, which compiles."""
    listener = Listener()
    made = step_timer(listener)
    later(0.03)
    made.dispatched(1, metrics())
    made._pending[1]["loss"].block_until_ready()
    made.check_idle()
    made.finish_step()
    made.saved(0.4)
    with made.between_steps():
        later(0.1)
    later(0.02)
    made.dispatching()
    made.dispatched(2, metrics())
    made.finish_step()
    step = listener.rows[1]
    assert (step["host_gap_seconds"], step["checkpoint_seconds"]) == (0, 0)
    assert step["step_seconds"] == pytest.approx(0.02)


def test_a_wait_before_something_else_is_part_of_the_step_before(later):
    """As where the loop has waited for a batch, and a profile then begins."""
    listener, first = Listener(), metrics()
    made = step_timer(listener)
    made.dispatched(1, first)
    with made.waiting():
        later(0.05)
    with made.between_steps():
        later(3)
    (row,) = listener.rows
    assert row["data_wait_seconds"] == row["step_seconds"] == pytest.approx(0.05)


def test_a_step_ends_when_it_is_over_and_not_when_the_last_one_is_written(later):
    listener, steps = Listener(), [metrics(), metrics()]
    listener.step = lambda row: (later(0.2), listener.rows.append(row))
    made = step_timer(listener)
    for number, step in enumerate(steps, 1):
        made.dispatching()
        later(0.01)
        made.dispatched(number, step)
    made.finish_step()
    assert [row["step_seconds"] for row in listener.rows] == [pytest.approx(0.01)] * 2


def test_the_skip_limit_ends_the_run_after_the_row_is_written():
    listener = Listener()
    made = step_timer(listener)
    made.dispatched(1, metrics(float("nan"), in_a_row=3))
    with pytest.raises(TrainingError, match=r"step 1: .* not finite 3 times in a row \(train.skip_limit\)"):
        made.finish_step()
    assert len(listener.rows) == 1


def test_tables_are_recorded_every_tenth_step():
    values = {"loss": np.float32(1), "counts": np.ones((2, 3), np.int32), "load": np.ones(2, np.float32)}
    for step, whole in ((1, True), (2, False), (10, True), (19, False)):
        further = further_of(values, step)
        assert further.get("counts") == ([[1, 1, 1]] * 2 if whole else None)
        assert further["load"] == [1.0, 1.0] and "loss" not in further
    assert scalars({"counts": [[1, 2]], "load": [1.0]}) == [("load/0", 1.0)]
