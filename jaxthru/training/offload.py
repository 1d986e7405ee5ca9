"""Moved to engine/offload.py: `OffloadConfig` is found here for one more release, by configuration files."""

import logging
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "OffloadConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxthru.engine.offload import OffloadConfig

    logging.getLogger("jaxthru").warning("%s.%s: import it from jaxthru.config", __name__, name)
    return OffloadConfig
