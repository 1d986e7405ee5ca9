"""The energy that GPUs take while a benchmark runs, by NVML's counter."""

import ctypes
import os
import threading
import time


class Energy:
    """Reads the counters of the GPUs in use while the block runs. watts: the mean of a GPU; None without
    NVML, and of a block in which a counter does not move twice.

    A counter moves in steps of some 20 to 100 ms, so power is taken between the first step and the last: of a
    short block the difference of two readings would be that of another time.

    gpus: how many. seconds: between readings.
    """

    def __init__(self, gpus: int = 1, seconds: float = 0.004):
        self.gpus, self.seconds, self.watts = gpus, seconds, None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self):
        self._library = _nvml()
        self._handles = _handles(self._library, self.gpus) if self._library else []
        self._steps = [[] for _ in self._handles]
        self._thread.start()
        return self

    def _sample(self) -> None:
        last: list[int | None] = [None] * len(self._handles)
        while not self._ended.wait(self.seconds) and self._handles:
            for number, handle in enumerate(self._handles):
                millijoules = ctypes.c_ulonglong()
                if self._library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
                    continue
                if last[number] not in (None, millijoules.value):
                    self._steps[number].append((time.perf_counter(), millijoules.value / 1e3))
                last[number] = millijoules.value

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()
        self.watts = power(self._steps)


def power(steps: list[list[tuple[float, float]]]) -> float | None:
    """Returns the mean watts of GPUs. steps: of each (seconds, joules) where its counter moved."""
    found = [(of[-1][1] - of[0][1]) / (of[-1][0] - of[0][0]) for of in steps if len(of) > 1]
    return round(sum(found) / len(found), 1) if found and len(found) == len(steps) else None


def _nvml():
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _handles(library, gpus: int) -> list:
    """Returns NVML's handles of the first GPUs that CUDA shows this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    found = []
    for name in visible.split(",")[:gpus]:
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle)) == 0:
            found.append(handle)
    return found
