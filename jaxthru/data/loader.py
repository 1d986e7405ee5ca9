"""From a mix to batches on the devices."""

import dataclasses
from typing import Literal

from jaxthru.runtime.errors import require


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which text, in rows of what length.

    mix: a `.toml` path, or a name in data/mixes. sequence: tokens in a row.
    packing: `split` concatenates documents and cuts rows anywhere; `best_fit` places whole documents
        (only one longer than a row is cut) and pads what is left.
    store: folder of the token stores, shared by all runs.
    groups: canonical groups a batch is packed and balanced for; None is the largest divisor of
        train.rows up to 64.
    """

    mix: str = "quickstart"
    sequence: int = 512
    packing: Literal["split", "best_fit"] = "split"
    store: str = "store"
    groups: int | None = None

    def __post_init__(self):
        require(self.sequence >= 2, f"data.sequence = {self.sequence}: must be at least 2")
        require(self.groups is None or self.groups >= 1, f"data.groups = {self.groups}: must be at least 1")
