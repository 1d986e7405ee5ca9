"""Accounts for a collected profile: its ledger, and what that was made of."""

import collections
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from jaxthru.models import facts
from jaxthru.models.family import from_plain
from jaxthru.moved import renewed
from jaxthru.profile.account import frequency, ledger
from jaxthru.profile.account.attribution import Attribution
from jaxthru.profile.account.ledger import Ledger
from jaxthru.profile.account.measured import Measured
from jaxthru.profile.account.memory import footprint
from jaxthru.profile.account.operations import Operations
from jaxthru.profile.collect import clocks
from jaxthru.profile.read.facts import Facts
from jaxthru.runtime import plain
from jaxthru.runtime.mesh import shape_of
from jaxthru.training import cost

KERNELS = 50
WARM_UP = 3
"""Steps that the loop's own median leaves out at the start, and after a trace."""


@dataclasses.dataclass(frozen=True, eq=False)
class Accounted:
    """A profile that was accounted for. ledger: without what its program shows, and without advice.
    operations: of each pass. program: what ran. spent: seconds of a step by (module, instruction). runs: of
    each program in a step. config: the run's, as nested plain values, with the sizes of its mesh found."""

    ledger: Ledger
    operations: dict[str, Operations]
    program: Attribution
    spent: dict[tuple[str, str], float]
    runs: dict[str, float]
    config: dict[str, Any]


def account(folder: Path) -> Accounted:
    """Returns the account of `runs/.../profile/<step>/`. Raises ValueError if what was collected is
    incomplete."""
    run = folder.parent.parent
    collected = _json(folder / "collected.json")
    config, environment = renewed(_json(run / "config.json")), _json(run / "environment.json")
    config["mesh"] = shape_of(config["mesh"], collected["devices"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.strip()]
    taken, model = collected["passes"], facts_of(config, collected)
    if "production" not in taken:
        raise ValueError("the run ended before its steps were traced as they are trained")
    named, learned = None, {}
    if of := taken.get("attribution"):
        # The first run of a program is alone, see `runtime.first_run`.
        skip = int(of["steps"] > 1)
        named = Measured(folder, "attribution", "attribution.hlo.txt", of, skip=skip, kinds=model.scopes)
        learned = {one.event.name: one.line for window in named.windows for one in window.ran if one.work}
    of = taken["production"]
    production = Measured(folder, "production", "step.hlo.txt", of, learned, kinds=model.scopes)
    passes = {"attribution": named, "production": production} if named else {"production": production}
    named = named or production
    # A line's seconds are those of the steps as they are trained; what it is made of, of those with names.
    scale = {line: production.seconds[line] / (of or 1.0) for line, of in named.seconds.items()}
    clock = production.clock(clocks.read(folder / "production"))
    tokens, span = _tokens(rows, production.kept, model)
    about = ledger.Run(
        config=run.parent.name if run.name.isdecimal() else run.name,
        versions=environment["versions"],
        tokens_per_step=tokens,
        attention_span_per_token=span / tokens if tokens else 0.0,
        **slowest(rows),
        **{name: collected[name] for name in ("device_kind", "devices", "processes", "platform")},
    )
    held = collected["peak_bytes"], collected["host_pinned_bytes"]
    made = Ledger(
        run=about,
        window=_window(production, named, rows, taken),
        lines=tuple(
            ledger.Line(*line, line[1] / production.step_seconds) for line in production.seconds.items()
        ),
        matmul=matmul(named, production.seconds["matmul"], model.flops(tokens, 0), collected, clock),
        scopes=named.scopes(scale),
        kernels=named.kernels(scale)[:KERNELS],
        collectives=named.collectives(),
        devices=production.devices(),
        clock=clock,
        memory=footprint(folder / "dump", named.attribution, *held),
        model=model,
        cost=_cost(unprofiled(rows, taken)),
        expert_tokens=_expert_tokens(rows, production.kept),
    )
    operations = {name: one.operations for name, one in passes.items()}
    return Accounted(made, operations, named.attribution, named.spent(scale), named.runs, config)


def facts_of(config: dict[str, Any], collected: dict[str, Any]) -> Facts:
    """Returns what a run wrote down of its model; of an older one, what follows from its configuration."""
    if "model" in collected:
        return plain.build(Facts, collected["model"])
    return facts.facts(from_plain(config["model"]), config["precision"]["compute"])


def matmul(
    measured: Measured, seconds: float, needed: float, collected: dict[str, Any], clock: ledger.Clock
) -> ledger.Matmul:
    """Returns the line "matmul" taken apart. seconds: the line. needed: FLOPs of a step over all devices."""
    devices, peak = collected["devices"], collected["peak_flops"]
    elsewhere = measured.attribution.flops("collective_matmul", measured.runs) * devices
    done = measured.attribution.flops("matmul", measured.runs) * devices + elsewhere
    reference, most = frequency.reference(collected["device_kind"])
    if peak is None:
        return ledger.Matmul(done, needed, reference_mhz=reference, maximum_mhz=most)
    rate = peak * _speed(measured.attribution)
    ideal, recomputation = (needed - elsewhere) / devices / rate, (done - needed) / devices / rate
    slowed = seconds * (1 - clock.mean_mhz / reference) if clock.mean_mhz and reference else None
    inefficiency = seconds - ideal - recomputation - (slowed or 0.0)
    headroom = ideal * (1 - reference / most) if reference and most else None
    parts = ideal, recomputation, slowed, inefficiency
    return ledger.Matmul(done, needed, *parts, reference, most, headroom, peak)


def _speed(attribution: Attribution) -> float:
    """Returns how much faster than bf16 the matmuls' operands could be multiplied: float8 twice."""
    total = narrow = 0.0
    for work in attribution.all():
        if work.line == "matmul" and work.flops:
            of = attribution.modules[work.module]
            total += work.flops * work.runs
            inner = [shape for found, _ in of.inner(work.instruction) for shape in of.operand_shapes(found)]
            narrow += work.flops * work.runs * any(dtype.startswith("f8") for dtype, _ in inner)
    return 1 / (1 - narrow / total / 2) if total else 1.0


def unprofiled(rows: list[dict], taken: dict[str, dict]) -> list[dict]:
    """Returns the rows of metrics.jsonl of steps that ran as if there were no profiler. taken: the passes of
    collected.json."""
    traced = set()
    for one in taken.values():
        first, last = one["first_step"], one["first_step"] + one["steps"]
        traced |= set(range(first, last + 1 + WARM_UP))
    return [row for row in rows if row["step"] > WARM_UP and row["step"] not in traced]


def _window(production: Measured, named: Measured, rows: list, taken: dict) -> ledger.Window:
    """Returns the profiled steps beside the others, by the loop's own clock."""
    own = [row["step_seconds"] for row in unprofiled(rows, taken)]
    loop = statistics.median(own) if len(own) >= 3 else None
    quarters = statistics.quantiles(own, n=4) if loop else (0.0, 0.0, 0.0)
    step, kept = production.step_seconds, production.kept
    closure, noise = (step / loop - 1, (quarters[2] - quarters[0]) / loop) if loop else (None, 0.0)
    apart = None if named is production else named.step_seconds
    return ledger.Window(kept[0], len(kept), step, loop, closure, noise, apart)


def slowest(rows: list[dict]) -> dict[str, Any]:
    """Returns which process of several the others waited for in most steps, and how long it took."""
    seconds = collections.defaultdict(list)
    for row in rows:
        if row.get("slowest_process") is not None:
            seconds[row["slowest_process"]].append(row["slowest_process_seconds"])
    if not seconds:
        return {}
    process = max(seconds, key=lambda process: len(seconds[process]))
    return {"slowest_process": process, "slowest_process_seconds": statistics.fmean(seconds[process])}


def _cost(rows: list) -> ledger.Cost:
    """Returns the mean cost of steps."""
    of = cost.total(rows)
    joules, dollars = (None if value is None else value / len(rows) for value in (of.joules, of.dollars))
    return ledger.Cost(joules, of.joules_per_token, dollars, of.dollars_per_million_tokens)


def _tokens(rows: list, steps: list[int], model: Facts) -> tuple[float, float]:
    """Returns a step's mean tokens and Σ document length², which follows from the FLOPs in older rows."""
    own = [row for row in rows if row["step"] in steps]
    if not own:
        return 0.0, 0.0
    tokens = statistics.fmean(row["tokens"] for row in own)
    if all("attention_span" in row for row in own):
        return tokens, statistics.fmean(row["attention_span"] for row in own)
    done = statistics.fmean((row["model_tflops"] or 0.0) * 1e12 * row["step_seconds"] for row in own)
    return tokens, max(done - model.flops(tokens, 0), 0.0) / model.attention_flops


def _expert_tokens(rows: list, steps: list[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens by layer and expert that were last recorded before the profiled steps were over;
    none of a model without experts."""
    found = [row["expert_tokens"] for row in rows if "expert_tokens" in row and row["step"] <= max(steps)]
    return tuple(tuple(layer) for layer in found[-1]) if found else ()


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: not there; was the run profiled (profile.at) and did it come so far?")
    return json.loads(path.read_text())
