"""What a run's resilience costs a healthy step: processor time by part, with it and without, in turns.

    python scripts/bench/measure/resilience_overhead.py [--processes 2] [--seconds 40]

Starts a job of so many processes, whose steps are pauses. In turns of so many seconds it goes without and
with what watches a run: heartbeats, pulses, the exchange of step times, the watchdog, the checkpoint clock of
two tiers, the signal to stop. What counts is time on a processor, which a busy machine does not stretch as it
does a clock's: of the loop's thread a step, and of all others a second. Prints one JSON line.
"""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness

from jaxthru.engine.terms import METRICS_FIELDS
from jaxthru.runtime import distributed, peers
from jaxthru.runtime.stop_signal import StopSignal
from jaxthru.training.checkpoint import CheckpointConfig, Checkpointer, LocalTierConfig
from jaxthru.training.goodput import SAVE, GoodputLog
from jaxthru.training.stalls import Stalls
from jaxthru.training.stragglers import Stragglers
from jaxthru.training.watchdog import Watchdog

BAR = 0.001
TOGETHER = StopSignal.SPAN
"""Steps after which the processes wait for one another, as collectives have them do in each."""
CHILD = "RESILIENCE_OVERHEAD"
Parts = dict[str, Callable[[int], object]]


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[Parts]:
    """Gives what the loop calls in each step, by part, as `jaxthru.train` has it around its loop."""
    local = LocalTierConfig(str(folder))
    tiers = CheckpointConfig(every="2h", local=local)
    row = dict.fromkeys(METRICS_FIELDS) | dict.fromkeys(("step_seconds", "data_wait_seconds"), 0.1)
    with (
        peers.watched(),
        Checkpointer(folder / "shared", tiers, local=folder / str(os.getpid())) as checkpointer,
        Watchdog() as watchdog,
        StopSignal() as stop,
    ):
        current, stalls, straggler = peers.current(), Stalls(), Stragglers(peers.current())
        yield {
            "stop signal": stop.should_stop,
            "checkpoint clock": lambda step: checkpointer.due(step, last=False),
            "step times of all hosts": lambda step: (
                current.note(0.01),
                straggler.step(row | current.slowest()),
            ),
            "stalled steps": lambda step: stalls.step(row | {"step": step}),
            "watchdog": lambda step: watchdog.beat(),
        }


def used(thread: int) -> float:
    """Returns the seconds that a thread of this process has been on a processor."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def beats() -> int:
    """Returns how many heartbeats this process has sent: on a busy machine they come later."""
    current = peers.current()
    said = distributed.try_get(f"{current._folder}beats/{current.index}") if current.slowest() else None
    return int(said.split()[0]) if said else 0


def turn(parts: Parts, steps: int, step: float, name: str, made: int = 0) -> dict:
    """Returns what so many steps took, a multiple of TOGETHER. made: steps before them."""
    sent = beats()
    own = {part: 0.0 for part in parts}
    waited = {part: 0.0 for part in parts}
    before = {thread.native_id: used(thread.native_id) for thread in threading.enumerate()}
    process, began = time.process_time(), time.monotonic()
    for number in range(made + 1, made + steps + 1):
        if number % TOGETHER == 0:
            distributed.key_value_store().wait_at_barrier(f"{name} {number}", 600_000)
        for part, call in parts.items():
            clock, cpu = time.monotonic(), time.thread_time()
            call(number)
            own[part] += time.thread_time() - cpu
            waited[part] += time.monotonic() - clock
        time.sleep(step)
    length, process = time.monotonic() - began, time.process_time() - process
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    threads = {names[one]: used(one) - before[one] for one in before if one in names}
    main = threads.pop(threading.main_thread().name)
    return {
        "steps": steps,
        "seconds": length,
        "beats": beats() - sent,
        "loop": {part: each / steps for part, each in own.items()},
        "loop_wall": {part: each / steps for part, each in waited.items()},
        "threads": {name: each / length for name, each in threads.items()},
        "beside": (process - main) / length,
    }


def process(folder: Path, seconds: float, rounds: int, step: float) -> None:
    """Measures in one process of the job; writes what it found."""
    distributed.initialize(watched=True)
    found: dict[str, list[dict]] = {"without": [], "with": []}
    steps = max(1, round(seconds / step / TOGETHER)) * TOGETHER
    for number in range(rounds):
        found["without"].append(turn({}, steps, step, f"{number} without"))
        with watched(folder / str(number)) as parts:
            # Until all have heard of each other, and know how long a step takes.
            turn(parts, TOGETHER, step, f"{number} before")
            found["with"].append(turn(parts, steps, step, f"{number} with", TOGETHER))
    index = int(os.environ["JAX_PROCESS_ID"])
    found["event"] = an_event(folder / f"goodput-{index}")
    (folder / f"found-{index}.json").write_text(json.dumps(found))


def an_event(folder: Path) -> float:
    """Returns the seconds that a row of goodput.jsonl takes, which each save and evaluation writes."""
    folder.mkdir()
    with GoodputLog(folder, 0, {}, time.monotonic()) as goodput:
        began = time.thread_time()
        for _ in range(100):
            goodput._write(SAVE, seconds=1.0)
        return (time.thread_time() - began) / 100


def summary(found: dict[str, list[dict]], step: float) -> dict:
    """Returns what a process's turns come to: microseconds, and shares of a step and of a core."""

    def mean(turns: list[dict], of: str) -> dict[str, float]:
        names = sorted({name for each in turns for name in each[of]})
        return {name: statistics.fmean(each[of].get(name, 0.0) for each in turns) for name in names}

    turns = found["with"]
    loop, wall, threads = (mean(turns, of) for of in ("loop", "loop_wall", "threads"))
    beside = {name: [each["beside"] for each in found[name]] for name in ("without", "with")}
    late = sum(each["seconds"] for each in turns) / peers.BEAT_SECONDS / sum(each["beats"] for each in turns)
    more = late * (statistics.fmean(beside["with"]) - statistics.fmean(beside["without"]))
    micro = {part: round(1e6 * each, 1) for part, each in loop.items()}
    return {
        "steps": sum(each["steps"] for each in turns),
        "loop_us_per_step": micro | {"all": round(1e6 * sum(loop.values()), 1)},
        "loop_wall_us_per_step": {part: round(1e6 * each, 1) for part, each in wall.items()},
        "threads_us_per_second": {name: round(1e6 * each, 1) for name, each in threads.items()},
        "beside_us_per_second": {
            name: [round(1e6 * each, 1) for each in turns] for name, turns in beside.items()
        },
        "goodput_event_us": round(1e6 * found["event"], 1),
        "share_of_step": {str(length): round(sum(loop.values()) / length, 6) for length in (step, 1.0)},
        "beats_late": round(late, 3),
        "beat_us": round(1e6 * more * peers.BEAT_SECONDS, 1),
        "share_of_a_core": round(more, 6),
        "share_of_host": round(more / (os.cpu_count() or 1), 6),
    }


def measure(arguments) -> dict:
    with socket.socket() as server, tempfile.TemporaryDirectory() as folder:
        server.bind(("127.0.0.1", 0))
        where = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{server.getsockname()[1]}"}
        server.close()
        where |= {"JAX_NUM_PROCESSES": str(arguments.processes), CHILD: folder}
        jobs = [
            subprocess.Popen(
                [sys.executable, *sys.argv], env=os.environ | where | {"JAX_PROCESS_ID": str(one)}
            )
            for one in range(arguments.processes)
        ]
        codes = [job.wait() for job in jobs]
        if any(codes):
            raise RuntimeError(f"the processes ended with {codes}")
        found = [
            summary(json.loads((Path(folder) / f"found-{one}.json").read_text()), arguments.step)
            for one in range(arguments.processes)
        ]
    worst = max(each["share_of_step"][str(arguments.step)] for each in found)
    rest = max(each["share_of_a_core"] for each in found)
    return {
        "step_seconds": arguments.step,
        "cores": os.cpu_count(),
        "processes": found,
        "bar": BAR,
        "worst_share_of_step": worst,
        "worst_share_of_a_core": rest,
        "met": worst <= BAR and rest <= BAR,
    }


def main() -> int:
    options = (
        harness.option("--processes", type=int, default=2),
        harness.option("--seconds", type=float, default=40.0, help="of a turn"),
        harness.option("--rounds", type=int, default=3, help="of a turn without and one with"),
        harness.option("--step", type=float, default=0.1, help="seconds of a step"),
    )

    def either(arguments) -> dict:
        if CHILD not in os.environ:
            return measure(arguments)
        folder = Path(os.environ[CHILD])
        process(folder, arguments.seconds, arguments.rounds, arguments.step)
        return harness.end(0)

    return harness.program(__doc__, either, *options, config=False)()


if __name__ == "__main__":
    sys.exit(main())
