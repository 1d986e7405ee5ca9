"""The record of a run: rows, handed to each of its sinks."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from jaxthru.runtime.distributed import is_primary
from jaxthru.training.metrics import MetricsConfig, Row
from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.sinks.jsonl import JsonLines
from jaxthru.training.sinks.tensorboard import TensorBoard
from jaxthru.training.sinks.tracker import tracked


class Sink(Protocol):
    """Somewhere that rows go. Raises TrainingError where the run cannot go on without it."""

    def step(self, row: Row) -> None:
        """Takes the row of a step, with METRICS_FIELDS and further ones: numbers, lists of them, or None."""

    def evaluation(self, row: Row) -> None:
        """Takes the row of an evaluation, with EVAL_FIELDS."""


class Record:
    """Hands rows to its sinks, in their order."""

    def __init__(self, sinks: Sequence[Sink]):
        self.sinks = sinks

    def step(self, row: Row) -> None:
        """Raises TrainingError if a row cannot be written where it must be."""
        for sink in self.sinks:
            sink.step(row)

    def evaluation(self, row: Row) -> None:
        """Raises TrainingError if a row cannot be written where it must be."""
        for sink in self.sinks:
            sink.evaluation(row)


@contextlib.contextmanager
def open_record(config: MetricsConfig, run: RunDirectory, resumed: int = 0, *more: Sink) -> Iterator[Record]:
    """Yields where this process's rows go: nowhere, but for the first. resumed: the step that was restored,
    0 at the start. more: further sinks."""
    if not is_primary():
        yield Record([])
        return
    board = [TensorBoard(run, resumed)] if config.tensorboard else []
    with tracked(config.trackers, run) as trackers:
        yield Record([JsonLines(run), *board, *more, *trackers])
