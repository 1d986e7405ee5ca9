import threading
import time

import jax
import pytest

from jaxthru.runtime import warm_up


def test_a_cpu_has_nothing_to_wait_for(monkeypatch):
    begun = []
    monkeypatch.setattr(threading.Thread, "start", begun.append)
    warm_up.warm_up()
    assert not begun


def test_each_device_is_given_an_array_and_what_fails_is_left_to_whoever_needs_it(monkeypatch):
    placed, put = [], jax.device_put

    def noted(array, device):
        placed.append(device)
        return put(array, device)

    monkeypatch.setattr(jax, "device_put", noted)
    warm_up._take_memory(jax.local_devices())
    assert placed == jax.local_devices()

    def full(array, device):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(jax, "device_put", full)
    warm_up._take_memory(jax.local_devices())


def test_what_is_not_installed_keeps_nothing_else_from_being_imported(monkeypatch):
    asked = []

    def imported(name):
        asked.append(name)
        raise ImportError(name)

    monkeypatch.setattr(warm_up.importlib, "import_module", imported)
    warm_up._import()
    assert tuple(asked) == warm_up.IMPORTED


@pytest.mark.gpu
def test_a_gpus_memory_is_taken_before_anything_asks_for_it():
    device = jax.local_devices()[0]
    warm_up.warm_up()
    ends = time.monotonic() + 30
    while not (device.memory_stats() or {}).get("pool_bytes"):
        assert time.monotonic() < ends, device.memory_stats()
        time.sleep(0.1)
