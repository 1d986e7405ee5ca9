"""NVIDIA's management library (nvidia-ml-py): the GPUs of this process, and the energy they have taken."""

import functools
import logging
import os
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


def handle(library: Any, device: str) -> Any | None:
    by = library.nvmlDeviceGetHandleByIndex if device.isdigit() else library.nvmlDeviceGetHandleByUUID
    return asked(library, by, int(device) if device.isdigit() else device)


def names(ordinals: Iterable[int]) -> list[str]:
    """Returns NVML's names of devices, which CUDA numbers from 0 among those that it may see: NVML sees those
    too that CUDA_VISIBLE_DEVICES hides, and numbers all."""
    seen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return [seen[ordinal] if ordinal < len(seen) else str(ordinal) for ordinal in ordinals]


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
