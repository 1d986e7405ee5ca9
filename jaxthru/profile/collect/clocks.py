"""Samples a GPU's clock, its power and the reasons for a low clock while steps run.

Two sources. CUPTI samples the clock on the kernels' own time axis, within the trace; it needs the right to
read performance counters. NVML (nvidia-ml-py) is asked by a thread every 20 ms; it also knows the
power and the reasons.
"""

import contextlib
import ctypes
import dataclasses
import functools
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

COUNTER = "gpc__cycles_elapsed.avg.per_second"
SAMPLING = {
    "gpu_pm_sample_counters": COUNTER,
    "gpu_pm_sample_interval_us": 500,  # at 200 XLA's buffers of 0.1 s each do not hold all samples
    "gpu_pm_sample_buffer_size_per_gpu_mb": 64,
}
"""Of `jax.profiler.ProfileOptions.advanced_configuration`."""

RESTRICTED = Path("/proc/driver/nvidia/params")
STATUS = Path("/proc/self/status")
CAP_SYS_ADMIN = 21

INTERVAL = 0.02
log = logging.getLogger("jaxthru")


def sampling(local: int) -> dict[str, Any]:
    """Returns the options for sampling the clock within a trace, none where it could not start: where the
    driver lets only an administrator read counters, and where the process sees GPUs that other processes
    sample, for XLA samples all that it sees. Its GPU tracer would then record no kernels either, and none in
    later traces of the process.

    local: the process's devices.
    """
    if len(bus_ids()) != local:
        return {}
    restricted = RESTRICTED.is_file() and "RmProfilingAdminOnly: 1" in RESTRICTED.read_text()
    held = re.search(r"^CapEff:\s*(\w+)", STATUS.read_text(), re.M) if STATUS.is_file() else None
    administrator = held is not None and int(held[1], 16) >> CAP_SYS_ADMIN & 1
    return {} if restricted and not administrator else SAMPLING


@dataclasses.dataclass
class Samples:
    """NVML's of one process: for each device rows of (wall time in ns, MHz, watts, reasons)."""

    devices: dict[str, list[tuple[int, float, float, int]]]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.devices))


def read(folder: Path) -> Samples:
    """Returns the samples of all processes below a folder, `<process>/clocks.json`."""
    files = sorted(folder.glob("*/clocks.json"))
    devices = {}
    for path in files:
        prefix = "" if len(files) == 1 else f"{path.parent.name}/"
        of = json.loads(path.read_text())
        devices |= {prefix + device: [tuple(row) for row in rows] for device, rows in of.items()}
    return Samples(devices)


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


@contextlib.contextmanager
def sampled(devices: Iterable[str]) -> Iterator[Samples]:
    """Samples NVML while a block runs. devices: `names` of the process's local devices, in order. Without
    NVML there are no samples."""
    samples, library = Samples({}), nvml()
    found = {str(index): handle(library, name) for index, name in enumerate(devices)} if library else {}
    handles = {device: handle for device, handle in found.items() if handle is not None}
    if not handles:
        yield samples
        return
    samples.devices = {device: [] for device in handles}
    done = threading.Event()

    def run() -> None:
        while not done.wait(INTERVAL):
            for device, handle in handles.items():
                samples.devices[device].append((time.time_ns(), *_sample(library, handle)))

    thread = threading.Thread(target=run, name="clocks", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


@functools.cache
def nvml() -> Any | None:
    """Returns the module of NVML, started, None where there is none; where only the package is missing, says
    so once."""
    try:
        import pynvml
    except ImportError:
        if RESTRICTED.is_file():
            log.warning('no clock and power by NVML: needs nvidia-ml-py, pip install "jaxthru[gpu]"')
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # there is no driver
        return None
    return pynvml


def handle(library: Any, bus_id: str) -> Any | None:
    return _asked(library, library.nvmlDeviceGetHandleByPciBusId, bus_id)


def _sample(library: Any, handle: Any) -> tuple[float, float, int]:
    """Returns the SM clock in MHz, the power in watts (on most cards a mean of the last second) and the
    reasons; what NVML refuses is 0."""
    clock = _asked(library, library.nvmlDeviceGetClockInfo, handle, library.NVML_CLOCK_SM) or 0
    milliwatts = _asked(library, library.nvmlDeviceGetPowerUsage, handle) or 0
    reasons = _asked(library, library.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    return float(clock), milliwatts / 1000, int(reasons)


def _asked(library: Any, query: Callable, *arguments) -> Any | None:
    """Returns what NVML answers, None where it refuses."""
    try:
        return query(*arguments)
    except library.NVMLError:
        return None
