"""NVIDIA's management library (nvidia-ml-py): the GPUs of this process, and the energy they have taken."""

import ctypes
import functools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESTRICTED = Path("/proc/driver/nvidia/params")
log = logging.getLogger("jaxthru")


@functools.cache
def nvml() -> Any | None:
    """Returns the module of NVML, started, None where there is none; where only the package is missing, says
    so once."""
    try:
        import pynvml
    except ImportError:
        if RESTRICTED.is_file():
            log.warning('neither clock nor energy is read: needs nvidia-ml-py, pip install "jaxthru[gpu]"')
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # there is no driver
        return None
    return pynvml


def handle(library: Any, bus_id: str) -> Any | None:
    """Returns NVML's handle of the GPU at this PCI bus id, None where it has none."""
    return asked(library, library.nvmlDeviceGetHandleByPciBusId, bus_id)


def names(ordinals: Iterable[int]) -> list[str]:
    """Returns NVML's names of devices that CUDA numbers so, see `bus_ids`; none of those that it has not."""
    known = bus_ids()
    return [known[ordinal] for ordinal in ordinals if ordinal < len(known)]


@functools.cache
def bus_ids() -> tuple[str, ...]:
    """Returns the PCI bus ids of the GPUs that CUDA shows this process, in CUDA's order.

    Neither their number nor their order is NVML's, which knows all of the host by their slots: CUDA numbers
    those that CUDA_VISIBLE_DEVICES leaves, in its order, and by CUDA_DEVICE_ORDER the fastest first.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count, name = ctypes.c_int(), ctypes.create_string_buffer(32)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    found = []
    for device in range(count.value):
        if driver.cuDeviceGetPCIBusId(name, len(name), device):
            return ()
        found.append(name.value.decode())
    return tuple(found)


def asked(library: Any, query: Callable, *arguments) -> Any | None:
    """Returns what NVML answers, None where it refuses."""
    try:
        return query(*arguments)
    except library.NVMLError:
        return None


def energy(library: Any, handles: Iterable[Any]) -> float | None:
    """Returns the joules that GPUs have taken since their driver was loaded, all together; None where one
    does not count them. A counter moves every 20 to 100 ms."""
    found = [asked(library, library.nvmlDeviceGetTotalEnergyConsumption, each) for each in handles]
    return sum(found) / 1e3 if found and None not in found else None
