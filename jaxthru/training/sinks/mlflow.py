"""The sink of MLflow: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where; a local store by default."""

import os
import re
import time

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.sinks.tracker import PROJECT, configuration, run_name

AT_ONCE = 100
"""Parameters that MLflow takes in one call."""
METRICS_AT_ONCE = 1000
"""Metrics that it does: a model of many experts has more."""
LONGEST = 6000
"""Characters of a parameter's value."""


class MLflow:
    """A run in MLflow."""

    def __init__(self, run: RunDirectory, known: str | None):
        self._client = MlflowClient()
        if known:
            self._client.update_run(known, status="RUNNING")
            self.id = known
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        self.id = self._client.create_run(experiment, run_name=run_name(run)).info.run_id
        params = [Param(_named(key), str(value)[:LONGEST]) for key, value in configuration(run).items()]
        for start in range(0, len(params), AT_ONCE):
            self._client.log_batch(self.id, params=params[start : start + AT_ONCE])

    def log(self, step: int, values: dict[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        metrics = [Metric(_named(key), value, now, step) for key, value in values.items()]
        for start in range(0, len(metrics), METRICS_AT_ONCE):
            self._client.log_batch(self.id, metrics=metrics[start : start + METRICS_AT_ONCE])

    def finish(self, failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


def _named(key: str) -> str:
    """Returns a name of characters that MLflow takes."""
    return re.sub(r"[^\w\-./ ]", "_", key, flags=re.ASCII)


open_tracker = MLflow
