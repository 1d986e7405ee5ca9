"""`plan data`: tokens and epochs of each source over the run, padding and load balance.

Everything is computed from the plan of the steps themselves; no text is read and no device works.
"""

import dataclasses

import numpy as np
import rich.box
import rich.console
import rich.table

from jaxthru.build.batches import row_cost
from jaxthru.config import RunConfig
from jaxthru.data.loading.dataset import Data
from jaxthru.engine.step import microbatch_blocks
from jaxthru.training.plot import Panel, Picture


@dataclasses.dataclass(frozen=True)
class Forecast:
    """steps: of the run, fewer than were asked for if a source ends it. ended_by: that source, or empty.
    available: tokens of each source. at: int64 [points], completed updates. tokens: float64 [points,
    sources], tokens read by then. sampled: int64 [samples], the steps that were planned in full. groups,
    microbatches: {"unbalanced" and "balanced": float64 [samples]}, the load imbalance: what the costliest
    part costs over the mean, of groups over the step, and of groups at each micro-batch. group_count: of
    them. padding: share of the batch.
    """

    names: tuple[str, ...]
    steps: int
    ended_by: str
    available: np.ndarray
    at: np.ndarray
    tokens: np.ndarray
    sampled: np.ndarray
    group_count: int
    groups: dict[str, np.ndarray]
    microbatches: dict[str, np.ndarray]
    padding: float

    def table(self) -> rich.table.Table:
        """Returns the sources, with their shares of the tokens in the first and the last tenth of the run."""
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
        table.add_column("source", no_wrap=True)
        for column in ("first\ntenth", "last\ntenth", "tokens\nin the run", "epochs", "tokens\nthere are"):
            table.add_column(column, justify="right")
        tenth = max(1, len(self.at) // 10)
        first, last = self.tokens[tenth] - self.tokens[0], self.tokens[-1] - self.tokens[-1 - tenth]
        total = self.tokens[-1]
        for number, name in enumerate(self.names):
            table.add_row(
                name,
                *(f"{part[number] / part.sum():.3f}" for part in (first, last)),
                f"{total[number]:,.0f}",
                f"{total[number] / max(self.available[number], 1):.2f}",
                f"{self.available[number]:,}",
            )
        return table

    def lines(self) -> list[str]:
        """Returns what the table does not say, a line each."""
        found = [f"{self.padding:.2%} of the batch is padding."]
        said = f"Load imbalance (costliest of {self.group_count} groups / mean)"
        found.append(f"{said}, {len(self.sampled)} steps: {_orders(self.groups)}.")
        if any(np.any(values != self.groups[order]) for order, values in self.microbatches.items()):
            found.append(f"{said} at each micro-batch: {_orders(self.microbatches)}.")
        if self.ended_by:
            found.append(f"The run ends after step {self.steps}: source {self.ended_by} is exhausted.")
        return found

    def picture(self) -> Picture:
        """Returns the plot: shares over the steps, and the balance of the sampled steps."""
        taken = np.diff(self.tokens, axis=0)
        shares = taken / taken.sum(axis=1, keepdims=True)
        middle = (self.at[1:] + self.at[:-1]) / 2
        sources = {name: (middle, shares[:, number]) for number, name in enumerate(self.names)}
        balance = {order: (self.sampled, values) for order, values in self.groups.items()}
        imbalance = Panel("load imbalance: costliest group / mean, by step", balance)
        return Picture((Panel("share of the tokens, by step", sources), imbalance))


def forecast(config: RunConfig, data: Data, samples: int = 300) -> Forecast:
    """Returns the forecast of a run of this configuration from its first step. Raises InputError.

    samples: steps to plan in full, spread evenly over the run.
    """
    train = config.train
    cost = row_cost(dataclasses.replace(config, data=dataclasses.replace(config.data, balance=True)))
    keys = {"schedule": ((0, data.mixture),), "seed": train.seed, "rows": train.rows}
    plain, ours = data.planner(**keys), data.planner(**keys, cost=cost)
    steps = train.steps if plain.end is None else min(train.steps, plain.end)
    at = np.unique(np.linspace(0, steps, 201).astype(np.int64))
    available = np.array(list(data.tokens.values()))
    each = available / np.maximum(plain.available, 1)
    tokens = np.array([plain.sampler.taken(int(step)) for step in at]) * each

    sampled = np.unique(np.linspace(0, steps - 1, min(samples, steps)).astype(np.int64))
    blocks = microbatch_blocks(train.rows, plain.groups, train.microbatches)
    groups, microbatches = {}, {}
    for order, planner in (("unbalanced", plain), ("balanced", ours)):
        plans = [planner.plan(int(step)) for step in sampled]
        costly = np.array([data.row_costs(cost, plan.source, plan.row) for plan in plans], float)
        groups[order] = _waited_for(costly.reshape(len(sampled), plain.groups, 1, -1))
        microbatches[order] = _waited_for(costly.reshape(len(sampled), blocks, train.microbatches, -1))
    pieces = (data.builder.pieces(plan.source, plan.row) for plan in plans)  # the same in either order
    filled = sum(int(each.length.sum()) for each in pieces)
    return Forecast(
        names=data.names,
        steps=steps,
        ended_by=plain.ended_by if steps < train.steps else "",
        available=available,
        at=at,
        tokens=tokens,
        sampled=sampled,
        group_count=plain.groups,
        groups=groups,
        microbatches=microbatches,
        padding=1 - filled / (len(sampled) * train.rows * config.data.sequence),
    )


def _orders(ratios: dict[str, np.ndarray]) -> str:
    orders = ratios.items()
    return ", ".join(f"{np.mean(values):.3f} {order} (worst {values.max():.3f})" for order, values in orders)


def _waited_for(costs: np.ndarray) -> np.ndarray:
    """Returns float64 [steps], the costliest part at each micro-batch over the mean, of costs [steps, parts,
    micro-batches, rows]."""
    parts = costs.sum(axis=3)
    return parts.max(axis=1).sum(axis=1) / parts.mean(axis=1).sum(axis=1)
