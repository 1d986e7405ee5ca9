"""What a GPU's clock and power were while steps ran, and what held the clock down.

Two sources. CUPTI samples the clock on the kernels' own time axis, within the trace; it needs the right to
read performance counters. NVML is asked by a thread every 20 ms; it also knows the power and the reasons.
Without either the ledger says "none".
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import statistics
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxthru.profile.events import Trace, natural
from jaxthru.profile.ledger import Clock

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

REFERENCE_MHZ = {
    r"h200 nvl": (1545, 1785),
    r"(g?h200|h100(?! (nvl|pcie)))": (1830, 1980),
}
"""Device kind -> the SM clock of its data sheet's dense bf16 FLOP/s, and its highest clock, MHz. The first is
the data sheet's rate over 4,096 FLOPs per SM and cycle, with 132 SMs."""

REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons. Idle and the application's own settings are none."""

INTERVAL = 0.02
MOST = 500


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


def reference(kind: str) -> tuple[float | None, float | None]:
    """Returns the reference clock and the highest of a device kind, MHz, None where they are not known."""
    found = (pair for words, pair in REFERENCE_MHZ.items() if re.search(rf"\b{words}\b", kind.lower()))
    return next(found, (None, None))


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


def clock(trace: Trace, samples: Samples, start: int, end: int, busy: list[tuple[int, int]]) -> Clock:
    """Returns the clock between two moments of a trace. busy: when matrix products ran on the first device,
    in order; the mean is taken over it, where samples fall into it, for it is these that the clock slows."""
    traced = {
        device: [(at, value / 1e6) for name, rows in by_name.items() if is_clock(name) for at, value in rows]
        for device, by_name in trace.counters.items()
    }
    traced = {device: rows for device, rows in traced.items() if rows}
    asked = {
        device: [(row[0] - trace.begun, *row[1:]) for row in rows] for device, rows in samples.devices.items()
    }
    asked = {device: [row for row in rows if start <= row[0] <= end] for device, rows in asked.items()}
    source = "cupti" if traced else "nvml" if any(asked.values()) else "none"
    rows = traced or {device: [row[:2] for row in rows] for device, rows in asked.items()}
    first = min(rows, key=natural, default=None)  # as `busy` is: planes stand in any order
    if source == "none" or first is None:
        return Clock()
    shown = [(at, mhz) for at, mhz in rows[first] if start <= at <= end and mhz > 0]
    during = [mhz for at, mhz in shown if inside(at, busy)] or [mhz for _, mhz in shown]
    known = asked.get(first, [])
    reasons = {
        name: sum(bool(row[3] & bit) for row in known) / len(known) for bit, name in REASONS.items() if known
    }
    return Clock(
        source,
        statistics.fmean(during) if during else None,
        _thinned([((at - start) / 1e9, mhz) for at, mhz in shown]),
        _thinned([((row[0] - start) / 1e9, row[2]) for row in known]),
        {name: share for name, share in reasons.items() if share},
    )


def is_clock(name: str) -> bool:
    """Says whether a counter of a trace is the SM clock in Hz; CUPTI shows it by a name of its own."""
    return name == COUNTER or name.startswith("GPC Clock Frequency")


def inside(at: int, spans: list[tuple[int, int]]) -> bool:
    """Says whether a moment lies in one of these spans, which are in order."""
    place = bisect_right(spans, (at, at)) - 1
    return place >= 0 and at < spans[place][1]


def _thinned(rows: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple(rows[:: -(-len(rows) // MOST) or 1])
