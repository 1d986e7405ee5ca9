"""The data of a run where several training processes share a host: one data server has it, they ask.

What a trainer holds of the data is names and counts. Its batches are views of memory that the server has
written; see `host_server`.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxthru.data.loading.batch_builder import Pieces
from jaxthru.data.loading.dataset import Data, DataConfig
from jaxthru.data.loading.host_client import Client, Host
from jaxthru.data.loading.loader import Cost, Loader
from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.mixture.packing_whole import Packed
from jaxthru.data.mixture.planner import StepPlan
from jaxthru.data.mixture.schedule import Schedule
from jaxthru.data.store.mix_file import load_mix
from jaxthru.data.store.prepare import kept_tokenizer
from jaxthru.data.store.token_store import let_files_open
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.runtime.errors import InputError, require

ANY_STEP = 1 << 62
"""Steps of a plan whose end is asked for."""


class HostData(Loader):
    """The data of a run, of which this process has names and counts, and the host's data server the rest.
    Close it, or use it as a context manager. Its attributes are those of `Data`.
    """

    def __init__(self, host: Host, config: DataConfig, keys: Mapping[str, str], kept: Path | None = None):
        """config, kept: as `open_data` takes them. keys: of `prepare_data`. Raises InputError."""
        self.config, self._kept = config, kept
        let_files_open()  # each batch that is kept, as those to evaluate with, is one
        self._client = Client(host, config, keys, kept)
        try:
            facts, _ = self._client.ask("facts")
        except BaseException:
            self.close()
            raise
        self.names, self.account = tuple(facts["names"]), facts["account"]
        self.keys, self.units, self.masked = facts["keys"], facts["units"], facts["masked"]
        self.vocabulary, self.segments = facts["vocabulary"], facts["segments"]
        # All trainers together have about as many batches built at once as one that is alone.
        self.threads = -(-facts["threads"] // host.trainers)
        self.rows, self.pieces, self.tokens = (facts[name] for name in ("rows", "pieces", "tokens"))
        self.counted = {name: each and Packed(**each) for name, each in facts["counted"].items()}
        self.mixture = Mixture.from_tree(facts["mixture"])
        self._identity = facts["identity"]
        self.builder, self.held_out_builder = (
            HostBuilder(self._client, split) for split in ("train", "held_out")
        )

    def __repr__(self) -> str:
        sources = ", ".join(f"{name} {tokens:,}" for name, tokens in self.tokens.items())
        return f"<data of mix {self.config.mix}, shared by the processes of this host: tokens {sources}>"

    def __reduce__(self):
        raise InputError("data that the processes of a host share belongs to its process: it has no copies")

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """What the stores were made with; opened when it is first asked for."""
        mix = load_mix(self.config.mix, self.config.tokenizer, self._kept)
        found = kept_tokenizer(mix, Path(self.config.store), {self._identity})
        require(found is not None, f"{self.config.store}: its tokenizer has gone since this run started")
        return found

    def close(self) -> None:
        """Lets go of the server, which ends with its last trainer; batches being built fail."""
        self._client.close()

    def planned(
        self,
        schedule: Schedule,
        *,
        seed: int,
        rows: int,
        steps: int,
        local_rows: slice | None = None,
        cost: Cost | None = None,
    ) -> "HostBatches":
        """Returns the batches of a run, see `dataset`. Raises InputError."""
        local = (local_rows or slice(0, rows)).indices(rows)[:2]
        asked = {"seed": seed, "rows": rows, "steps": steps, "cost": cost}
        return HostBatches(self._client, _plan_of(schedule, asked), local)

    def planner(self, schedule: Schedule, *, seed: int, rows: int, cost: Cost | None = None) -> "HostPlanner":
        """Returns the plan of all steps of `rows` rows, balanced if rows have a cost. Raises InputError."""
        asked = {"seed": seed, "rows": rows, "steps": ANY_STEP, "cost": cost}
        return HostPlanner(self._client, _plan_of(schedule, asked))

    def held_out_rows(self, total_rows: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source, row) of each row of the held-out batches, int64 [batches, rows] both."""
        _, found = self._client.ask("held_out_rows", total_rows=total_rows, rows=rows)
        return found["source"], found["row"]


RunData = Data | HostData
"""The data of a run, opened here or by the data server of this host."""


class HostBatches:
    """A Grain RandomAccessDataSource: element i is the batch of update i + 1, read-only numpy arrays."""

    def __init__(self, client: Client, plan: dict[str, Any], local: tuple[int, int]):
        self._client, self._key, self._local = client, plan["key"], local
        about = client.tell(f"{self._key} {local}", "plan", **plan, local=local)
        self._length = about["length"]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        _, batch = self._client.ask("batch", key=self._key, local=self._local, step=int(step))
        return batch

    def __repr__(self) -> str:
        return f"<batches of {self._length:,} steps, rows {self._local[0]} to {self._local[1]}>"

    def __reduce__(self):
        raise InputError(
            "batches that the processes of a host share cannot be iterated in further ones (mp_prefetch): "
            "iterate with to_iter_dataset(data.read_options) alone"
        )


class HostPlanner:
    """A run's plan. end: completed updates after which an exhausted source, ended_by, ends it, or None."""

    def __init__(self, client: Client, plan: dict[str, Any]):
        self._client, self._key = client, plan["key"]
        about = client.tell(self._key, "plan", **plan)
        self.end, self.ended_by = about["end"], about["ended_by"]

    def plan(self, step: int) -> StepPlan:
        """Returns the plan of update `step` + 1."""
        _, found = self._client.ask("rows_of", key=self._key, step=step)
        return StepPlan(found["source"], found["row"])

    def epochs(self, steps: int) -> np.ndarray:
        """Returns how often each source is read in so many updates."""
        return self._client.ask("epochs", key=self._key, steps=steps)[1]["epochs"]


class HostBuilder:
    """The server's batch builder of a split. See `BatchBuilder`."""

    def __init__(self, client: Client, split: str):
        self._client, self._split = client, split
        self._columns: list[str] = []

    @property
    def columns(self) -> tuple[str, ...]:
        """What batches bring along beside the fields of every batch."""
        return tuple(self._columns)

    def add_column(self, name: str, values: np.ndarray, width: int) -> None:
        """Has batches bring along a value of each of a row's pieces, the same in all trainers."""
        about = {"split": self._split, "name": name, "width": width}
        self._client.tell(f"column {name} of {self._split}", "column", {"values": values}, **about)
        self._columns.append(name)

    @functools.cached_property
    def piece_count(self) -> int:
        """Pieces of all rows."""
        return self._client.ask("piece_count", split=self._split)[0]["value"]

    def checksum(self) -> int:
        """Returns a checksum of which documents lie in which rows. Raises InputError for a damaged file."""
        return self._client.ask("checksum", split=self._split)[0]["value"]

    def pieces(self, source: np.ndarray, row: np.ndarray) -> Pieces:
        """Returns the pieces of these rows, row after row. Raises InputError for a damaged file."""
        _, found = self._client.ask("pieces", {"source": source, "row": row}, split=self._split)
        return Pieces(**found)

    def build(self, source: np.ndarray, row: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the batch of these rows, read-only arrays of [rows, sequence]."""
        _, batch = self._client.ask("build", {"source": source, "row": row}, split=self._split)
        return batch


def _plan_of(schedule: Schedule, asked: dict[str, Any]) -> dict[str, Any]:
    """Returns what describes a plan, and its key."""
    tree = [[step, mixture.to_tree()] for step, mixture in schedule]
    about = {"schedule": tree} | asked
    return about | {"key": hashlib.sha256(json.dumps(about).encode()).hexdigest()}
