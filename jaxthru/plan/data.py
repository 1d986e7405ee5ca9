"""`plan data`: what each source is asked for and gives over the run, epochs, padding, cuts and load balance.

Everything is computed from the plan of the steps themselves; no text is read and no device works.
"""

import dataclasses

import numpy as np
import rich.console
import rich.table
import rich.text

from jaxthru.build.batches import row_cost
from jaxthru.config import RunConfig
from jaxthru.data.loading.dataset import Data
from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.mixture.epochs import repeated
from jaxthru.data.mixture.schedule import stairs
from jaxthru.engine.step import microbatch_blocks
from jaxthru.training.plot import Panel, Picture

FEW = 24
"""Sources that the table shows one by one: as many lines as a terminal shows at once."""
LARGEST, NOTEWORTHY = 12, 4
"""Of more sources, those of the most tokens, and those of the most of each thing that is worth a look."""
DEVICES = 8
"""Parts of a batch, at most, over which the balance is told where single rows have none."""


@dataclasses.dataclass(frozen=True)
class Source:
    """asked, share: of the tokens of the run, by the weights and as the run has it; caps, and sources that
    run out, make them differ. first, last: the same in its first and last tenth. tokens, epochs: in the run.
    available, documents, rows: in an epoch. padding: share of its rows. cuts: places in an epoch where a
    document goes on in another row."""

    name: str
    asked: float
    share: float
    first: float
    last: float
    tokens: float
    epochs: float
    available: int
    documents: int
    rows: int
    padding: float
    cuts: int


@dataclasses.dataclass(frozen=True)
class Forecast:
    """steps: of the run, fewer than were asked for if a source ends it. ended_by: that source, or empty.
    changes: whether shares change over the run. at: int64 [points], completed updates. tokens: float64
    [points, sources], tokens read by then. sampled: int64 [samples], the steps that were planned in full.
    groups, microbatches, devices: {"unbalanced" and "balanced": float64 [samples]}, the load imbalance: what
    the costliest part costs over the mean, of groups over the step, of groups at each micro-batch, and of
    `device_count` parts over the step, told where a group is one row. padding: share of the batch.
    """

    sources: tuple[Source, ...]
    steps: int
    ended_by: str
    changes: bool
    at: np.ndarray
    tokens: np.ndarray
    sampled: np.ndarray
    rows: int
    group_count: int
    device_count: int
    groups: dict[str, np.ndarray]
    microbatches: dict[str, np.ndarray]
    devices: dict[str, np.ndarray]
    padding: float

    def table(self) -> rich.table.Table:
        """Returns the sources, of many those that matter and the others together."""
        table = rich.table.Table(box=None, padding=(0, 1, 0, 0))
        table.add_column("source", no_wrap=True)
        tenths = ("first\ntenth", "last\ntenth") if self.changes else ()
        shown = ("asked", "share", *tenths, "tokens\nin run", "epochs", "tokens\nthere")
        for column in (*shown, "pad-\nding", "cuts"):
            table.add_column(column, justify="right")
        chosen = self.sources if len(self.sources) <= FEW else self._noteworthy()
        others = [source for source in self.sources if source not in set(chosen)]
        digits = max(3, len(str(len(self.sources))) + 1)  # two of those of a mean share
        for source in (*chosen, *([_together(others)] if others else [])):
            shares = (source.asked, source.share, *((source.first, source.last) if self.changes else ()))
            table.add_row(
                rich.text.Text(source.name),
                *(f"{share:.{digits}f}" for share in shares),
                *(_short(source.tokens), f"{source.epochs:,.2f}", _short(source.available)),
                *(f"{source.padding:.1%}", _short(source.cuts)),
            )
        return table

    def _noteworthy(self) -> list[Source]:
        """Returns, in the order of the mix, the largest sources, those that are read most often, those whose
        padding takes most of the batch, and those that give least of what is asked."""
        padded = lambda source: source.epochs * source.rows * source.padding  # noqa: E731
        kinds = (
            (lambda source: source.tokens, LARGEST),
            (lambda source: source.epochs, NOTEWORTHY),
            (padded, NOTEWORTHY),
            (lambda source: abs(source.asked - source.share), NOTEWORTHY),
        )
        chosen = {each for key, most in kinds for each in sorted(self.sources, key=key)[-most:]}
        return [source for source in self.sources if source in chosen]

    def lines(self) -> list[str]:
        """Returns what the table does not say, a line each."""
        found = [f"{self.padding:.2%} of the batch is padding."]
        said = f"Load imbalance (costliest of {self.group_count} groups / mean)"
        sampled = f"{len(self.sampled)} steps"
        if self.group_count == self.rows:
            worst = self.groups["balanced"]
            rows = f"{said}, {sampled}: {np.mean(worst):.3f} (worst {worst.max():.3f}), balanced or not"
            found.append(
                f"{rows}: each of data.groups = {self.rows} is one row, which no order makes cheaper."
            )
            if self.device_count > 1:
                of = f"Load imbalance over {self.device_count} devices, {sampled}"
                found.append(f"{of}: {_orders(self.devices)}.")
        else:
            found.append(f"{said}, {sampled}: {_orders(self.groups)}.")
        if any(np.any(values != self.groups[order]) for order, values in self.microbatches.items()):
            found.append(f"{said} at each micro-batch: {_orders(self.microbatches)}.")
        if often := repeated({source.name: source.epochs for source in self.sources}, "in this run"):
            found.append(often[0].upper() + often[1:] + ".")
        if self.ended_by:
            found.append(f"The run ends after step {self.steps}: source {self.ended_by} is exhausted.")
        return found

    def to_tree(self) -> dict:
        """Returns the table of all sources and the lines as JSON values."""
        imbalance = {"groups": self.groups, "microbatches": self.microbatches, "devices": self.devices}
        return {
            "steps": self.steps,
            "ended_by": self.ended_by or None,
            "rows": self.rows,
            "padding": self.padding,
            "sources": [dataclasses.asdict(source) for source in self.sources],
            "sampled_steps": len(self.sampled),
            "group_count": self.group_count,
            "device_count": self.device_count,
            "imbalance": {
                parts: {
                    order: {"mean": float(np.mean(values)), "worst": float(values.max())}
                    for order, values in orders.items()
                }
                for parts, orders in imbalance.items()
            },
            "lines": self.lines(),
        }

    def picture(self) -> Picture:
        """Returns the plot: shares over the steps, and the balance of the sampled steps."""
        taken = np.diff(self.tokens, axis=0)
        shares = taken / taken.sum(axis=1, keepdims=True)
        middle = (self.at[1:] + self.at[:-1]) / 2
        sources = {source.name: (middle, shares[:, at]) for at, source in enumerate(self.sources)}
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
    each = np.array(list(data.tokens.values())) / np.maximum(plain.available, 1)
    tokens = np.array([plain.sampler.taken(int(step)) for step in at]) * each

    sampled = np.unique(np.linspace(0, steps - 1, min(samples, steps)).astype(np.int64))
    blocks = microbatch_blocks(train.rows, plain.groups, train.microbatches)
    devices = max(count for count in range(1, DEVICES + 1) if plain.groups % count == 0)
    devices = devices if devices < train.rows else 1
    groups, microbatches, over_devices = {}, {}, {}
    for order, planner in (("unbalanced", plain), ("balanced", ours)):
        plans = [planner.plan(int(step)) for step in sampled]
        costly = np.array([data.row_costs(cost, plan.source, plan.row) for plan in plans], float)
        groups[order] = _waited_for(costly.reshape(len(sampled), plain.groups, 1, -1))
        microbatches[order] = _waited_for(costly.reshape(len(sampled), blocks, train.microbatches, -1))
        over_devices[order] = _waited_for(costly.reshape(len(sampled), devices, 1, -1))
    pieces = (data.builder.pieces(plan.source, plan.row) for plan in plans)  # the same in either order
    filled = sum(int(each.length.sum()) for each in pieces)
    shares = data.mixture.shares.values()
    return Forecast(
        sources=_sources(data, steps, train.rows, tokens, plain.available),
        steps=steps,
        ended_by=plain.ended_by if steps < train.steps else "",
        changes=data.mixture.changes or any(share.exhausted != "repeat" for share in shares),
        at=at,
        tokens=tokens,
        sampled=sampled,
        rows=train.rows,
        group_count=plain.groups,
        device_count=devices,
        groups=groups,
        microbatches=microbatches,
        devices=over_devices,
        padding=1 - filled / (len(sampled) * train.rows * config.data.sequence),
    )


def _sources(
    data: Data, steps: int, rows: int, tokens: np.ndarray, available: np.ndarray
) -> tuple[Source, ...]:
    """Returns the sources. rows: of a step. tokens: as of `Forecast`. available: int64 [sources], the rows of
    each in an epoch."""
    sequence, packed = data.config.sequence, [each for _, each in data.train]
    documents = {name: each.documents for name, each in zip(data.names, packed, strict=True)}
    asked = _asked(data.mixture, steps, rows * sequence, data.tokens, documents)
    tenth = max(1, len(tokens) // 10)
    parts = tokens[-1], tokens[tenth] - tokens[0], tokens[-1] - tokens[-1 - tenth]
    share, first, last = ((part / part.sum()).tolist() for part in parts)
    return tuple(
        Source(
            name=name,
            asked=asked[name],
            share=share[at],
            first=first[at],
            last=last[at],
            tokens=float(tokens[-1, at]),
            epochs=float(tokens[-1, at]) / max(data.tokens[name], 1),
            available=data.tokens[name],
            documents=documents[name],
            rows=int(available[at]),
            padding=1 - data.tokens[name] / max(int(available[at]) * sequence, 1),
            cuts=packed[at].pieces - documents[name],
        )
        for at, name in enumerate(data.names)
    )


def _asked(
    mixture: Mixture, steps: int, tokens_per_step: int, tokens: dict[str, int], documents: dict[str, int]
) -> dict[str, float]:
    """Returns the share of the tokens of so many steps that the weights ask of each source, whether it has
    them or not. tokens, documents: of each, in an epoch."""
    asked = dict.fromkeys(tokens, 0.0)
    for first, last, weights in stairs(mixture, 0, tokens_per_step):
        until = steps if last is None else min(last, steps)
        if until <= first:
            break
        if mixture.count == "documents":
            weights = {name: each * tokens[name] / max(documents[name], 1) for name, each in weights.items()}
        total = sum(weights.values())
        for name, weight in weights.items():
            asked[name] += (until - first) / steps * weight / total
    return asked


def _together(sources: list[Source]) -> Source:
    """Returns several sources as one."""
    total = {
        field.name: sum(getattr(source, field.name) for source in sources)
        for field in dataclasses.fields(Source)
        if field.name != "name"
    }
    total["epochs"] = total["tokens"] / max(total["available"], 1)
    total["padding"] = sum(source.padding * source.rows for source in sources) / max(total["rows"], 1)
    return Source(name=f"{len(sources):,} others", **total)


def _short(count: float) -> str:
    """Returns a count in three digits; `--json` has all of it."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * unit:
            return f"{count / unit:.3g}{name}"
    return f"{count:.0f}"


def _orders(ratios: dict[str, np.ndarray]) -> str:
    orders = ratios.items()
    return ", ".join(f"{np.mean(values):.3f} {order} (worst {values.max():.3f})" for order, values in orders)


def _waited_for(costs: np.ndarray) -> np.ndarray:
    """Returns float64 [steps], the costliest part at each micro-batch over the mean, of costs [steps, parts,
    micro-batches, rows]."""
    parts = costs.sum(axis=3)
    return parts.max(axis=1).sum(axis=1) / parts.mean(axis=1).sum(axis=1)
