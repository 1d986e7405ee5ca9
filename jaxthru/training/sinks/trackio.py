"""The sink of Trackio: a local SQLite file without an account, or a Space by TRACKIO_SPACE_ID."""

import os
import uuid

import trackio

from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.sinks.tracker import PROJECT, configuration, run_name


class Trackio:
    """A run in Trackio, which knows runs by their names: an id is part of it."""

    def __init__(self, run: RunDirectory, known: str | None):
        self.id = known or f"{run_name(run).replace('/', '-')}-{uuid.uuid4().hex[:8]}"
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=self.id,
            resume="allow",
            config=configuration(run),
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def finish(self, failed: bool) -> None:
        self._run.finish()  # it knows no other end


open_tracker = Trackio
