"""Moved to engine/step.py: `TrainConfig` is found here for one more release, by configuration files."""

import logging
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "TrainConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxthru.engine.step import TrainConfig

    logging.getLogger("jaxthru").warning("%s.%s: import it from jaxthru.config", __name__, name)
    return TrainConfig
