"""Where the training state lives."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class OffloadConfig:
    """level: `none` keeps parameters, gradients and optimizer state on the device.
    activations: `none` keeps activations on the device."""

    level: Literal["none"] = "none"
    activations: Literal["none"] = "none"
