"""The dataloader: from the plan of a run to an iterator over its batches, whoever builds them."""

import abc
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxthru.data.loading.planned_batches import Batches
from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.mixture.epochs import repeated
from jaxthru.data.mixture.planner import StepPlan
from jaxthru.data.mixture.schedule import Schedule

if TYPE_CHECKING:
    import grain

log = logging.getLogger(__name__)

Cost = tuple[float, float]
"""What a row costs: (for each token, for each token² of its documents), in any unit."""

Place = Callable[[dict[str, np.ndarray]], Mapping[str, Any]]
"""Puts this process's part of a batch on the devices."""


class Plan(Protocol):
    """What a loader asks of a plan: see `Planner`."""

    end: int | None
    ended_by: str | None

    def plan(self, step: int) -> StepPlan:
        """Returns the rows of update `step` + 1."""

    def epochs(self, steps: int) -> np.ndarray:
        """Returns how often each source is read in so many updates."""


class Builder(Protocol):
    """What a loader asks of a batch builder: see `BatchBuilder`."""

    def build(self, source: np.ndarray, row: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the batch of these rows."""


class Loader(contextlib.AbstractContextManager):
    """Batches of planned rows. `Data` builds them of the stores that it has opened, `HostData` has the data
    server of this host build them.

    names: of the sources. mixture: of the mix file now. threads: that build ahead. held_out_builder: of the
    rows that are not trained on.
    """

    names: tuple[str, ...]
    mixture: Mixture
    threads: int
    held_out_builder: Builder

    @abc.abstractmethod
    def planned(
        self,
        schedule: Schedule,
        *,
        seed: int,
        rows: int,
        steps: int,
        local_rows: slice | None = None,
        cost: Cost | None = None,
    ) -> Sequence[dict[str, np.ndarray]]:
        """Returns the batches of a run as a Grain RandomAccessDataSource: see `dataset`."""

    @abc.abstractmethod
    def planner(self, schedule: Schedule, *, seed: int, rows: int, cost: Cost | None = None) -> Plan:
        """Returns the plan of all steps of `rows` rows, balanced if rows have a cost. Raises InputError."""

    @abc.abstractmethod
    def held_out_rows(self, total_rows: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source, row) of each row of the held-out batches, int64 [batches, rows] both."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends what makes batches; those being built fail."""

    def __exit__(self, *exception) -> None:
        self.close()

    def dataset(
        self,
        schedule: Schedule | None = None,
        *,
        seed: int,
        rows: int,
        steps: int,
        local_rows: slice | None = None,
        cost: Cost | None = None,
    ) -> "grain.MapDataset[dict[str, np.ndarray]]":
        """Returns the batches of the updates 1 to `steps`, or to where a source that is gone through ends the
        run: element i, which any index gives at once, is that of update i + 1.

        schedule: by default what the mix file says. rows: of the whole batch. local_rows: those to build; all
        by default. cost: what the rows of a step are balanced by; they stay as they come without it.
        Iterate with `to_iter_dataset(data.read_options)`: Grain's default would hold 500 batches in memory.
        Raises InputError.
        """
        import grain  # here, for it loads JAX, which commands that only look at the data can do without

        asked = {"seed": seed, "rows": rows, "steps": steps, "local_rows": local_rows, "cost": cost}
        return grain.MapDataset.source(self.planned(schedule or ((0, self.mixture),), **asked))

    @property
    def read_options(self) -> "grain.ReadOptions":
        """How many threads build batches ahead, and how far."""
        import grain

        return grain.ReadOptions(num_threads=self.threads, prefetch_buffer_size=max(2 * self.threads, 4))

    def train_batches(
        self, schedule: Schedule, *, start: int = 0, place: Place | None = None, **asked: Any
    ) -> Batches:
        """Returns an iterator over `dataset(schedule, **asked)` from element `start` on, built ahead.

        place: what puts a batch on the devices, so that it lies there before its step. Raises InputError.
        """
        dataset = self.dataset(schedule, **asked)
        return Batches(dataset.map(place) if place else dataset, self.read_options, start)

    def held_out_batches(
        self, *, total_rows: int, rows: int, local_rows: slice | None = None
    ) -> list[dict[str, np.ndarray]]:
        """Returns the same held-out rows each time, in batches of `rows`.

        total_rows: spread evenly over the sources, and evenly over each source; fewer when there are fewer.
        The last batch is filled up with rows of padding.
        """
        source, row = self.held_out_rows(total_rows, rows)
        local = local_rows or slice(0, rows)
        build = self.held_out_builder.build
        return [build(*pair) for pair in zip(source[:, local], row[:, local], strict=True)]

    def last_step(self, schedule: Schedule, *, seed: int, rows: int, steps: int) -> int:
        """Returns after which of `steps` updates the run ends: the last, or where an exhausted source ends
        it, which is logged, and so are sources that are read too often. Raises InputError.
        """
        planner = self.planner(schedule, seed=seed, rows=rows)
        last = steps if planner.end is None else min(steps, planner.end)
        epochs = zip(self.names, planner.epochs(last).tolist(), strict=True)
        if often := repeated(dict(epochs), "in this run"):
            log.warning("%s", often)
        if planner.end is None or planner.end >= steps:
            return steps
        said = "source %s is exhausted after step %d of %d: the run ends there"
        log.warning(said, planner.ended_by, planner.end, steps)
        return planner.end
