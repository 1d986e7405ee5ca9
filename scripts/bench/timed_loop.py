"""Times steps under load, in the loop of every contender, jaxthru and its peers alike, and parts of scripts.

It imports neither JAX nor PyTorch, so that each process loads only the one that it measures.
"""

import contextlib
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpu_clocks import Clocks


@dataclasses.dataclass(frozen=True)
class Timing:
    """seconds, values: of each timed step. before: the values of the steps that warmed up."""

    seconds: list[float]
    values: list[Any]
    before: list[Any]
    mhz: float | None
    watts: float | None

    @property
    def first(self) -> int:
        """How many steps came before the timed ones."""
        return len(self.before)

    def line(self, tokens: float) -> dict[str, Any]:
        """Returns the part of a result that all benchmarks have; tokens: in a step, their mean."""
        return {
            **rated(tokens, self.seconds),
            "step_seconds_max": round(max(self.seconds), 6),
            "seconds": [round(seconds, 4) for seconds in self.seconds],
            "sm_clock_mhz": self.mhz,
            "power_watts": self.watts,
        }


def rated(tokens: float, seconds: list[float]) -> dict[str, Any]:
    """Returns what steps of so many tokens, in the mean, took. tokens_per_second is all tokens over all
    seconds: packed steps differ, and their median is shorter than their mean. step_seconds is the median."""
    return {
        "tokens_per_second": round(tokens / statistics.fmean(seconds), 1),
        "step_seconds": round(statistics.median(seconds), 6),
        "step_seconds_mean": round(statistics.fmean(seconds), 6),
        "step_seconds_quartiles": [round(q, 6) for q in statistics.quantiles(seconds)],
        "steps_timed": len(seconds),
        "tokens_per_step": tokens,
    }


def timed(
    dispatch: Callable[[], Any],
    finish: Callable[[Any], Any],
    warmup_seconds: float,
    timed_seconds: float,
    steps: tuple[int, int] | None = None,
    gpus: int = 1,
    cycle: int = 1,
) -> Timing:
    """Times steps under load, the next one dispatched before the last one is waited for.

    dispatch: starts a step and returns what `finish` waits for; `finish` returns the step's values.
    steps: how many to warm up with and to time, where seconds would ask for too many of a large model's.
    gpus: that the steps run on, for the clocks. cycle: after how many steps their batches come again; where
    seconds say how long, whole cycles are timed, so that each contender has the same documents equally often.
    """
    previous, clock = None, time.perf_counter()

    def run_for(seconds: float, least: int = 3, cycle: int = 1) -> list[tuple[float, Any]]:
        nonlocal previous, clock
        done, began = [], time.perf_counter()
        while time.perf_counter() - began < seconds or len(done) < least or len(done) % cycle:
            started = dispatch()
            if previous is not None:
                values, ended = finish(previous), time.perf_counter()
                # Since the step before ended, in whichever span: the device has not waited between.
                done.append((ended - clock, values))
                clock = ended
            previous = started
        return done

    if steps:
        before, timed_seconds = run_for(0.0, steps[0]), 0.0
    else:
        before = run_for(0.0)  # whatever is compiled at the first call is no part of the warm-up
        before += run_for(warmup_seconds)
    gc.freeze()  # for every contender, as jaxthru's own loop does: a full collection takes up to a second
    with Clocks(gpus) as clocks:
        done = run_for(timed_seconds, steps[1]) if steps else run_for(timed_seconds, 3, cycle)
    seconds, values = zip(*done, strict=True)
    return Timing(list(seconds), list(values), [value for _, value in before], clocks.mhz, clocks.watts)


class Phases:
    """Says on stderr what a script does, and keeps how long each part of it took.

    seconds: {phase: seconds}, in the order in which they ended.
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times the block under this name; a name that comes again is added up."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.seconds[name] = round(self.seconds.get(name, 0.0) + took, 1)
            print(f"{name}: {took:.1f} s", file=sys.stderr, flush=True)
