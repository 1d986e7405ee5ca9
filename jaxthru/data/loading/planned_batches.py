"""The planned batches of a run as a Grain dataset: any step at once, and an iterator that builds ahead."""

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxthru.data.mixture.planner import StepPlan
from jaxthru.data.mixture.schedule import Schedule
from jaxthru.runtime.errors import require

if TYPE_CHECKING:
    import grain

    from jaxthru.data.loading.dataset import Data
    from jaxthru.data.loading.loader import Cost

AHEAD = (0, 8, 16)
"""Steps from now whose sources say where token workers will be needed."""

PLANS = 16
"""Steps whose plan is kept."""

ONE_PROCESS = (
    "a dataset with online sources cannot be iterated in several processes (mp_prefetch): each would start "
    "token workers of its own; iterate with to_iter_dataset(data.read_options) alone, or prepare the tokens"
)


class PlannedBatches:
    """A Grain RandomAccessDataSource: element i is the batch of update i + 1, numpy arrays.

    Grain's cost is per element; with whole batches as elements, gathered from memory maps, it vanishes.
    planner: of the run.
    """

    def __init__(
        self,
        data: "Data",
        schedule: Schedule,
        *,
        seed: int,
        rows: int,
        steps: int,
        local_rows: slice | None = None,
        cost: "Cost | None" = None,
    ):
        """The arguments are those of `Data.dataset`. Raises InputError."""
        asked = {"seed": seed, "rows": rows, "steps": steps, "local_rows": local_rows, "cost": cost}
        self._made = functools.partial(PlannedBatches, data, schedule, **asked)
        self._data, self._local_rows = data, local_rows or slice(0, rows)
        self.planner = data.planner(schedule, seed=seed, rows=rows, cost=cost)
        self._kept_plan = functools.lru_cache(maxsize=PLANS)(self.planner.plan)
        self._planning = threading.Lock()
        self._steps = steps if self.planner.end is None else min(steps, self.planner.end)

    def __reduce__(self):
        # A process of Grain's opens the stores itself, and plans the same.
        online = ", ".join(self._data.workers.sources) if self._data.workers else ""
        require(not online, f"{ONE_PROCESS} (online in {self._data.config.mix}: {online})")
        return self._made, ()

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return self.build(step, self._local_rows)

    def plan(self, step: int) -> StepPlan:
        """Returns the rows of update `step` + 1. Trainers that share a host ask for one step all at once: it
        is planned by the first."""
        with self._planning:
            return self._kept_plan(step)

    def build(self, step: int, local_rows: slice) -> dict[str, np.ndarray]:
        """Returns these rows of the batch of update `step` + 1."""
        plan = self.plan(step)
        if self._data.workers:
            self._expect(step, local_rows)
        return self._data.builder.build(plan.source[local_rows], plan.row[local_rows])

    def _expect(self, step: int, local_rows: slice) -> None:
        """Tells the token workers what the coming steps want of each source."""
        coming = (min(step + ahead, len(self) - 1) for ahead in AHEAD)
        # Which of a step's rows are built here is decided by a plan; its sources are known without one.
        sources = np.concatenate([self.planner.sampler.sources(step) for step in coming])
        start, stop, _ = local_rows.indices(self.planner.rows)
        tokens = self._data.config.sequence * (stop - start) / self.planner.rows
        counts = np.bincount(sources, minlength=len(self._data.names)) * tokens
        self._data.workers.expect(dict(zip(self._data.names, counts.tolist(), strict=True)))


class Batches(contextlib.AbstractContextManager):
    """The iterator of a dataset, which builds a few elements ahead. Use it as a context manager, or close
    it."""

    def __init__(self, dataset: "grain.MapDataset", options: "grain.ReadOptions", start: int = 0):
        """start: the first element. options: how many threads build ahead, and how far."""
        self._iterator: grain.DatasetIterator | None = iter(dataset.to_iter_dataset(options))
        self._iterator.set_state({"next_index": min(start, len(dataset))})

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self

    def __next__(self) -> Mapping[str, Any]:
        if self._iterator is None:
            raise StopIteration
        return next(self._iterator)

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads. What was built ahead is dropped."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None
