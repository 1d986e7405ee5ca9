"""Taking a trace of a few steps."""

import dataclasses

from jaxthru.runtime.errors import require


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """at: the first step to trace; 0 is off. steps: how many."""

    at: int = 0
    steps: int = 3

    def __post_init__(self):
        require(self.at >= 0, f"profile.at = {self.at}: must be at least 0")
        require(self.steps >= 1, f"profile.steps = {self.steps}: must be at least 1")
