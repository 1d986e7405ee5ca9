"""A program runs alone the first time, and as it comes from then on."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthru.data.loading.placement import to_global
from jaxthru.runtime import first_run
from jaxthru.runtime.first_run import FirstAlone


def test_only_the_first_run_waits(monkeypatch):
    waited = []
    monkeypatch.setattr(first_run, "wait_for_all", lambda: waited.append("all"))
    monkeypatch.setattr(first_run.jax, "block_until_ready", lambda tree: waited.append(tree) or tree)
    program = FirstAlone(lambda number: number + 1)
    assert program(1) == 2
    assert waited == ["all", 2]
    assert [program(number) for number in (5, 6)] == [6, 7]
    assert len(waited) == 2


def test_what_is_gone_is_not_waited_for(monkeypatch):
    """An array may be deleted, or given to a program, after it was listed."""
    gone, given, there = (jnp.ones(3) for _ in range(3))
    gone.delete()
    jax.jit(lambda x: x + 1, donate_argnums=0)(given)
    seen = []

    class Seen:
        def block_until_ready(self):
            seen.append(there.block_until_ready())

    monkeypatch.setattr(first_run.jax, "live_arrays", lambda: [gone, given, Seen()])
    assert FirstAlone(jnp.sum)(there) == 3 and seen


def test_a_run_that_fails_leaves_the_next_one_alone():
    def program(number):
        assert first_run.COPIES.locked() == (number < 2)
        return 1 / number

    program = FirstAlone(program)
    with pytest.raises(ZeroDivisionError):
        program(0)
    assert not first_run.COPIES.locked()
    assert program(1) == 1 and program(2) == 0.5


def test_a_batch_is_placed_before_or_after_a_first_run():
    """By the thread that builds batches ahead: both within a later run, and not within the first."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    threads, done = [], []

    def placing():
        done.append(to_global({"tokens": np.zeros((2, 4), np.int32)}, sharding, 2))

    def run(seconds):
        threads.append(threading.Thread(target=placing))
        threads[-1].start()
        threads[-1].join(seconds)
        return len(done)

    program = FirstAlone(run)
    assert program(0.2) == 0
    threads[0].join()
    assert program(60) == 2
