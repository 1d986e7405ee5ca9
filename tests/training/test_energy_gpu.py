"""NVML's energy counter beside its power: the two must agree while a GPU works."""

import itertools
import statistics
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jaxthru.runtime import nvml
from jaxthru.training import energy
from jaxthru.training.energy import StepEnergy

SECONDS = 60.0


@pytest.mark.gpu
def test_the_energy_of_a_minute_is_the_integral_of_its_power():
    """Within 2 %, of all devices of the process, while the first one works and rests in turns."""
    library = nvml.nvml()
    names = nvml.names(device.local_hardware_id for device in jax.local_devices())
    handles = [nvml.handle(library, name) for name in names]
    samples, ended = [], threading.Event()

    def watts(handle) -> float:
        (field,) = library.nvmlDeviceGetFieldValues(handle, [library.NVML_FI_DEV_POWER_INSTANT])
        return field.value.uiVal / 1e3

    def sample() -> None:
        while True:
            samples.append((time.monotonic(), sum(watts(handle) for handle in handles)))
            if ended.wait(0.02):
                return

    multiply = jax.jit(lambda a: a @ a * 1e-3)
    matrix = jnp.ones((8192, 8192), jnp.bfloat16)
    jax.block_until_ready(multiply(matrix))
    counted = StepEnergy(energy.counter_here())
    thread = threading.Thread(target=sample)
    begun = time.monotonic()
    counted.begin()
    thread.start()
    while time.monotonic() - begun < SECONDS:
        if int(time.monotonic() - begun) % 10 == 9:  # what draws little is to be counted too
            time.sleep(0.1)
        else:
            jax.block_until_ready([multiply(matrix) for _ in range(20)])
    joules = counted.end()
    ended.set()
    thread.join()
    power = [(a[1] + b[1]) / 2 * (b[0] - a[0]) for a, b in itertools.pairwise(samples)]
    integral = sum(power)
    reads = []
    for _ in range(20):
        at = time.perf_counter()
        energy.counter_here()()
        reads.append(time.perf_counter() - at)
    print(
        f"counted {joules:.0f} J, integral {integral:.0f} J, {joules / integral - 1:+.2%}, "
        f"{len(samples)} samples"
    )
    print(f"a reading of {len(handles)} devices takes {1e3 * statistics.median(reads):.3f} ms, off the loop")
    assert joules == pytest.approx(integral, rel=0.02)
