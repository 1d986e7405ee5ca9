"""`plan cost`: hours, energy and money of a run, from a rate that was measured, given or predicted."""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence

from jaxthru.config import RunConfig
from jaxthru.plan import limits
from jaxthru.plan.cluster import Cluster
from jaxthru.plan.demand import Demand
from jaxthru.runtime.errors import require
from jaxthru.training import cost
from jaxthru.training.cost import HOUR, CostConfig
from jaxthru.training.rows import Row
from jaxthru.training.run_directory import RunDirectory

WARM_UP = 5
"""Steps at the start whose rate says nothing of the others."""
MWH = 3.6e9
LONG = 3600.0
"""Seconds of steps from which a run's goodput says something of others: a start is paid once."""


@dataclasses.dataclass(frozen=True)
class Rate:
    """Tokens/s of so many devices together. low, high: between which it is. joules_per_token: None if not
    known. whole: the joules have all that `cost` adds already. goodput: share of the time that steps take,
    None if not known, as of a run too short to tell. said: where it comes from, and how sure it is."""

    devices: int
    tokens_per_second: float
    low: float
    high: float
    said: tuple[str, ...]
    joules_per_token: float | None = None
    whole: bool = False
    goodput: float | None = None


@dataclasses.dataclass(frozen=True)
class Bill:
    """What a run comes to. hours, low_hours, high_hours: of the steps. joules, dollars: None where not known.
    The longest of hours is by the least of rates."""

    tokens: float
    rate: Rate
    hours: float
    low_hours: float
    high_hours: float
    device_hours: float
    mwh: float | None
    dollars: float | None
    joules_per_token: float | None
    dollars_per_million_tokens: float | None


def measured(run: RunDirectory, devices: int | None = None) -> Rate:
    """Returns the rate that a run had. devices: to which it is scaled, in proportion; None is as many as it
    had. Raises InputError where the directory does not say."""
    rows, had = run.read_metrics(), _devices(run)
    kept = [row for row in rows if row["step"] > WARM_UP] or rows
    known = [row for row in kept if row["tokens_per_second"]]
    require(bool(known), f"--run {run.path}: its metrics.jsonl has no step with tokens_per_second")
    rates = [row["tokens_per_second"] for row in known]
    low, middle, high = _quartiles(rates)
    of, own = cost.total(known), run.asked("cost")
    factor = (devices or had) / had
    said = [
        f"measured: the median of {len(rates):,} steps of {run.path} on {had} devices; half of its steps "
        f"lie between {low:,.0f} and {high:,.0f} tokens/s"
    ]
    if factor != 1:
        said.append(
            f"scaled from {had} to {devices} devices in proportion, which no network gives: an upper bound; "
            "plan limits and plan network say what is lost"
        )
    added = [f"cost.{key} = {own[key]}" for key in ("watts_beside", "pue") if own.get(key) is not None]
    if added:
        said.append(f"its joules are with the run's own {', '.join(added)}")
    return Rate(
        devices or had,
        middle * factor,
        low * factor,
        high * factor,
        tuple(said),
        joules_per_token=of.joules_per_token,
        whole=bool(added),
        goodput=rows[-1]["goodput"] if sum(row["step_seconds"] or 0.0 for row in rows) >= LONG else None,
    )


def predicted(need: Demand, cluster: Cluster, devices: int) -> Rate:
    """Returns the rate that `plan limits` predicts. Raises InputError where no mesh holds the state."""
    most = cluster.most or devices
    require(devices <= most, f"--devices {devices}: the fabric has {most:,}; give another --fabric")
    point = limits.best(need, cluster, devices)
    require(
        point is not None,
        f"--devices {devices}: no mesh of so many holds the state and splits train.rows = {need.rows}; "
        "`plan limits` shows which do",
    )
    fast, slow = point.tokens_per_second, point.tokens_per_second_exposed
    said = (
        f"predicted by plan limits, not measured: {fast:,.0f} tokens/s if all communication is overlapped, "
        f"{slow:,.0f} if none is; both at the rate of products alone, of which whole steps reach less "
        "(one H200: 83 %, docs/results.md)",
        *cluster.said,
    )
    return Rate(devices, fast, slow, fast, said)


def given(tokens_per_second: float, devices: int) -> Rate:
    """Returns a rate that the user knows."""
    said = (f"given: {tokens_per_second:,.0f} tokens/s on all of {devices:,} device(s), taken as it is",)
    return Rate(devices, tokens_per_second, tokens_per_second, tokens_per_second, said)


def bill(tokens: float, rate: Rate, prices: CostConfig) -> Bill:
    """Returns what a run of so many tokens comes to."""
    seconds = tokens / rate.tokens_per_second
    device_seconds = seconds * rate.devices
    joules = None if rate.joules_per_token is None else rate.joules_per_token * tokens
    if not rate.whole:
        joules = prices.joules(joules, device_seconds)
    dollars = prices.dollars(device_seconds)
    return Bill(
        tokens=tokens,
        rate=rate,
        hours=seconds / HOUR,
        low_hours=tokens / rate.high / HOUR,
        high_hours=tokens / rate.low / HOUR,
        device_hours=device_seconds / HOUR,
        mwh=None if joules is None else joules / MWH,
        dollars=dollars,
        joules_per_token=None if joules is None else joules / tokens,
        dollars_per_million_tokens=None if dollars is None else dollars / tokens * 1e6,
    )


def tokens_of(config: RunConfig) -> int:
    """Returns the tokens of a run's steps, as if no row were padded."""
    return config.train.steps * config.train.rows * config.data.sequence


def _devices(run: RunDirectory) -> int:
    try:
        return int(json.loads(run.environment.read_text())["devices"]["count"])
    except (OSError, ValueError, KeyError, TypeError):
        require(False, f"--run {run.path}: its environment.json does not say how many devices it had")
        raise


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def lines(found: Bill, prices: CostConfig) -> list[str]:
    """Returns what is not sure, and what is not counted, a line each."""
    rate, said = found.rate, list(found.rate.said)
    if not math.isclose(rate.low, rate.high):
        said.append(f"so {found.low_hours:,.4g} to {found.high_hours:,.4g} hours, and dollars in proportion")
    if rate.goodput is not None and rate.goodput < 1:
        said.append(
            f"steps alone: with start, evaluation and checkpoints as in that run "
            f"(goodput {rate.goodput:.1%}) {found.hours / rate.goodput:,.4g} hours"
        )
    else:
        said.append("steps alone: start, evaluation, checkpoints, failures and padding come on top")
    if found.mwh is None:
        said.append(
            "energy is not known: give --joules-per-token, or --run of a run whose metrics.jsonl has joules"
        )
    elif not rate.whole and prices.watts_beside is None:
        said.append("energy is what the devices count: hosts and fans (cost.watts_beside) are not in it")
    if found.mwh is not None and not rate.whole and prices.pue is None:
        said.append("cost.pue is not given: the building's own share is not in the energy")
    if rate.whole and (prices.watts_beside, prices.pue) != (None, None):
        said.append("cost.watts_beside and cost.pue of this plan add nothing: that run's joules have its own")
    if found.dollars is None:
        said.append("no price: --set cost.dollars_per_device_hour=PRICE gives dollars; none is assumed")
    return said


def row_of(found: Bill) -> Row:
    """Returns the bill as plain values."""
    return dataclasses.asdict(found)
