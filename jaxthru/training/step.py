"""One optimizer step: a pure function from (state, batch) to (state, metrics)."""

import dataclasses

from jaxthru.runtime.errors import require


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """steps: updates in the whole run. rows: per step, over all devices. microbatches: parts of a step
    whose gradients are added up. z_loss: weight of log(Z)^2 (arXiv:2204.02311), 0 is off.
    deterministic: bit-exact repeats on a GPU too, at some cost in speed.
    skip_limit: this many updates in a row skipped for a non-finite loss or gradient stop the run.
    """

    steps: int = 1000
    seed: int = 0
    rows: int = 8
    microbatches: int = 1
    z_loss: float = 0.0
    deterministic: bool = False
    skip_limit: int = 10

    def __post_init__(self):
        for name in ("steps", "rows", "microbatches", "skip_limit"):
            value = getattr(self, name)
            require(value >= 1, f"train.{name} = {value}: must be at least 1")
        require(self.seed >= 0, f"train.seed = {self.seed}: must be at least 0")
        require(self.z_loss >= 0, f"train.z_loss = {self.z_loss}: must be at least 0")
        require(
            self.rows % self.microbatches == 0,
            f"train.rows = {self.rows}: must be a multiple of train.microbatches = {self.microbatches}",
        )
