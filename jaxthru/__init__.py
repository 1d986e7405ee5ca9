"""jaxthru trains transformer language models on JAX/XLA and says where every lost percent went.

What a notebook needs; each name is imported when it is first used.
"""

import importlib
import sys
from typing import Any

from jaxthru import moved

_HOME = {
    "RunConfig": ("jaxthru.config", "RunConfig"),
    "load_config": ("jaxthru.config", "load"),
    "open_data": ("jaxthru.data.loader", "open_data"),
    "build_step": ("jaxthru.build.compiled", "build_step"),
    "run": ("jaxthru.train", "run"),
    "RunDirectory": ("jaxthru.training.run_directory", "RunDirectory"),
}
__all__ = list(_HOME)
sys.meta_path.insert(0, moved.Finder)


def __getattr__(name: str) -> Any:
    if name == "build":
        return importlib.import_module("jaxthru.build")
    if name not in _HOME:
        raise AttributeError(f"module 'jaxthru' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(importlib.import_module(module), attribute)
