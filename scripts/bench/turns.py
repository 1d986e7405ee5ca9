"""Contenders that take turns in one process, A-B-C-A-B-C, so that all see the same clocks."""

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import comparison
import harness
import jax
import timed_loop
from gpu_clocks import Clocks, mean
from gpu_joules import Energy


@dataclasses.dataclass(frozen=True)
class Turn:
    """Steps of one contender. seconds: of each. tokens: of all. energy_watts: by the counter of energy. last:
    what its steps said in the end."""

    seconds: list[float]
    tokens: float
    mhz: float | None = None
    watts: float | None = None
    energy_watts: float | None = None
    last: Any = None


def steps_in_turns(
    runs: dict[str | tuple[str, ...], Callable[[], tuple[list[float], float, Any]]],
    warmup: float,
    timed: float,
    gpus: int = 1,
    backwards: bool = False,
    ends: float = math.inf,
) -> dict[str | tuple[str, ...], list[Turn]]:
    """Returns the turns of each contender, A-B-C-A-B-C, two at least, for one says nothing of its spread.

    runs: a turn of each: (seconds of each step, tokens of all, what the last said). warmup: seconds of all
    together; timed: of each. backwards: half of the rounds, A-B B-A B-A A-B, and as many times these four as
    needed, so that of the turns whose difference is the spread (every other one) as many went first. ends: on
    the clock of `time.monotonic`: behind the first two, no round begins that would end later.
    """
    found = {name: [] for name in runs}
    began, order, rounds, least = time.perf_counter(), list(runs), 0, 4 if backwards else 2
    longest = 0.0

    def short(turns: list[Turn]) -> bool:
        return sum(sum(turn.seconds) for turn in turns) < timed

    while rounds < least or (backwards and rounds % least) or any(map(short, found.values())):
        warm, at = rounds > 0 or time.perf_counter() - began >= warmup, time.monotonic()
        if rounds >= 2 and at + longest > ends:
            break
        for name in order:
            with Clocks(gpus) as clocks, Energy(gpus, 0.02) as used:
                seconds, tokens, last = runs[name]()
            label = name if isinstance(name, str) else ", ".join(name)
            print(f"{label}: {statistics.median(seconds):.4f} s a step", file=sys.stderr, flush=True)
            if warm:
                found[name].append(Turn(seconds, tokens, clocks.mhz, clocks.watts, used.watts, last))
        rounds, longest = rounds + warm, max(longest, time.monotonic() - at)
        if backwards and rounds % 2:
            order.reverse()
    return found


def rated(turns: list[Turn]) -> dict:
    """Returns what a record says of a contender's turns."""
    seconds = [second for turn in turns for second in turn.seconds]
    return {
        **timed_loop.rated(sum(turn.tokens for turn in turns) / len(seconds), seconds),
        "sm_clock_mhz": mean(turn.mhz for turn in turns),
        "power_watts": mean(turn.watts for turn in turns),
        "spread": comparison.halves_apart([turn.seconds for turn in turns], statistics.fmean),
    }


def parser(
    description: str, shapes: Collection[str], shape: str, warmup: float = 5.0, timed: float = 10.0
) -> argparse.ArgumentParser:
    """Returns the arguments of a kernel's benchmark. shape: the default; warmup, timed: seconds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", choices=shapes, default=shape)
    parser.add_argument("--warmup-seconds", type=float, default=warmup)
    parser.add_argument("--timed-seconds", type=float, default=timed, help="of each contender")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    return parser


def compare(
    runs: dict[str, Callable], arguments: tuple, options: argparse.Namespace, **how
) -> tuple[dict[str, list[float]], dict]:
    """Returns each contender's times of a call, after a warm-up, and what a record says of the clocks.

    options: of `parser`. how: as `take` has it.
    """
    take(runs, arguments, options.warmup_seconds / len(runs), calls=how.get("calls", 1))
    with Clocks() as clocks:
        times = take(runs, arguments, options.timed_seconds, **how)
    return times, {"sm_clock_mhz": clocks.mhz, "power_watts": clocks.watts}


def emit(
    benchmark: str, options: argparse.Namespace, contenders: dict[str, dict], clocks: dict, **more
) -> None:
    """Prints the record of a comparison, and writes it where it was asked to. more: of this benchmark."""
    line = {"benchmark": benchmark, "shape": options.shape, "contenders": contenders} | more | clocks
    harness.emit(line | harness.provenance(), options.output)


def take(
    runs: dict[str, Callable],
    arguments: tuple,
    seconds: float,
    *,
    turn_seconds: float = 1.0,
    calls: int = 1,
) -> dict[str, list[float]]:
    """Returns each contender's times of a call, two at least, in seconds; each has `seconds` in turns of
    `turn_seconds`.

    calls: of a contender to one wait; several where one is shorter than the host's way there and back.
    """
    times = {name: [] for name in runs}
    while calls * sum(map(sum, times.values())) < seconds * len(runs) or min(map(len, times.values())) < 2:
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
