"""The dataset of a run and its dataloader: `DataConfig`, and the way from a mix to batches on the devices."""

import dataclasses
import functools
import logging
import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from jaxthru.data.loading.batch_builder import BatchBuilder
from jaxthru.data.loading.loader import Cost, Loader
from jaxthru.data.loading.online import OnlineSplit
from jaxthru.data.loading.packed_split import PackedSplit, describe, pack_split
from jaxthru.data.loading.planned_batches import PlannedBatches
from jaxthru.data.loading.token_workers import Backend, TokenWorkers, check_backend
from jaxthru.data.mixture.balance import row_costs
from jaxthru.data.mixture.packing_whole import OverLong
from jaxthru.data.mixture.planner import Planner, held_out_plan
from jaxthru.data.mixture.sampler import Supply
from jaxthru.data.mixture.schedule import Schedule
from jaxthru.data.store.mix_file import load_mix
from jaxthru.data.store.prepare import Prepared, make_stores, open_stores
from jaxthru.data.store.text_store import TextStore
from jaxthru.runtime.cores import usable_cores
from jaxthru.runtime.errors import require

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """mix: a `.toml` path, or a name in data/mixes. sequence: tokens in a row.
    packing: `split` concatenates documents and cuts rows anywhere; `best_fit` places whole documents
        (only one longer than a row is cut) and pads what is left. Conversations lie whole in a row whatever
        this says.
    store: folder of the token stores, shared by all runs.
    tokenizer: a folder of published weights, or a tokenizer.json, whose tokenizer takes the place of the
        mix's; a run may be resumed with another path to the same tokenizer.
    groups: canonical groups a batch is packed and balanced for; None is the largest divisor of
        train.rows up to 64.
    balance: orders the rows of each step so that all devices have about the same work.
    linear_cost, attention_cost: seconds, or any unit, for each token of a row and for each token² of its
        documents, as measured; None takes the model's floating-point operations.
    loaders: token workers of each host, which make the tokens of the sources that are tokenised online; None
        is half of the cores that its training processes may use. They change no batch.
    workers: what token workers are: `processes`, or actors of a Ray cluster, `ray` (`jaxthru[ray]`), which
        RAY_ADDRESS names; without it a run starts one on each of its machines.
    over_long: what becomes of a conversation longer than a row: `drop` leaves it out, `truncate` cuts off its
        end, `cut` lets it go on in another row, as text does. Each start of a run says how many there are.
    """

    mix: str = "quickstart"
    sequence: int = 512
    packing: Literal["split", "best_fit"] = "split"
    store: str = "store"
    tokenizer: str | None = None
    groups: int | None = None
    loaders: int | None = None
    workers: Backend = "processes"
    balance: bool = True
    linear_cost: float | None = None
    attention_cost: float | None = None
    over_long: OverLong = "drop"

    def __post_init__(self):
        require(self.sequence >= 2, f"data.sequence = {self.sequence}: must be at least 2")
        for name in ("groups", "loaders"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"data.{name} = {value}: must be at least 1")
        costs = self.linear_cost, self.attention_cost
        require(
            costs == (None, None)
            or (None not in costs and 0 < costs[0] < math.inf and 0 <= costs[1] < math.inf),
            f"data.linear_cost = {costs[0]}, data.attention_cost = {costs[1]}: must both be given, the first "
            "above 0 and the second at least 0, or neither",
        )

    def groups_of(self, rows: int) -> int:
        """Returns the canonical groups that batches of `rows` rows are packed for."""
        return self.groups or canonical_groups(rows)


def open_data(
    config: DataConfig,
    *,
    prepare: bool = True,
    begun: Mapping[str, str] | None = None,
    kept: Path | None = None,
) -> "Data":
    """Returns the opened data of a configuration.

    prepare: make the token stores that are missing, with a progress bar. begun: `keys` of the run that goes
    on, whose stores are opened if they are still there, though their sources have changed; without `prepare`
    these stores are opened and nothing else is looked at, so that in a run of several processes only the
    first needs the text, see `prepare_data`. kept: where that run keeps its tokenizer
    (`RunDirectory.tokenizer`), which may not be there: it is taken where the tokenizer that the configuration
    or the mix names is gone. Raises InputError.
    """
    check_backend(config.workers)
    mix = load_mix(config.mix, config.tokenizer, kept)
    return Data(config, open_stores(mix, Path(config.store), prepare, begun))


def prepare_data(
    config: DataConfig,
    begun: Mapping[str, str] | None = None,
    kept: Path | None = None,
    *,
    packings: bool = True,
) -> dict[str, str]:
    """Makes the token stores that are missing and returns the keys by which any process opens them:
    `open_data(config, prepare=False, begun=keys)`. begun, kept: as there. packings: make those that are
    missing too, for which everything is opened once; otherwise whoever opens the stores does. Raises
    InputError.
    """
    check_backend(config.workers)
    keys = make_stores(load_mix(config.mix, config.tokenizer, kept), Path(config.store), begun)
    if packings:
        open_data(config, prepare=False, begun=keys, kept=kept).close()
    return keys


class Data(Loader):
    """Opened token stores and their packing. Close it, or use it as a context manager: else a token worker
    that hangs keeps threads that wait for it, and these keep the process.

    names: sources in mix order, which `batch["source"]` numbers. mixture: of the mix file now.
    keys: {source: key of its store}, for the checkpoint. tokenizer: what the stores were made with, see
    `Tokenizer`. vocabulary: its highest token id + 1.
    rows: {source: rows to train on}. pieces: {source: documents, or parts of such, in these rows}.
    segments: no row has more, a padding tail counted as one; a multiple of 8. tokens: {source: tokens in the
    rows to train on}. counted: {source: what became of its conversations, None for one of text}. account:
    that in words, a line for each such source. masked: whether some of them say what is trained on.
    units: {source: documents that belong together}, 2 of pairs.
    """

    def __init__(self, config: DataConfig, prepared: Prepared):
        self.config, self.prepared = config, prepared
        self._planned: tuple[tuple, Planner] | None = None  # what was asked for last, and its plan
        self.names = tuple(prepared.stores)
        self.mixture = prepared.mix.mixture
        self.keys = prepared.keys
        self.tokenizer = prepared.tokenizer
        self.vocabulary = self.tokenizer.text_vocabulary
        online = tuple(name for name, opened in prepared.stores.items() if isinstance(opened, TextStore))
        processes = config.loaders or max(usable_cores() // 2, 1)
        recipes = {name: prepared.mix.recipes[name] for name in online}
        transforms = {name: each.transform for name, each in recipes.items() if each.records == "text"}
        made = self.tokenizer.path, transforms, self.tokenizer.borders
        self.workers = TokenWorkers(processes, online, *made, config.workers) if online else None
        if self.workers:
            weakref.finalize(self, self.workers.close)
        self.units = {name: opened.about.get("unit", 1) for name, opened in prepared.stores.items()}
        units = list(self.units.values())

        def packed_splits(split: str) -> list[PackedSplit]:
            splits = (getattr(opened, split) for opened in prepared.stores.values())
            how = config.sequence, config.packing, config.over_long
            return [pack_split(item, *how, unit) for item, unit in zip(splits, units, strict=True)]

        def builder(splits: list[PackedSplit]) -> BatchBuilder:
            streams = [
                OnlineSplit(name, packed.split, self.workers) if name in online else packed.split
                for name, packed in zip(self.names, splits, strict=True)
            ]
            rows = (packed.rows for packed in splits)
            return BatchBuilder(list(zip(streams, rows, strict=True)), config.sequence)

        train, held_out = packed_splits("train"), packed_splits("held_out")
        self._tell_unkept([packed for packed in (*train, *held_out) if not packed.kept])
        packed_whole = (each for each in zip(self.names, train, units, strict=True) if each[1].counted)
        self.account = [describe(*each) for each in packed_whole]
        self.counted = {name: packed.counted for name, packed in zip(self.names, train, strict=True)}
        self.builder, self.held_out_builder = builder(train), builder(held_out)
        self.train, self.held_out = self.builder.splits, self.held_out_builder.splits
        self.masked = any(packed.split.targets is not None for packed in train)
        self.tokens = {name: packed.rows.tokens for name, packed in zip(self.names, train, strict=True)}
        self.rows = {name: packed.rows.rows for name, packed in zip(self.names, train, strict=True)}
        self.pieces = {name: packed.rows.pieces for name, packed in zip(self.names, train, strict=True)}
        most = max(packed.rows.max_segments for packed in (*train, *held_out))
        self.segments = -(-(most + 1) // 8) * 8

    def _tell_unkept(self, splits: list[PackedSplit]) -> None:
        """Says in one line that packings have to be made at each start, if some are."""
        if splits:
            said = (
                "%d of %d packings cannot be kept beside their stores, as %s cannot be written: each process "
            )
            said += "makes them at each start; where it can be, `%s` keeps them"
            config = self.config
            how = f"--sequence {config.sequence} --packing {config.packing} --over-long {config.over_long}"
            command = f"python -m jaxthru.data prepare {config.mix} --store {config.store} {how}"
            log.warning(said, len(splits), 2 * len(self.names), splits[0].split.folder, command)

    def __repr__(self) -> str:
        sources = ", ".join(f"{name} {tokens:,}" for name, tokens in self.tokens.items())
        rows = f"rows of {self.config.sequence} ({self.config.packing})"
        return f"<data of mix {self.config.mix}: tokens {sources}; {rows}; vocabulary {self.vocabulary:,}>"

    def close(self) -> None:
        """Ends the token workers; batches being built fail."""
        if self.workers:
            self.workers.close()

    def __reduce__(self):
        # A copy for another process opens the same stores; pickled memory maps would be their contents.
        kept = self.prepared.mix.tokenizer.kept
        return functools.partial(open_data, self.config, prepare=False, begun=self.keys, kept=kept), ()

    def planned(
        self,
        schedule: Schedule,
        *,
        seed: int,
        rows: int,
        steps: int,
        local_rows: slice | None = None,
        cost: Cost | None = None,
    ) -> PlannedBatches:
        """Returns the batches of a run, see `dataset`. Raises InputError."""
        asked = {"seed": seed, "rows": rows, "steps": steps, "local_rows": local_rows, "cost": cost}
        return PlannedBatches(self, schedule, **asked)

    @property
    def threads(self) -> int:
        """How many build batches ahead: those that wait for token workers cost nothing, and keep them busy;
        those that build a batch would take turns at the interpreter's lock."""
        return 4 if self.workers else 1

    def planner(self, schedule: Schedule, *, seed: int, rows: int, cost: Cost | None = None) -> Planner:
        """Returns the plan of all steps of `rows` rows, balanced if rows have a cost. Raises InputError."""
        asked = schedule, seed, rows
        if self._planned is None or self._planned[0] != asked:
            self._planned = asked, self._plan(*asked)
        planner = self._planned[1]
        return planner.balanced_by(functools.partial(self.row_costs, cost)) if cost else planner

    def _plan(self, schedule: Schedule, seed: int, rows: int) -> Planner:
        # By the tokens that are in rows, however they are packed: a source's last row may be next to empty,
        # and be its only one.
        supplies = {
            name: Supply(packed.rows, packed.tokens, packed.documents)
            for name, (_, packed) in zip(self.names, self.train, strict=True)
        }
        groups = self.config.groups_of(rows)
        sequence = self.config.sequence
        return Planner(supplies, schedule, seed=seed, rows=rows, groups=groups, sequence=sequence)

    def row_costs(self, cost: Cost, source: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Returns int64 [rows], what rows cost to train on, in one unit. source, row: int64 [rows], which row
        of which source."""
        return row_costs(self.builder.spans(source, row), self.config.sequence, *cost)

    def held_out_rows(self, total_rows: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source, row) of each row of the held-out batches, int64 [batches, rows] both."""
        available = np.array([packing.rows for _, packing in self.held_out], np.int64)
        return held_out_plan(available, total_rows, rows)


def canonical_groups(rows: int) -> int:
    """Returns the largest divisor of `rows` up to 64."""
    return max(number for number in range(1, min(rows, 64) + 1) if rows % number == 0)
