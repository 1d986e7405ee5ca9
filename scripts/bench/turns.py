"""Contenders that take turns in one process, A-B-C-A-B-C, so that all see the same clocks."""

import statistics
import time
from collections.abc import Callable

import jax


def take(
    runs: dict[str, Callable],
    arguments: tuple,
    seconds: float,
    *,
    turn_seconds: float = 1.0,
    calls: int = 1,
) -> dict[str, list[float]]:
    """Returns each contender's times of a call, in seconds; each has `seconds` in turns of `turn_seconds`.

    calls: of a contender to one wait; several where one is shorter than the host's way there and back.
    """
    times = {name: [] for name in runs}
    while calls * sum(map(sum, times.values())) < seconds * len(runs):
        for name, run in runs.items():
            turn = time.perf_counter()
            while time.perf_counter() - turn < turn_seconds:
                began = time.perf_counter()
                for _ in range(calls):
                    result = run(*arguments)
                jax.block_until_ready(result)  # the last: a device runs them in order
                times[name].append((time.perf_counter() - began) / calls)
    return times


def told(times: list[float], memory, calls: int = 1) -> dict:
    """Returns what a record says of one contender. memory: as of `compiled.memory_analysis()`."""
    return {
        "milliseconds": round(1e3 * statistics.median(times), 4),
        "milliseconds_quartiles": [round(1e3 * q, 4) for q in statistics.quantiles(times)],
        "calls": calls * len(times),
        "temp_bytes": memory.temp_size_in_bytes,
    }
