"""The SM clock and the power of the GPUs while a benchmark runs, by nvidia-smi."""

import contextlib
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterable


class Clocks:
    """Samples the SM clock (MHz) and power (W) of the GPUs in use while the block runs; None without one.

    gpus: how many, of which the mean is taken.
    """

    def __init__(self, gpus: int = 1):
        self.gpus = gpus

    def __enter__(self):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.gpus)))
        query = [
            "nvidia-smi",
            f"--id={','.join(visible.split(',')[: self.gpus])}",
            "--query-gpu=clocks.sm,power.draw",
            "--format=csv,noheader,nounits",
        ]
        self.process = None
        if shutil.which("nvidia-smi"):
            self.process = subprocess.Popen([*query, "-lms", "200"], stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_):
        self.mhz = self.watts = None
        if self.process is None:
            return
        self.process.terminate()
        lines = [line.split(",") for line in self.process.communicate()[0].splitlines()]
        lines = [line for line in lines if len(line) == 2]
        self.mhz, self.watts = (mean(line[column] for line in lines) for column in (0, 1))


def mean(samples: Iterable[str | float | None]) -> float | None:
    """Returns the mean of those that are numbers: not all GPUs tell their power."""
    numbers = []
    for sample in samples:
        with contextlib.suppress(TypeError, ValueError):
            numbers.append(float(sample))
    return round(statistics.fmean(numbers), 1) if numbers else None
