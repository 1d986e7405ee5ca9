"""The SM clock and the power of the GPUs while a benchmark runs, by NVML (nvidia-ml-py)."""

import contextlib
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for peers in a Python that has no jaxthru


class Clocks:
    """Samples the SM clock (MHz) and power (W) of the GPUs in use while the block runs; None without NVML.

    gpus: how many, of which the mean is taken.
    """

    def __init__(self, gpus: int = 1):
        self.gpus, self.mhz, self.watts = gpus, None, None

    def __enter__(self):
        from jaxthru.profile.collect import clocks  # here: it is asked for as late as can be
        from jaxthru.runtime import nvml

        self._sampling = clocks.sampled(nvml.names(range(self.gpus)))
        self._samples = self._sampling.__enter__()
        return self

    def __exit__(self, *raised):
        self._sampling.__exit__(*raised)
        rows = [row for of in self._samples.devices.values() for row in of]
        # What a GPU does not tell is 0.
        self.mhz, self.watts = (mean(row[column] or None for row in rows) for column in (1, 2))


def mean(samples: Iterable[str | float | None]) -> float | None:
    """Returns the mean of those that are numbers: not all GPUs tell their power."""
    numbers = []
    for sample in samples:
        with contextlib.suppress(TypeError, ValueError):
            numbers.append(float(sample))
    return round(statistics.fmean(numbers), 1) if numbers else None
