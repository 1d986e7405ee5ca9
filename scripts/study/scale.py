"""Where the shipped models stop scaling, and what a large run costs: what docs/scale.md shows.

    python scripts/study/scale.py --write            # all of it, into docs/ and scripts/study/results/
    python scripts/study/scale.py --small --out DIR  # the same of less, as a test runs it
    python scripts/study/scale.py --price 3          # dollars too, at your price of a device-hour

Nothing here is measured anew: it is arithmetic (`plan limits`), a simulation of links (`plan network`) and
the watts and tokens/s of a record. It says so of each number.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from marked_page import fill
from scale_page import pictures, tables

from jaxthru import config as configuration
from jaxthru.plan import cost, limits, network, network_advice, network_compile, network_published
from jaxthru.plan import fabric as fabrics
from jaxthru.plan.cluster import Cluster, described
from jaxthru.plan.demand import Demand, demand, rate_of
from jaxthru.plan.fabric import Fabric
from jaxthru.plan.network_flows import Timed, simulate
from jaxthru.plan.network_traffic import Collective, along
from jaxthru.runtime import aot, xla
from jaxthru.runtime.atomic import write_atomically
from jaxthru.training.cost import CostConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "scale.md"
RECORD = ROOT / "scripts" / "bench" / "results" / "one_gpu_h200.json"
FABRICS = {
    "InfiniBand": ("infiniband_400g", ()),
    "RoCE": ("roce_two_tier", ()),
    "10 GbE": ("ethernet_pair", ("hosts=2048", "device=h200")),
}
"""Name -> a shipped fabric, and what is changed of it: 10 Gbit/s Ethernet with one switch for all hosts."""
BATCHES = {"as shipped": (), "16.8 M tokens": ("train.rows=2048", "train.microbatches=1")}
SETTLED = ("offload.level=none", "remat.policy=auto")
TOKENS = 15e12
LEAST, MOST = 8, 16_384
QUEUE_PAIRS = (1, 4, 16, 32)
PUBLISHED_HOURS = 6.4e6
"""GPU-hours of H100s of Llama 3 70B, by its model card (github.com/meta-llama/llama3, MODEL_CARD.md)."""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parsed(argv)
    aot.use_cpu()
    models = ("llama3_8b",) if arguments.small else ("llama3_8b", "llama3_70b")
    most = 64 if arguments.small else MOST
    found = {
        "command": "python scripts/study/scale.py" + " --small" * arguments.small,
        "commit": commit(),
        "scaling": [row for model in models for row in scaling(model, most)],
        "hash": [row for model in models for row in hashed(model, 512 if arguments.small else 2048)],
        "compiled": [row for model in models for row in compiled(model)] if arguments.compile else [],
        "table_iii": table_iii(),
        "bill": bills(models[-1], most, arguments.price),
    }
    out = ROOT / "docs" / "images" if arguments.write else arguments.out
    drawn = pictures(found, models)
    text = tables(found)
    if out is not None:
        for name, picture in drawn.items():
            picture.save(out / name)
        record = ROOT / "scripts" / "study" / "results" if arguments.write else out
        write_atomically(record / "scale.json", json.dumps(found, indent=1) + "\n")
    if arguments.write:
        fill(PAGE, text, Path(__file__).name)
    print("\n\n".join(f"## {name}\n\n{table}" for name, table in text.items()))


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="one model on few devices, in seconds")
    parser.add_argument("--out", type=Path, help="write scale.json and the pictures there")
    parser.add_argument("--write", action="store_true", help="fill docs/scale.md, its pictures and record")
    of_program = "the compiled step's own collectives too; needs jaxthru[gpu], and minutes for each model"
    parser.add_argument("--compile", action="store_true", help=of_program)
    parser.add_argument("--price", type=float, help="dollars of a device-hour; without it there are none")
    arguments = parser.parse_args(argv)
    if arguments.write and arguments.small:
        parser.error("--write: the page has the whole study; leave --small out")
    return arguments


def commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    return said.stdout.strip()


def needs(model: str, batch: str) -> Demand:
    """Returns what a step of a shipped model takes, with a batch of that name."""
    path = ROOT / "configs" / f"{model}.py"
    return demand(configuration.load(path, [*SETTLED, *BATCHES[batch]]))


def on(fabric: Fabric, need: Demand, most: int) -> Cluster:
    """Returns H200s on a fabric."""
    target = aot.target("h200")
    rate, source = rate_of("h200", target.name, need, "compute")
    return described(fabric, target, rate, xla.memory_fraction(), source, most)


def scaling(model: str, most: int) -> list[dict[str, Any]]:
    """Returns where a model stops scaling on each fabric with each batch, and the curve."""
    rows = []
    for batch in BATCHES:
        need = needs(model, batch)
        for name, (file, changes) in FABRICS.items():
            cluster = on(fabrics.load(file, changes), need, most)
            points = [point for point in limits.points(need, cluster, most) if point.devices >= LEAST]
            end = limits.ends(need, cluster, points)
            rows.append(
                {"model": model, "batch": batch, "fabric": name, "tokens_per_step": need.tokens}
                | {"ends": dataclasses.asdict(end), "closed": limits.closed(need, cluster)}
                | {"points": [dataclasses.asdict(point) for point in points]}
            )
    return rows


def hashed(model: str, devices: int) -> list[dict[str, Any]]:
    """Returns what the switches' hash makes of a model's collectives: RoCE of two tiers, hosts packed and
    anywhere, by the 5-tuple alone and by so many queue pairs (E-ECMP)."""
    need = needs(model, "16.8 M tokens")
    base = fabrics.load("roce_two_tier")
    point = limits.best(need, on(base, need, devices), devices)
    collectives = collectives_of(need, point)
    rows = []
    for placement in ("packed", "random"):
        # A job of the whole cluster, so that leaves are as full as they get.
        fabric = dataclasses.replace(base, placement=placement, hosts=devices // 8, leaves=devices // 16)
        for qps in QUEUE_PAIRS:
            way = "five_tuple" if qps == 1 else "dest_qp"
            timed = simulate(collectives, dataclasses.replace(fabric, hash=way, qps=qps), devices, trials=5)
            over = [one for one in timed if one.links.nic]
            rows.append(
                {"model": model, "devices": devices, "mesh": point.mesh, "placement": placement}
                | {"hash": way, "qps": qps, "seconds": taken(over), "perfect": taken(over, "perfect")}
            )
    return rows


FSDP = 256
"""Devices of the compiled step, a row each."""


def compiled(model: str) -> list[dict[str, Any]]:
    """Returns what queue pairs make of the step that XLA compiles for fsdp = FSDP, on RoCE of two tiers."""
    settings = "remat.policy=projections", f"train.rows={FSDP}", f"mesh.fsdp={FSDP}", "model.loop=scan"
    more = "offload.level=none", "train.microbatches=1", "optim.clip_rule=exact", "mesh.data=1"
    config = configuration.load(ROOT / "configs" / f"{model}.py", [*settings, *more])
    request, shape, _ = network_compile.asked(config, "h200", FSDP, 8, segments=1)
    text = network_compile.compiled(request)
    rows = []
    for placement in ("packed", "random"):
        fabric = fabrics.load(
            "roce_two_tier", [f"placement={placement}", f"hosts={FSDP // 8}", f"leaves={FSDP // 16}"]
        )
        known = network_compile.rates("h200")
        found = network.forecast(text, fabric, shape, compiled=request.shape, rates=known, trials=5)
        rows += [
            {"model": model, "devices": FSDP, "placement": placement, "compute": found.schedule.compute}
            | dataclasses.asdict(point)
            for point in found.curve
            if point.qps in QUEUE_PAIRS
        ]
    return rows


def taken(found: list[Timed], what: str = "seconds") -> float:
    """Returns seconds of a step."""
    return sum(getattr(one, what) * one.collective.runs for one in found)


def collectives_of(need: Demand, point: limits.Point) -> list[Collective]:
    """Returns the collectives of a step on a mesh, by arithmetic: weights gathered twice and gradients
    scattered layer by layer over `fsdp`, gradients summed over `data`, activations gathered and scattered
    over `tensor`."""
    mesh, parts = point.mesh, point.microbatches
    shard = need.item * need.blocks / need.layers / mesh["tensor"]
    tokens = need.tokens / (mesh["data"] * mesh["fsdp"] * parts)
    passed = need.item * tokens * need.width
    rest = need.item * need.parameters / (mesh["tensor"] * mesh["fsdp"])
    layers = float(need.layers)
    kinds = (
        ("weights", "all-gather", "fsdp", shard, 2 * layers * parts),
        ("gradients", "reduce-scatter", "fsdp", shard, layers * parts),
        ("gradients", "all-reduce", "data", rest / need.layers, layers),
        ("activations", "all-gather", "tensor", passed, 4 * layers * parts),
        ("activations", "reduce-scatter", "tensor", passed, 4 * layers * parts),
    )
    return [
        Collective(f"{kind} of {what}", kind, size, along((axis,), mesh), runs, "bf16", what, axes=(axis,))
        for what, kind, axis, size, runs in kinds
        if mesh[axis] > 1
    ]


def table_iii() -> list[dict[str, Any]]:
    """Returns both rows of the 12B fine-tuning on two hosts, published and ours."""
    rows, beside = [], 0.0
    for name, published in (
        ("infiniband_400g", network_published.INFINIBAND),
        ("ethernet_pair", network_published.ETHERNET),
    ):
        found = network_published.table_iii(name)
        bound = found.links >= 0.5 * published
        beside = beside or published - found.links
        step = max(found.links, beside) if bound else None
        rows.append(
            {"fabric": name, "published": published, "links": found.links, "step": step}
            | {"binds": network_advice.binds(found)}
        )
    return rows


def bills(model: str, most: int, price: float | None) -> dict[str, Any]:
    """Returns what TOKENS of a model come to, by the watts and the rate of the recorded steps of one H200,
    and by the share of linear that `plan limits` leaves on InfiniBand."""
    blocks = json.loads(RECORD.read_text())["blocks"]
    own = [block["line"] for block in blocks if block["contender"] == "jaxthru_causal"]
    watts = statistics.fmean(line["power_watts"] for line in own)
    reached = statistics.fmean(line["model_tflops"] for line in own) * 1e12
    need = needs(model, "16.8 M tokens")
    each = need.flops / need.tokens
    cluster = on(fabrics.load("infiniband_400g"), need, most)
    prices, rows = CostConfig(dollars_per_device_hour=price), []
    for devices in sorted({min(each_, most) for each_ in (1024, 4096, MOST)}):
        point = limits.best(need, cluster, devices)
        for bound, share in (("overlapped", point.share), ("exposed", point.share_exposed)):
            rate = devices * reached / each * share
            joules = watts * devices / rate
            known = dataclasses.replace(cost.given(rate, devices), joules_per_token=joules)
            bill = cost.bill(TOKENS, known, prices)
            rows.append(
                {"devices": devices, "bound": bound, "share": share, "days": bill.hours / 24}
                | {"device_hours": bill.device_hours, "mwh": bill.mwh, "dollars": bill.dollars}
                | {"joules_per_token": joules}
            )
    facts = {"model": model, "tokens": TOKENS, "watts": watts, "flops_per_second": reached}
    return facts | {"flops_per_token": each, "published_hours": PUBLISHED_HOURS, "rows": rows}


if __name__ == "__main__":
    main()
