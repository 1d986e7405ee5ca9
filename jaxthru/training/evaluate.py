"""Held-out loss, per source."""

import dataclasses

from jaxthru.runtime.errors import require


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """every: steps between evaluations; 0 evaluates before the first and after the last step alone.
    rows: held-out rows in one evaluation, shared evenly by the sources; 0 is off."""

    every: int = 0
    rows: int = 64

    def __post_init__(self):
        require(self.every >= 0, f"evaluate.every = {self.every}: must be at least 0")
        require(self.rows >= 0, f"evaluate.rows = {self.rows}: must be at least 0")
