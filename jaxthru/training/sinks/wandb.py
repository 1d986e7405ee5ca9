"""The sink of Weights & Biases: WANDB_MODE=offline needs no account, `wandb sync` sends it later.

WANDB_PROJECT, WANDB_ENTITY and its other environment variables hold.
"""

import os
import uuid

import wandb

from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.sinks.tracker import PROJECT, configuration, run_name


class WandB:
    """A run in W&B. Its own step only counts rows: a resumed run goes back, which that step may not."""

    def __init__(self, run: RunDirectory, known: str | None):
        # Without a key, at a terminal, W&B would ask for one in the midst of the steps.
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise LookupError("it has no API key: type `wandb login`, or set WANDB_MODE=offline")
        self.id = known or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self.id,
            resume="allow",
            name=run_name(run),
            dir=run.path,
            config=configuration(run),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


open_tracker = WandB
