"""How many cores this process may use."""

import os


def usable_cores() -> int:
    """Returns the cores that this process may run on: fewer than the machine's under `--cpus-per-task`."""
    if hasattr(os, "sched_getaffinity"):  # Linux; os.process_cpu_count is Python 3.13's
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
