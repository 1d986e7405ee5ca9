"""What another number of steps does to the learning rate of a run that goes on."""

import math
from typing import NamedTuple

import numpy as np

from jaxthru.optim.optimizer import OptimConfig, make_schedule
from jaxthru.runtime.errors import require


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

    made: updates made so far. Raises InputError if `optim.schedule_steps` was changed so that these would
    have had other learning rates.
    """
    if made == 0 or old.span == new.span:
        return ""
    steps = np.arange(made + 1)
    before, after = old.rates(steps), new.rates(steps)
    if old.optim.schedule_steps != new.optim.schedule_steps:
        differs = np.flatnonzero(~np.isclose(before[:-1], after[:-1], rtol=1e-5, atol=0))
        require(
            differs.size == 0,
            lambda: (
                f"optim.schedule_steps = {new.optim.schedule_steps}: the learning rate of step "
                f"{differs[0] + 1}, which is made, was {before[differs[0]]:.1e} and would be "
                f"{after[differs[0]]:.1e}; set it to {old.span}, as it was"
            ),
        )
    if math.isclose(before[made], after[made], rel_tol=1e-5):
        return ""
    how = "stretched" if new.span > old.span else "compressed"
    return (
        f"the {new.optim.schedule} schedule is {how}: the learning rate goes from {before[made - 1]:.1e} to "
        f"{after[made]:.1e} at step {made + 1}; optim.schedule_steps={old.span} holds it"
    )
