"""The energy that GPUs take while a benchmark runs, by NVML's counter."""

import contextlib
import threading
import time

import gpu_clocks  # noqa: F401 - which finds jaxthru


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
        from jaxthru.runtime import nvml

        self._nvml = nvml.nvml()
        names = nvml.names(range(self.gpus)) if self._nvml else ()
        self._handles = [of for name in names if (of := nvml.handle(self._nvml, name)) is not None]
        self._steps = [[] for _ in self._handles]
        self._thread.start()
        return self

    def _sample(self) -> None:
        last: list[int | None] = [None] * len(self._handles)
        while not self._ended.wait(self.seconds) and self._handles:
            for number, handle in enumerate(self._handles):
                with contextlib.suppress(self._nvml.NVMLError):
                    millijoules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
                    if last[number] not in (None, millijoules):
                        self._steps[number].append((time.perf_counter(), millijoules / 1e3))
                    last[number] = millijoules

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()
        self.watts = power(self._steps)


def power(steps: list[list[tuple[float, float]]]) -> float | None:
    """Returns the mean watts of GPUs. steps: of each (seconds, joules) where its counter moved."""
    found = [(of[-1][1] - of[0][1]) / (of[-1][0] - of[0][0]) for of in steps if len(of) > 1]
    return round(sum(found) / len(found), 1) if found and len(found) == len(steps) else None
