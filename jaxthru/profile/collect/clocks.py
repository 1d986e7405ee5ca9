"""Samples a GPU's clock, its power and the reasons for a low clock while steps run.

Two sources. CUPTI samples the clock on the kernels' own time axis, within the trace; it needs the right to
read performance counters. NVML is asked by a thread every 20 ms; it also knows the power and the reasons.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
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


def sampling(local: int) -> dict[str, Any]:
    """Returns the options for sampling the clock within a trace, none where it could not start: where the
    driver lets only an administrator read counters, and where the process sees GPUs that other processes
    sample, for XLA samples all that it sees. Its GPU tracer would then record no kernels either, and none in
    later traces of the process.

    local: the process's devices.
    """
    named, library = os.environ.get("CUDA_VISIBLE_DEVICES"), _library()
    seen = ctypes.c_uint(local)
    if named is not None:
        seen = ctypes.c_uint(len([name for name in named.split(",") if name.strip()]))
    elif library:
        library.nvmlDeviceGetCount_v2(ctypes.byref(seen))
    if seen.value != local:
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
    """Returns NVML's names of devices, which CUDA numbers from 0 among those that it may see: NVML sees those
    too that CUDA_VISIBLE_DEVICES hides, and numbers all."""
    seen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return [seen[ordinal] if ordinal < len(seen) else str(ordinal) for ordinal in ordinals]


@contextlib.contextmanager
def sampled(devices: Iterable[str]) -> Iterator[Samples]:
    """Samples NVML while a block runs. devices: index or UUID of each of the process's local devices, in
    order. Without NVML there are no samples."""
    samples = Samples({})
    library = _library()
    handles = {str(index): _handle(library, name) for index, name in enumerate(devices)} if library else {}
    handles = {device: handle for device, handle in handles.items() if handle is not None}
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


def _library() -> Any | None:
    """Returns NVML, started, or None."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _handle(library: Any, device: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    if device.isdigit():
        failed = library.nvmlDeviceGetHandleByIndex_v2(int(device), ctypes.byref(handle))
    else:
        failed = library.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
    return None if failed else handle


_SM = 1  # NVML_CLOCK_SM


def _sample(library: Any, handle: ctypes.c_void_p) -> tuple[float, float, int]:
    """Returns the SM clock in MHz, the power in watts (on most cards a mean of the last second) and the
    reasons; what NVML refuses is 0."""
    clock, milliwatts, reasons = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
    library.nvmlDeviceGetClockInfo(handle, _SM, ctypes.byref(clock))
    library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts))
    library.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons))
    return float(clock.value), milliwatts.value / 1000, int(reasons.value)
