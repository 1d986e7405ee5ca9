"""What each part of the data plane takes on this machine, as the simulation of docs/data-scale.md needs it.

    python scripts/bench/suite.py data_scale --rows services
    python scripts/bench/measure/data_services.py [--tiny]

CPU seconds: of planning a step (by rows, sources and groups, balanced, and telling token workers of what is
coming), of a token worker (by tokens and tasks), of asking for tokens and building a batch, of answering over
TCP (by open connections and bytes). Seconds of the clock: of starting a worker, and of a word between two
processes of a host. Bytes: of what a process keeps for each source, token worker and connection.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import numpy as np
from measure.data_connections import handing, over_tcp
from measure.data_online_mix import CORPUS, SEQUENCE, corpus, opened

from jaxthru.data.loading.batch_builder import BatchBuilder
from jaxthru.data.loading.dataset import Data
from jaxthru.data.loading.worker import Stores, produce
from jaxthru.data.mixture.balance import row_costs
from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.mixture.packing import pack
from jaxthru.data.mixture.planner import Planner
from jaxthru.data.mixture.sampler import Supply
from jaxthru.data.sources.transforms import Transform

STEP = 5.0
"""Seconds of a step, of which planning may take a hundredth."""
GPUS = 10_240
PLANS = {
    "1 row a GPU, 64 groups": (GPUS, 64),
    "1 row a GPU, a group a host": (GPUS, GPUS // 8),
    "1 row a GPU, a group a GPU": (GPUS, GPUS),
    "4 rows a GPU, 64 groups": (4 * GPUS, 64),
    "4 rows a GPU, a group a host": (4 * GPUS, GPUS // 8),
    "4 rows a GPU, a group a GPU": (4 * GPUS, GPUS),
}
COST = (12.0 * 4096, 1.0)
"""Of a token and of a token² of its document, in a model of width 4,096."""
AHEAD = 3
"""Steps whose sources are looked up to tell token workers of them."""


def cpu(call: Callable[[], Any], clock: Callable[[], float] = time.thread_time) -> float:
    """Returns the seconds that a call takes by a clock."""
    began = clock()
    call()
    return clock() - began


def planner(data: Data, rows: int, groups: int, sources: int) -> tuple[Planner, Planner]:
    """Returns the plan of a mix of log-normal weights over so many sources, those of `data` again and again,
    and the same balanced. Of each row the documents' lengths are read as they are in a run; what rows cost is
    that of documents of log-normal length in rows of 8,192 tokens, packed by best fit."""
    draw, sequence = np.random.default_rng(0), 8192
    documents = np.clip(draw.lognormal(6, 2, 400_000), 1, sequence).astype(np.int64)
    costs = row_costs(pack(np.cumsum(documents), sequence, "best_fit").spans, sequence, *COST)
    splits = [data.train[number % len(data.train)] for number in range(sources)]
    builder = BatchBuilder(splits, data.config.sequence)
    available = np.array([packed.rows for _, packed in splits])
    first, drawn = np.cumsum(available) - available, draw.choice(costs, available.sum())
    names = [f"s{number}" for number in range(sources)]
    weights = dict(zip(names, draw.lognormal(0.0, 1.5, sources).tolist(), strict=True))
    supplies = {
        name: Supply(count, count * sequence, count)
        for name, count in zip(names, available.tolist(), strict=True)
    }

    def cost(source: np.ndarray, row: np.ndarray) -> np.ndarray:
        row_costs(builder.spans(source, row), sequence, *COST)
        return drawn[first[source] + row]

    asked = {"seed": 0, "rows": rows, "groups": groups, "sequence": sequence}
    plain = Planner(supplies, ((0, Mixture.plain(weights)),), **asked)
    return plain, plain.balanced_by(cost)


def planned(data: Data, rows: int, groups: int, sources: int, steps: int) -> dict[str, float]:
    """Returns the mean CPU seconds of a step: plain, balanced, and with what token workers are told; and the
    slowest balanced one, in which a block of steps is looked up."""
    plain, balanced = planner(data, rows, groups, sources)
    first = cpu(lambda: plain.plan(0))
    steps = range(8, 8 + steps)  # whole blocks of those that are looked up together
    plains = [cpu(functools.partial(plain.plan, step)) for step in steps]
    orders = [cpu(functools.partial(balanced.plan, step)) for step in steps]  # of plans that are known
    told = [cpu(lambda: plain.sampler.sources(20)) for _ in range(3)]
    found = {"first": first, "plain": statistics.fmean(plains), "order": statistics.fmean(orders)}
    found["told"] = AHEAD * statistics.median(told)
    found["step"] = found["plain"] + found["order"] + found["told"]
    found["slowest"] = max(plains) + max(orders) + found["told"]
    return {key: round(value, 6) for key, value in found.items()}


def plans(data: Data, tiny: bool) -> dict[str, dict]:
    """Returns {what is planned: its seconds, and its share of STEP}."""
    found = {}
    for sources in (100,) if tiny else (100, 1000):
        for name, (rows, groups) in itertools.islice(PLANS.items(), 1 if tiny else None):
            told = planned(data, rows, groups, sources, 8)
            about = {"rows": rows, "groups": groups, "sources": sources}
            found[f"{name}, {sources:,} sources"] = about | told | {"share": told["step"] / STEP}
    return found


def by_rows(data: Data, tiny: bool) -> dict[int, float]:
    """Returns {rows of a step: CPU seconds to plan it}, of 306 sources, a group for each row up to 1,024."""
    rows = (8, 64) if tiny else (8, 64, 512, 1024, 2048, 4096, 10_240, 40_960)
    return {number: planned(data, number, min(number, 1024), 306, 8)["step"] for number in rows}


def tasks(data: Data, rows: int, steps: int, of: int = 1) -> list[list[list[tuple[str, np.ndarray]]]]:
    """Returns, of each of `of` equal parts of the rows of each step, what is asked of token workers: (source,
    chunks) of each task."""
    asked: list[tuple[str, np.ndarray]] = []
    request, workers = data.workers.request, data.workers

    class Asked:
        def result(self):
            raise InterruptedError  # it was only to be known what is asked for

    def note(source, split, chunks):
        asked.append((source, chunks))
        return Asked()

    found = []
    workers.request = note
    try:
        plan = data.planner(((0, data.mixture),), seed=0, rows=rows * of)
        for step in range(steps):
            whole, parts = plan.plan(step), []
            for part in range(of):
                asked.clear()
                mine = slice(part * rows, (part + 1) * rows)
                try:
                    data.builder.build(whole.source[mine], whole.row[mine])
                except InterruptedError:
                    parts.append(asked.copy())
            found.append(parts)
    finally:
        workers.request = request
    return found


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """CPU seconds; as `Services` of the simulation has them. scatter: those of each batch's tokens over what
    these say of it."""

    token: float
    task: float
    ask: float
    row: float
    fetch: float
    extra: float
    scatter: tuple[float, ...] = ()


def worker_seconds(folder: Path, rows: int, steps: int, pause: float) -> list[tuple[float, float, int]]:
    """Returns (CPU seconds, tokens, tasks) of each batch's tokens, as a token worker makes them."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as a token worker has it
    found = []
    with opened(folder, loaders=1) as data:
        splits = dict(zip(data.names, (split for split, _ in data.train), strict=True))
        stores = Stores()
        for (asked,) in tasks(data, rows, steps):
            seconds = tokens = 0
            time.sleep(pause)
            for source, chunks in asked:
                text = splits[source].text
                given = stores, data.tokenizer, str(text.folder), "train", Transform(), chunks
                made: list[np.ndarray] = []
                seconds += cpu(lambda given=given, made=made: made.append(produce(*given)))
                tokens += len(made[0])
            found.append((seconds, tokens, len(asked)))
    return found


def asker_seconds(folder: Path, rows: int, steps: int, pause: float) -> dict[str, float]:
    """Returns the CPU seconds of a whole fetch but for the token worker's, and of building a row of it; and
    how many tasks a fetch had."""
    with opened(folder, loaders=1) as data:
        plan = data.planner(((0, data.mixture),), seed=0, rows=rows)

        def fetch(step: int) -> None:  # as an element of the data set is had, without Grain, which loads JAX
            time.sleep(pause)
            planned = plan.plan(step)
            for ahead in range(AHEAD):
                plan.sampler.sources(step + 8 * ahead)
            data.builder.build(planned.source, planned.row)

        fetch(0), fetch(1)  # whatever is done once
        began = time.process_time()
        for step in range(2, steps + 2):
            fetch(step)
        whole = (time.process_time() - began) / steps
        counts = [len(asked) for (asked,) in tasks(data, rows, steps)]
    return {"whole": whole, "tasks": statistics.fmean(counts)}


def calibrate(folder: Path, rows: int, steps: int, pause: float = 0.0) -> Calibrated:
    """Returns what tokens, tasks and fetches take: of the token worker by least squares over batches. pause:
    seconds between two, in which other programs fill the caches."""
    made = np.array(worker_seconds(folder, rows, steps, pause))
    # The seconds of a task are few beside those of its tokens: they must not come out below none.
    token, task = np.linalg.lstsq(made[2:, 1:], made[2:, 0], rcond=None)[0]
    if task < 0:
        token, task = made[2:, 0].sum() / made[2:, 1].sum(), 0.0
    few, many = (asker_seconds(folder, count, steps, pause) for count in (max(rows // 4, 1), rows))
    row = (many["whole"] - few["whole"]) / (rows - max(rows // 4, 1))
    row = max(row, 0.0)
    return Calibrated(
        token=float(token),
        task=float(task),
        ask=0.0,  # it goes by rows too, and is in theirs
        row=row,
        fetch=max(many["whole"] - rows * row, 0.0),
        extra=float(made[:, 1].mean()) / (rows * SEQUENCE),
        scatter=tuple((made[2:, 0] / (made[2:, 1:] @ [token, task])).round(4).tolist()),
    )


def held(folder: Path) -> dict[str, float]:
    """Returns the private bytes of a process that has opened a mix, for each source, and of its token worker;
    the CPU seconds to open a source, and those of the clock until a new worker has done its first task."""
    import psutil

    process = psutil.Process()

    def files() -> int:
        return process.num_fds() + len({each.path for each in process.memory_maps(grouped=False)})

    before, files_before, began = process.memory_full_info().uss, files(), time.process_time()
    with opened(folder, loaders=1) as data:
        for number, (split, _) in enumerate(data.train):  # what a source has is opened when it is first read
            data.builder.pieces(np.array([number]), np.array([0]))
            split.text.lengths(np.array([0]))
        seconds, after = time.process_time() - began, process.memory_full_info().uss
        sources, opened_files = len(data.names), files() - files_before
        plan = data.planner(((0, data.mixture),), seed=0, rows=8)
        start = time.perf_counter()
        for step in range(4):
            data.builder.build(plan.plan(step).source, plan.plan(step).row)
            if step == 0:
                started = time.perf_counter() - start
        worker = process.children(recursive=True)[0].memory_full_info().uss
    return {
        "open_seconds": seconds / sources,
        "source_bytes": (after - before) / sources,
        "files": opened_files / sources,
        "worker_bytes": worker,
        "process_bytes": before,
        "restart": started,
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns all of it."""
    harness.need("psutil", "zstandard")
    tiny = arguments.tiny
    # First, for they fork: later there are threads.
    found: dict[str, Any] = {"handed": handing(200 if tiny else 5000), "tcp": over_tcp(tiny)}
    with tempfile.TemporaryDirectory() as folder:
        where = corpus(Path(folder) if tiny else CORPUS, tiny)
        found |= {
            "held": held(where),
            "calibrated": dataclasses.asdict(calibrate(where, 8, 4 if tiny else 24)),
        }
        with opened(where, loaders=1) as data:
            found |= {"plans": plans(data, tiny), "plan": by_rows(data, tiny)}
    one = [plan for plan in found["plans"].values() if plan["rows"] == GPUS]
    found["planner_share"] = max(plan["share"] for plan in one)
    found["planner_share_of_4_rows"] = max(plan["share"] for plan in found["plans"].values())
    found["rows"], found["sequence"] = 8, SEQUENCE
    return found | about()


def about() -> dict[str, Any]:
    """Returns where a result comes from."""
    from measure.loading import processor

    device = {"kind": processor() or platform.machine(), "count": os.cpu_count()}
    versions = harness.versions("jaxthru", "numpy", "tokenizers", "simpy") | {
        "python": platform.python_version()
    }
    return {"device": device, "versions": versions, "commit": harness.commit()}


option = harness.option
TINY = option("--tiny", action="store_true", help="a small corpus, a short time: does it run?")
main = harness.program(__doc__, measure, TINY, config=False, elsewhere=True)


if __name__ == "__main__":
    harness.end(main())
