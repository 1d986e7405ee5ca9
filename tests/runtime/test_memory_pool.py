import subprocess
import sys
import threading
import time

import jax
import pytest

from jaxthru.runtime import memory_pool


def test_a_cpu_has_nothing_to_wait_for(monkeypatch):
    begun = []
    monkeypatch.setattr(threading.Thread, "start", begun.append)
    memory_pool.take_ahead()
    assert not begun


def test_each_device_is_given_an_array_and_what_fails_is_left_to_who_needs_it(monkeypatch):
    placed, put = [], jax.device_put

    def noted(array, device):
        placed.append(device)
        return put(array, device)

    monkeypatch.setattr(jax, "device_put", noted)
    memory_pool._take(jax.local_devices())
    assert placed == jax.local_devices()

    def full(array, device):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(jax, "device_put", full)
    memory_pool._take(jax.local_devices())


REFUSED_MEANWHILE = """
import types

import jax

import jaxthru.runtime.memory_pool as memory_pool
from jaxthru.runtime.errors import leave

wide = jax.numpy.ones((1500, 1500))
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, x: x @ wide, x)).lower(wide).compile()
jax.device_put = lambda array, device: slow(wide)
jax.local_devices = lambda: [types.SimpleNamespace(platform="gpu")]
memory_pool.take_ahead()
leave(2)
"""


def test_a_command_that_ends_meanwhile_ends_with_its_own_exit_code():
    """The interpreter's end has to wait for a thread that is within XLA."""
    ended = subprocess.run([sys.executable, "-c", REFUSED_MEANWHILE], capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr


@pytest.mark.gpu
def test_a_gpus_memory_is_taken_before_anything_asks_for_it():
    def taken() -> int:
        return (jax.local_devices()[0].memory_stats() or {}).get("pool_bytes", 0)

    assert not taken()
    memory_pool.take_ahead()
    ends = time.monotonic() + 30
    while not taken():
        assert time.monotonic() < ends
        time.sleep(0.1)
