"""What another number of steps does to the learning rate of a run that goes on."""

import math
from typing import NamedTuple

import numpy as np

from jaxthru.optim.optimizer import OptimConfig
from jaxthru.optim.schedules import make_schedule


class Plan(NamedTuple):
    """What decides the schedule of a run. steps: train.steps."""

    optim: OptimConfig
    steps: int

    @property
    def span(self) -> int:
        """The steps that the schedule spans."""
        return self.optim.schedule_steps or self.steps

    def rates(self, made: np.ndarray) -> np.ndarray:
        """Returns the learning rates of the updates after so many, int [N]."""
        return np.asarray(make_schedule(self.optim, self.steps)(made.astype(np.int32)))


def schedule_change(old: Plan, new: Plan, made: int) -> str:
    """Returns what the change does to the learning rate of the next update, for the log; empty if nothing.

    made: updates made so far.
    """
    if made == 0 or old.span == new.span:
        return ""
    steps = np.array([made - 1, made])
    before, after = old.rates(steps), new.rates(steps)
    if math.isclose(before[1], after[1], rel_tol=1e-5):
        return ""
    how = "stretched" if new.span > old.span else "compressed"
    return (
        f"the {new.optim.schedule} schedule is {how}: the learning rate goes from {before[0]:.1e} to "
        f"{after[1]:.1e} at step {made + 1}; optim.schedule_steps={old.span} holds it"
    )
