"""The sink of metrics.jsonl and eval.jsonl."""

from jaxthru.training.metrics import Row
from jaxthru.training.run_directory import RunDirectory


class JsonLines:
    """A line for each row, on the disk before the run goes on."""

    def __init__(self, run: RunDirectory):
        self._run = run

    def step(self, row: Row) -> None:
        """Raises TrainingError if metrics.jsonl cannot be written."""
        self._run.append_metrics(row)

    def evaluation(self, row: Row) -> None:
        """Raises TrainingError if eval.jsonl cannot be written."""
        self._run.append_eval(row)
