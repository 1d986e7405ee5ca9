"""Programs of several calls in a row, seen to make all of them, and the time of a call."""

import collections
import concurrent.futures
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Hashable

import collective_matmul_check as checks
import jax
import jax.numpy as jnp
from gpu_joules import Energy

IN_A_ROW = 16  # calls in a program: a step has as many, and what the host does for a program counts little
# Longer calls are fewer, but four: a burst is to end before the power cap is reached.
BURST_FLOPS = 7e12  # 10 ms at 700 TFLOP/s
TOLERANCE = 1e-2
REST = 3.0  # before each burst, in turns: the mean power then stays far under the cap

Runs = dict[Hashable, tuple[Callable, tuple]]
"""{name: a function or a compiled program, and its operands}."""


def in_a_row(flops: float) -> int:
    """Returns how many calls of so many FLOPs a program has."""
    return max(4, min(IN_A_ROW, round(BURST_FLOPS / flops)))


def program(run: Callable, operands, calls: int = IN_A_ROW):
    """Returns the lowered program of several calls, each of which has to wait for the one before.

    All their results are returned: XLA drops a call whose results nothing reads, barrier or not.
    """

    def in_a_row(*operands):
        every = []
        for _ in range(calls):
            results = run(*operands)
            operands, results = jax.lax.optimization_barrier((operands, results))
            every.append(results)
        return every

    return jax.jit(in_a_row).lower(*operands)


WORK = re.compile(
    r" (dot|all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(?:-start)?\("
    r'|custom_call_target="([^"]*(?:gemm|matmul|mosaic|triton)[^"]*)"'
)


def work(compiled: jax.stages.Compiled) -> collections.Counter:
    """Returns how many products, collectives and kernels of each kind a compiled program has."""
    return collections.Counter(a or b for a, b in WORK.findall(compiled.as_text()))


def require_every_call(
    found: collections.Counter, single: collections.Counter, calls: int, name: str
) -> None:
    """Raises RuntimeError unless a program does at least `calls` times the work of a single call."""
    if not single or found.total() < calls * single.total():
        raise RuntimeError(f"{name}: {calls} calls compile to {dict(found)}, one to {dict(single)}")


def same(*runs: tuple[Callable, tuple]) -> bool:
    """Whether calls of these functions are the same program."""
    return len({jax.jit(run).lower(*operands).as_text() for run, operands in runs}) == 1


def turn(run, operands, repeats: int) -> float:
    """Returns the seconds of a program, the mean of so many dispatched without waiting for each other."""
    began = time.perf_counter()
    for _ in range(repeats):
        results = run(*operands)
    jax.block_until_ready(results)
    return (time.perf_counter() - began) / repeats


def in_turns(
    runs: Runs,
    warmup: int,
    turns: int,
    turn_seconds: float,
    calls: int,
    rest: float = 0,
) -> dict[Hashable, list[float]]:
    """Returns the seconds of a call in each turn of each compiled program.

    Each round takes all in an order drawn anew. A GPU at its power cap runs the faster the less the program
    before has drawn, and in a fixed order that is always the same one: identical programs were 7 % apart.

    Args:
      runs: the compiled programs and their operands.
      warmup: rounds before those that count, two at least: the first loads what a program needs, the second
        says how often a turn repeats it.
      calls: in each program.
      rest: seconds without work before each turn; the mean power then stays under the cap, and so the clock
        near its maximum.
    """
    times, repeats, order = {name: [] for name in runs}, dict.fromkeys(runs, 1), list(runs)
    shuffle = random.Random(0).shuffle
    for number in range(warmup + turns):
        shuffle(order)
        for name in order:
            time.sleep(rest)
            seconds = turn(*runs[name], repeats[name])
            if number < warmup:
                repeats[name] = max(1, round(turn_seconds / seconds))
            else:
                times[name].append(seconds / calls)
    return times


SETTLES = 0.15  # seconds in which a GPU's clock forgets what ran before


def at_the_cap(
    runs: Runs, rounds: int, seconds: float, calls: int, gpus: int
) -> dict[Hashable, dict[str, list]]:
    """Returns the seconds of a call in each round of each compiled program, and the watts of a GPU meanwhile.

    Rounds are as in `in_turns`, without a pause; each program runs for `seconds`, long enough for the counter
    of energy to say what it takes, after some in which the clock becomes its own.
    """
    found = {name: {"seconds": [], "watts": []} for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            _keep_busy(*runs[name], SETTLES)
            with Energy(gpus) as used:
                programs, took = _keep_busy(*runs[name], seconds)
            found[name]["seconds"].append(took / programs / calls)
            found[name]["watts"].append(used.watts)
    return found


def _keep_busy(run: Callable, operands: tuple, seconds: float) -> tuple[int, float]:
    """Returns how many times a program ran, and in how many seconds: two are under way at any time."""
    began, count, before = time.perf_counter(), 0, run(*operands)
    while True:
        last = run(*operands)
        jax.block_until_ready(before)
        count, before, took = count + 1, last, time.perf_counter() - began
        if took >= seconds:
            jax.block_until_ready(last)
            return count + 1, time.perf_counter() - began


def placed(runs: Runs, calls: int, alike: bool = False) -> Runs:
    """Returns the compiled programs of `calls` calls with their operands, of those that compile; says why
    others do not. alike: as `compile_in_a_row` has it."""
    compiled, failed = compile_in_a_row(runs, calls, alike)
    for name, reason in failed.items():
        print(f"{name}: {reason}", file=sys.stderr, flush=True)
    return {name: (run, runs[name][1]) for name, run in compiled.items()}


def both_regimes(runs: Runs, turns: int, turn_seconds: float, calls: int) -> dict[Hashable, list[float]]:
    """Returns the median microseconds of a call of each program, without a pause and in bursts."""
    regimes = [
        in_turns(runs, 3, turns, turn_seconds, calls),
        in_turns(runs, 2, max(2, turns // 2), turn_seconds, calls, REST * turn_seconds),
    ]
    return {name: [round(1e6 * statistics.median(times[name]), 1) for times in regimes] for name in runs}


def brief_times(runs: Runs, calls: int, turns: int = 8, turn_seconds: float = 0.01) -> dict:
    """Returns `both_regimes` of functions that are alike, of those that can run."""
    once = {name: (jax.jit(run), operands) for name, (run, operands) in runs.items()}  # to lower each once
    found = placed(once, calls, alike=True)
    return both_regimes(found, turns, turn_seconds, calls) if found else {}


def compile_in_a_row(
    runs: Runs, calls: int, alike: bool = False
) -> tuple[dict[str, jax.stages.Compiled], dict[str, str]]:
    """Returns the programs to be timed, each of which has been seen to make all of its calls, and why others
    cannot be. alike: a single call of any of them compiles to what one of another does."""
    compiled, failed = {}, {}
    with concurrent.futures.ThreadPoolExecutor(max(8, (os.cpu_count() or 1) // 2)) as pool:

        def started(name: str, calls: int) -> concurrent.futures.Future:
            return pool.submit(checks.compile_safely, program(*runs[name], calls=calls))

        pending, single = {}, None
        for name in runs:
            try:
                every = started(name, calls)
                single = single if alike and single else started(name, 1)
                pending[name] = every, single
            except Exception as error:  # a kernel that does not lower must not cost the others' results
                failed[name] = repr(error)[:500]
        for name, (every, single) in pending.items():
            try:
                if alike and single.exception():  # that of the first one
                    single = started(name, 1)
                require_every_call(work(every.result()), work(single.result()), calls, name)
                compiled[name] = every.result()
            except Exception as error:
                failed[name] = repr(error)[:500]
    return compiled, failed


@jax.jit
def apart(found, wanted):
    """Returns how far each result is from what is wanted, by norm; infinitely where one of them has a NaN,
    which the largest of several numbers may hide."""

    def relative(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        error = jnp.linalg.norm(a - b) / jnp.linalg.norm(b)
        return jnp.where(jnp.isnan(error), jnp.inf, error)

    return [relative(a, b) for a, b in zip(found, wanted, strict=True)]
