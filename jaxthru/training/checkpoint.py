"""Saving and restoring the training state."""

import dataclasses

from jaxthru.runtime.errors import require


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """every: steps between checkpoints; the last step is always saved; 0 saves nothing but the last.
    keep: how many of the newest to keep. keep_every: also keep each checkpoint at a multiple of this
    many steps, for good; 0 keeps none so."""

    every: int = 100
    keep: int = 2
    keep_every: int = 0

    def __post_init__(self):
        require(self.every >= 0, f"checkpoint.every = {self.every}: must be at least 0")
        require(self.keep >= 1, f"checkpoint.keep = {self.keep}: must be at least 1")
        require(self.keep_every >= 0, f"checkpoint.keep_every = {self.keep_every}: must be at least 0")
