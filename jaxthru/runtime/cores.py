"""How many cores this process may use."""

import math
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""`<microseconds> <of so many>`, or `max`: the CPU time that a container may have (cgroup v2)."""


def usable_cores() -> int:
    """Returns the cores that this process may keep busy: fewer than the machine's under `--cpus-per-task` and
    in a container of limited CPU time."""
    linux = hasattr(os, "sched_getaffinity")  # os.process_cpu_count is Python 3.13's
    cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    quota, _, period = QUOTA.read_text().partition(" ") if QUOTA.is_file() else ("max", "", "")
    return cores if quota == "max" else max(1, min(cores, math.floor(int(quota) / int(period))))
