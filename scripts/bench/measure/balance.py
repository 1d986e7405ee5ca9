"""How evenly a step's work is spread over the groups of a batch, and what planning a step takes.

    python scripts/bench/suite.py data --rows balance
    python scripts/bench/measure/balance.py --lengths 'lognormal(6, 2)' --sequence 8192 [--groups 32]

Heavy-tailed document lengths, never split but where one is longer than a row. Each figure is what the
costliest group costs, padding charged like tokens, over the mean of what the documents alone need; the mean
over the steps. `arrival`: documents fill rows in the order in which they come (next fit). `unbalanced`: rows
by best fit, as planned. `balanced`: the same rows in the order that jaxthru gives them. `devices`: balanced,
when the groups are shared out to eight devices, over the mean with its padding. `plan_ms` is the
median CPU time of planning a step, which a prefetch thread does. No accelerator is needed.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import numpy as np

from jaxthru.data.mixture.balance import row_costs
from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.mixture.packing import Packing, pack
from jaxthru.data.mixture.planner import Planner
from jaxthru.data.mixture.sampler import Supply

LENGTHS = {
    "lognormal(6, 2)": lambda draw, count: draw.lognormal(6, 2, count),
    "200 × (1 + pareto(1))": lambda draw, count: 200 * (1 + draw.pareto(1, count)),
}
DEVICES = 8


def lengths(name: str, tokens: int, sequence: int) -> np.ndarray:
    """Returns int64 [documents], lengths of about `tokens` in all, none above a row."""
    found = LENGTHS[name](np.random.default_rng(0), tokens // 500)
    found = np.clip(found, 1, sequence).astype(np.int64)
    return found[: np.searchsorted(np.cumsum(found), tokens)]


def next_fit(documents: np.ndarray, sequence: int) -> Packing:
    """Returns the documents in rows, each begun when the one before has no room for the next."""
    first, room = [0], sequence
    for number, length in enumerate(documents.tolist()):
        if length > room:
            first.append(number)
            room = sequence
        room -= length
    ends = np.cumsum(documents)
    first = np.array([*first, len(documents)])
    return Packing(first, ends - documents, documents, np.ones(len(documents), bool))


def spread(costs: np.ndarray, needed: np.ndarray, groups: int) -> float:
    """Returns the mean over steps of the costliest group over the mean need; both [steps, rows]."""
    parts = costs.reshape(len(costs), groups, -1).sum(axis=2)
    return float((parts.max(axis=1) / (needed.sum(axis=1) / groups)).mean())


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what is found of so many steps."""
    groups, steps = (4, 2) if arguments.tiny else (arguments.groups, arguments.steps)
    sequence, rows = arguments.sequence, groups * arguments.rows_per_group
    documents = lengths(arguments.lengths, steps * rows * sequence, sequence)
    # For a Llama of this width, 6 × 12 × width² per token and layer against 6 × width per token²: appendix B
    # of arXiv:2204.02311, with a feed-forward part of eight widths².
    cost = (12.0 * arguments.embed, 1.0)

    def priced(packing: Packing) -> tuple[np.ndarray, np.ndarray]:
        costs = row_costs(packing.spans, sequence, *cost)
        padding = sequence - packing.used
        unit = 2**40 / (cost[0] * sequence + cost[1] * sequence**2)
        return costs, costs - padding * cost[0] * unit

    arrived = (
        part[: len(part) // rows * rows].reshape(-1, rows) for part in priced(next_fit(documents, sequence))
    )
    packing = pack(np.cumsum(documents), sequence, "best_fit")
    costs, needed = priced(packing)
    supply = {"documents": Supply(packing.rows, int(documents.sum()), len(documents))}
    schedule = ((0, Mixture.plain({"documents": 1})),)
    planner = Planner(supply, schedule, seed=0, rows=rows, groups=groups, sequence=sequence)

    def planned(planner: Planner) -> tuple[np.ndarray, float]:
        """Returns the rows of each step, and the median milliseconds of planning one."""
        planner.plan(0)
        clock, plans = [time.thread_time()], []
        for step in range(packing.rows // rows):
            plans.append(planner.plan(step).row)
            clock.append(time.thread_time())
        return np.array(plans), round(1e3 * statistics.median(np.diff(clock)), 3)

    plain, plain_ms = planned(planner)
    balanced, balanced_ms = planned(planner.balanced_by(lambda source, row: costs[row]))
    devices = costs[balanced].reshape(len(balanced), min(DEVICES, groups), -1).sum(axis=2)
    return {
        "lengths": arguments.lengths,
        "sequence": sequence,
        "groups": groups,
        "rows_per_group": arguments.rows_per_group,
        "embed": arguments.embed,
        "steps": len(balanced),
        "arrival": round(spread(*arrived, groups), 4),
        "unbalanced": round(spread(costs[plain], needed[plain], groups), 4),
        "balanced": round(spread(costs[balanced], needed[balanced], groups), 4),
        "devices": round(float((devices.max(axis=1) / devices.mean(axis=1)).mean()), 4),
        "padding": round(1 - documents.sum() / (packing.rows * sequence), 4),
        "plan_ms": balanced_ms,
        "plan_ms_unbalanced": plain_ms,
    }


option = harness.option
main = harness.program(
    __doc__,
    measure,
    option("--lengths", choices=LENGTHS, default="lognormal(6, 2)"),
    option("--sequence", type=int, default=8192),
    option("--groups", type=int, default=32),
    option("--rows-per-group", type=int, default=4),
    option("--embed", type=int, default=4096, help="width of the model whose costs are balanced"),
    option("--steps", type=int, default=20),
    option("--tiny", action="store_true", help="few steps of few groups"),
    config=False,
)


if __name__ == "__main__":
    sys.exit(main())
