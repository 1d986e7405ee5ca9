"""Whether the data plane keeps up with thousands of GPUs: what docs/data-scale.md shows.

    python scripts/study/data_scale.py --write            # all of it, into docs/ and scripts/study/results/
    python scripts/study/data_scale.py --small --out DIR  # the same of few GPUs, as a test runs it

A simulation (`data_model.py`) over what was measured of each part: the records `data_scale_services` and, of
four real processes beside the simulation of them, `data_scale_paced` and `data_scale_saturated`, which
`python scripts/bench/suite.py data_scale` makes.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from data_model import WAYS, Services, Setup, Way, simulate
from marked_page import fill

from jaxthru.data.loading.batch import BATCH_FIELDS
from jaxthru.runtime.atomic import write_atomically
from jaxthru.training.plot import Panel, Picture

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "data-scale.md"
RECORDS = ROOT / "scripts" / "bench" / "results"
KEPT = ROOT / "scripts" / "study" / "results" / "data_scale.json"
GPUS = (8, 64, 512, 2048, 4096, 10_240)
SAMPLE = 256
"""Trainers that are simulated where hosts have nothing to do with one another; the others are like them."""
LOAD = 0.4
"""Of the time that token workers which serve all hosts are at work: so many of them there are."""
STEPS, AHEAD, WARM = 10, 4, 4
IMAGE = 4e6
"""Bytes of a row that is no text: some pictures."""
KILLED = 20.04
"""Seconds from the start on: in a step that counts, while the worker is at work."""
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parsed(argv)
    found = study(arguments.small)
    found["command"] = "python scripts/study/data_scale.py" + " --small" * arguments.small
    text = tables(found)
    out = ROOT / "docs" / "images" if arguments.write else arguments.out
    if out is not None:
        for name, picture in pictures(found).items():
            picture.save(out / name)
        record = KEPT if arguments.write else out / KEPT.name
        write_atomically(record, json.dumps(found, indent=1) + "\n")
    if arguments.write:
        fill(PAGE, text, Path(__file__).name)
    print("\n\n".join(f"## {name}\n\n{table}" for name, table in text.items()))


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="few GPUs, in seconds")
    parser.add_argument("--out", type=Path, help="write data_scale.json and the pictures there")
    parser.add_argument(
        "--write", action="store_true", help="fill docs/data-scale.md, its pictures and record"
    )
    arguments = parser.parse_args(argv)
    if arguments.write and arguments.small:
        parser.error("--write: the page has the whole study; leave --small out")
    return arguments


def measured(row: str) -> Row:
    """Returns what a record of the suite found, and its commit; nothing if it is not there."""
    path = RECORDS / f"data_scale_{row}.json"
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    return record["found"] | {"commit": record["commit"]}


def services(found: Row, connections: int) -> Services:
    """Returns the services of a record, where a token worker has so many connections."""
    each, tcp = found["calibrated"], found["tcp"]
    known = {int(count): seconds for count, seconds in tcp["message"].items()}
    at = sorted(known)
    return Services(
        token=each["token"],
        task=each["task"],
        row=each["row"],
        fetch=each["fetch"],
        extra=each["extra"],
        plan={int(rows): seconds for rows, seconds in found["plan"].items()},
        restart=found["held"]["restart"],
        handed=found["handed"],
        message=float(np.interp(connections, at, [known[count] for count in at])),
        byte=tcp["byte"],
    )


def study(small: bool) -> Row:
    """Returns all rows."""
    found = measured("services")
    if not found:
        command = "python scripts/bench/suite.py data_scale --rows services"
        raise SystemExit(f"{RECORDS}: has no data_scale_services.json, which `{command}` makes")
    gpus, most = (GPUS[:2], 64) if small else (GPUS, GPUS[-1])
    rows = [row(found, number, way) for number in gpus for way in WAYS.values()]
    shared = [row(found, most, way, share=8) for way in WAYS.values()]
    far = [way for way in WAYS.values() if way.anywhere]
    images = [row(found, number, way, share=8, row_bytes=IMAGE) for number in gpus[1:] for way in far]
    one = WAYS["host"], WAYS["fan-out"]
    faults = [
        row(found, most, way, fault=name, **how)
        for way in one
        for name, how in (("none", {}), ("slow", {"slow": 10.0}), ("killed", {"killed": KILLED}))
    ]
    held = {name: measured(name) for name in ("paced", "saturated")}
    kinds = {"rows": rows, "shared": shared, "images": images, "faults": faults, "held": held}
    return {**kinds, "plans": found["plans"]}


def needed(found: Row, setup: Setup, way: Way, gpus: int) -> float:
    """Returns the cores that make the tokens of a step in the time of one. Trainers that take the same rows
    have them made for each of them, unless their host asks."""
    each = found["calibrated"]
    times = 1 if way.host else setup.share
    tokens = gpus // setup.share * setup.rows * setup.sequence * each["extra"] * times
    return tokens * each["token"] / setup.period


def row(found: Row, gpus: int, way: Way, share: int = 1, fault: str = "", **more: Any) -> Row:
    """Returns what a run of so many GPUs takes. share: GPUs that take the same rows, and as many rows, so
    that a step has one row for each GPU in any case."""
    trainers = gpus if way.anywhere else min(gpus, SAMPLE)
    setup = Setup(trainers, share=share, rows=share, planned=gpus, steps=STEPS, ahead=AHEAD, **more)
    cores = needed(found, setup, way, gpus)
    # Those that serve all are as many as a way needs that asks for nothing twice: the other's is told below.
    sending = (setup.row_bytes or 0.0) * gpus / setup.network / setup.period
    least = needed(found, setup, WAYS["fan-out"], gpus) + sending
    workers = max(math.ceil(least / LOAD), 1) if way.anywhere else 1
    workers = workers if way.anywhere else setup.per_host if way.host else 1
    setup = dataclasses.replace(setup, workers=workers)
    hosts = -(-gpus // setup.per_host)
    askers = hosts if way.host else gpus
    known = services(found, askers)
    began = time.perf_counter()
    ran = simulate(setup, way, known, warm=WARM)
    print(f"{gpus} {way.name} {fault}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    on_host = min(gpus, setup.per_host)
    openers = 1 if way.host else on_host
    held = found["held"]
    batch = setup.rows * setup.sequence * 4 * len(BATCH_FIELDS) * (setup.ahead + 1)
    memory = openers * setup.sources * held["source_bytes"] + batch * on_host / (share if way.host else 1)
    memory += 0 if way.anywhere else held["worker_bytes"] * on_host
    memory += held["process_bytes"] if way.host else 0  # the pool's own
    return {
        "gpus": gpus,
        "way": way.name,
        "share": share,
        "fault": fault,
        **ran.told(),
        "worst_wait": float(ran.waits.max()),
        "workers": workers if way.anywhere else on_host * hosts,
        "cores": cores,
        "connections_worker": askers if way.anywhere else 0,
        "connections_host": workers * openers if way.anywhere else 0,
        "files_host": openers * setup.sources * held["files"],
        "memory_host": memory,
        "planner_share": known.planned(gpus) / setup.period,
        "planner_cores_host": known.planned(gpus) / setup.period * openers,
    }


HEAD = (
    "| GPUs | way | fetch p50 | p99 | waits for data | cores for tokens | connections of a worker "
    "| of a host | files of a host | data memory of a host | planner, of a step |"
)


def table(rows: Sequence[Row]) -> str:
    lines = [HEAD, "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for each in rows:
        cells = (
            f"{each['gpus']:,}",
            each["way"],
            seconds(each["fetch_p50"]),
            seconds(each["fetch_p99"]),
            f"{each['wait_share']:.1%}",
            f"{each['cores']:,.1f}",
            f"{each['connections_worker']:,}",
            f"{each['connections_host']:,}",
            f"{each['files_host']:,.0f}",
            f"{each['memory_host'] / 1e6:,.0f} MB",
            f"{each['planner_share']:.2%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def seconds(value: float) -> str:
    return f"{value * 1e3:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def tables(found: Row) -> dict[str, str]:
    """Returns {name: a table of the page}."""
    faults = ["| way | fault | fetch p50 | p99 | longest | longest wait of a step |"]
    faults.append("|---|---|--:|--:|--:|--:|")
    for each in found["faults"]:
        told = (seconds(each[key]) for key in ("fetch_p50", "fetch_p99", "fetch_max"))
        cells = each["way"], each["fault"], *told
        faults.append(f"| {' | '.join(cells)} | {seconds(each['worst_wait'])} |")
    images = ["| GPUs | way | fetch p50 | p99 | waits for data |", "|--:|---|--:|--:|--:|"]
    for each in found["images"]:
        cells = f"{each['gpus']:,}", each["way"], *(seconds(each[key]) for key in ("fetch_p50", "fetch_p99"))
        images.append(f"| {' | '.join(cells)} | {each['wait_share']:.1%} |")
    plans = ["| planned | a step | of 5 s | of it balance | the first step |", "|---|--:|--:|--:|--:|"]
    for name, each in found["plans"].items():
        cells = seconds(each["step"]), f"{each['share']:.2%}", seconds(each["order"]), seconds(each["first"])
        plans.append(f"| {name} | {' | '.join(cells)} |")
    held = ["| four processes | | real | simulated | apart |", "|---|---|--:|--:|--:|"]
    for name, each in found["held"].items():
        for key, said in (("fetch_p50", "fetch p50"), ("fetch_p99", "p99"), ("rows_per_second", "rows/s")):
            if each:
                values = each[f"{key}_real"], each[f"{key}_simulated"]
                shown = [f"{value:.1f}" if key == "rows_per_second" else seconds(value) for value in values]
                held.append(f"| {name} | {said} | {' | '.join(shown)} | {each[f'{key}_error']:.1%} |")
    return {
        "ways": table(found["rows"]),
        "shared": table(found["shared"]),
        "images": "\n".join(images),
        "faults": "\n".join(faults),
        "plans": "\n".join(plans),
        "held": "\n".join(held),
    }


def pictures(found: Row) -> dict[str, Picture]:
    """Returns {file name: picture}."""

    def lines(rows: Sequence[Row], key: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        drawn = {}
        for way in WAYS:
            own = [each for each in rows if each["way"] == way]
            if own:
                x = np.array([each["gpus"] for each in own])
                drawn[way] = (x, np.array([each[key] for each in own]))
        return drawn

    rows, images = found["rows"], found["images"]
    fetches = (
        Panel("seconds of a fetch, p99, by GPUs: text", lines(rows, "fetch_p99"), "xy"),
        Panel("seconds of a fetch, p99, by GPUs: rows of 4 MB", lines(images, "fetch_p99"), "xy"),
    )
    host = (
        Panel("connections of a token worker, by GPUs", lines(rows, "connections_worker"), "xy"),
        Panel("cores of a host that plan, by GPUs", lines(rows, "planner_cores_host"), "xy"),
    )
    return {"data_scale_fetch.svg": Picture(fetches), "data_scale_host.svg": Picture(host)}


if __name__ == "__main__":
    main()
