"""Samples a GPU's clock, its power and the reasons for a low clock while steps run.

Two sources. CUPTI samples the clock on the kernels' own time axis, within the trace; it needs the right to
read performance counters. NVML (nvidia-ml-py) is asked by a thread every 20 ms; it also knows the
power and the reasons.
"""

import contextlib
import dataclasses
import json
import re
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxthru.runtime.nvml import RESTRICTED, asked, bus_ids, handle, nvml

COUNTER = "gpc__cycles_elapsed.avg.per_second"
SAMPLING = {
    "gpu_pm_sample_counters": COUNTER,
    "gpu_pm_sample_interval_us": 500,  # at 200 XLA's buffers of 0.1 s each do not hold all samples
    "gpu_pm_sample_buffer_size_per_gpu_mb": 64,
}
"""Of `jax.profiler.ProfileOptions.advanced_configuration`."""

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
            for device, each in handles.items():
                samples.devices[device].append((time.time_ns(), *_sample(library, each)))

    thread = threading.Thread(target=run, name="clocks", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def _sample(library: Any, handle: Any) -> tuple[float, float, int]:
    """Returns the SM clock in MHz, the power in watts (on most cards a mean of the last second) and the
    reasons; what NVML refuses is 0."""
    clock = asked(library, library.nvmlDeviceGetClockInfo, handle, library.NVML_CLOCK_SM) or 0
    milliwatts = asked(library, library.nvmlDeviceGetPowerUsage, handle) or 0
    reasons = asked(library, library.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    return float(clock), milliwatts / 1000, int(reasons)
