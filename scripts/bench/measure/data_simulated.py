"""Four training processes that take batches, beside the simulation of the same: fetch times and rates.

    python scripts/bench/suite.py data_scale --rows paced,saturated
    python scripts/bench/measure/data_simulated.py [--period 0.2] [--steps 150] [--tiny]

Each process opens the stores of a mix whose sources are all online, has a token worker of its own, and takes
its part of each batch as training does, every --period seconds, which stand for a device's step, or as fast
as they come. The simulation is given the machine's cores, the same plan of the same steps, and what was
measured right before and after of as many processes at once: CPU seconds. Where other programs share the
machine, run it under `chrt -r 1`, so that these do not decide when it has a core; what they do to its caches
stays. `others` says how many cores they took meanwhile.
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "study"))

import data_model
import harness
import numpy as np
from measure import data_online_mix, data_services
from measure.data_services import Calibrated

TRAINERS, ROWS = 4, 8
WARM = 20
QUANTUM = {os.SCHED_RR: 0.1}
"""Seconds after which Linux lets another have the core, by the policy; the usual one's is USUAL."""
USUAL = 0.003
SPAWN = multiprocessing.get_context("spawn")  # what these processes import is to be theirs


class Timed:
    """Batches of a data set, of each of which is kept when it was begun and had."""

    def __init__(self, dataset):
        self.dataset, self.taken = dataset, []

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        began = time.monotonic()
        batch = self.dataset[step]
        self.taken.append((step, began, time.monotonic()))
        return batch


def train(number: int, folder: Path, steps: int, period: float, barrier, told) -> None:
    """A training process: sends (step, begun, had) of each fetch, and when each step had its batch."""
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    with data_online_mix.opened(folder, loaders=1) as data:
        mine = slice(number * ROWS, (number + 1) * ROWS)
        dataset = Timed(data.dataset(seed=0, rows=TRAINERS * ROWS, steps=steps, local_rows=mine))
        batches: Iterator = iter(grain.MapDataset.source(dataset).to_iter_dataset(data.read_options))
        barrier.wait()
        started = time.monotonic()
        began = []
        for step in range(steps):
            began.append(time.monotonic())
            next(batches)
            time.sleep(max(started + (step + 1) * period - time.monotonic(), 0.0))
        ended = time.monotonic()
        told.send((dataset.taken, began, ended))


def run(folder: Path, steps: int, period: float) -> data_model.Found:
    """Returns what four real processes took."""
    barrier = SPAWN.Barrier(TRAINERS)
    ends, processes = [], []
    for number in range(TRAINERS):
        end, other = SPAWN.Pipe()
        processes.append(SPAWN.Process(target=train, args=(number, folder, steps, period, barrier, other)))
        processes[-1].start()
        other.close()  # or nobody would hear that the process has ended
        ends.append(end)
    told = [end.recv() for end in ends]
    for process in processes:
        process.join()
    first = WARM + data_model.Setup(TRAINERS).ahead
    fetches = [had - begun for taken, _, _ in told for step, begun, had in taken if step >= first]
    seconds = max(ended for *_, ended in told) - min(began[WARM] for _, began, _ in told)
    rows = (steps - WARM) * TRAINERS * ROWS
    return data_model.Found(np.array(fetches), np.zeros(1), seconds, rows, 0.0)


def simulated(asked: list[list[list]], folder: Path, each: Calibrated, steps: int, period: float):
    """Returns what the simulation says. asked: the tasks of each part of each step."""
    with data_online_mix.opened(folder) as data:
        splits = dict(zip(data.names, (split.text for split, _ in data.train), strict=True))
    # A token worker goes from one task to the next without giving its core away: those of a fetch are one.
    beside = each.task / each.token
    tokens = [
        [
            sum(float(splits[source].lengths(chunks).sum()) + beside for source, chunks in part) - beside
            for part in parts
        ]
        for parts in asked
    ]
    services = data_model.Services(
        token=each.token, task=each.task, ask=each.ask, row=each.row, fetch=each.fetch
    )
    quantum = QUANTUM.get(os.sched_getscheduler(0), USUAL)
    setup = data_model.Setup(
        trainers=TRAINERS, per_host=TRAINERS, rows=ROWS, sequence=data_online_mix.SEQUENCE, period=period,
        steps=steps, cores=os.cpu_count(), quantum=quantum, apart=True, workers=1,
    )  # fmt: skip

    def draw(random: np.random.Generator, group: int, step: int) -> list[data_model.Task]:
        return [(0, tokens[step][group] * random.choice(each.scatter))]

    return data_model.simulate(setup, data_model.WAYS["process"], services, draw=draw, warm=WARM)


def calibrated(folder: Path, steps: int, pause: float) -> Calibrated:
    """Returns what a process takes while as many as train are at work, the mean of them: with more processes
    than cores each finds the caches full of another's."""
    barrier = SPAWN.Barrier(TRAINERS)
    with SPAWN.Pool(TRAINERS, barrier.wait) as pool:
        return mean(pool.starmap(data_services.calibrate, [(folder, ROWS, steps, pause)] * TRAINERS, 1))


def mean(found: list[Calibrated]) -> Calibrated:
    *each, scatter = zip(*(dataclasses.astuple(one) for one in found), strict=True)
    return Calibrated(*map(statistics.fmean, each), scatter=tuple(itertools.chain(*scatter)))


def busy() -> tuple[float, float]:
    """Returns the CPU seconds of all cores that were not idle, and this process's and its children's."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _, _, irq, soft, steal = fields
    own = os.times()
    whole = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    return whole, own.user + own.system + own.children_user + own.children_system


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns both, and how far they are apart."""
    harness.need("psutil", "zstandard", "simpy")
    steps = WARM + 16 if arguments.tiny else arguments.steps
    with tempfile.TemporaryDirectory() as temporary:
        tiny = Path(temporary) if arguments.tiny else None
        folder = data_online_mix.corpus(tiny or data_online_mix.CORPUS, arguments.tiny)
        with data_online_mix.opened(folder, loaders=1) as data:
            asked = data_services.tasks(data, ROWS, steps, TRAINERS)
        counted = 3 if arguments.tiny else 16
        before = calibrated(folder, counted, arguments.period)
        clock, (all_before, own_before) = time.monotonic(), busy()
        real = run(folder, steps, arguments.period)
        took, (all_after, own_after) = time.monotonic() - clock, busy()
        others = max(all_after - all_before - (own_after - own_before), 0.0) / took
        each = mean([before, calibrated(folder, counted, arguments.period)])
        model = simulated(asked, folder, each, steps, arguments.period)
    found: dict[str, Any] = {"period": arguments.period, "steps": steps, "others": round(others, 3)}
    found["services"] = dataclasses.asdict(each)
    found["scheduler"] = "real time" if os.sched_getscheduler(0) == os.SCHED_RR else "usual"
    errors = {}
    for name, value in real.told().items():
        if name not in ("wait_share", "fetch_max"):
            other = model.told()[name]
            found |= {f"{name}_real": round(value, 5), f"{name}_simulated": round(other, 5)}
            errors[name] = found[f"{name}_error"] = round(abs(other / value - 1), 4)
    found["error"] = max(errors.values())
    return found | data_services.about()


option = harness.option
main = harness.program(
    __doc__,
    measure,
    option("--period", type=float, default=0.0, help="seconds that a step computes"),
    option("--steps", type=int, default=150),
    data_services.TINY,
    config=False,
    elsewhere=True,
)


if __name__ == "__main__":
    sys.exit(main())
