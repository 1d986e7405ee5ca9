"""What has moved since commit 56c3c12: old imports and keys work for one release, and say the new name."""

import ast
import contextlib
import functools
import importlib
import logging
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

KEYS = {"model.attention": "kernels.attention", "mesh.collective_matmul": "kernels.collective_matmul"}
"""Old key -> new. Those of `model` are of the family llama."""

CONFIG = "jaxthru.config"
CLASSES = (
    *("data.loader.DataConfig", "models.layers.PrecisionConfig", "models.llama.ModelConfig"),
    *("models.llama.RopeScaling", "models.remat.RematConfig", "optim.optimizer.OptimConfig"),
    *("profile.trace.ProfileConfig", "runtime.mesh.MeshConfig", "training.checkpoint.CheckpointConfig"),
    *("training.evaluate.EvaluateConfig", "training.metrics.MetricsConfig", "training.step.TrainConfig"),
    "training.offload.OffloadConfig",
)
"""Where configuration files had their classes from; all are CONFIG's now. Within `jaxthru`."""

MODULES = {
    "plan.arithmetic": "jaxthru.build.memory_estimate",
    "plan.assemble": "jaxthru.build.step",
    "plan.cost": "jaxthru.build.batches",
    "plan.fit": "jaxthru.build.checks",
    "plan.levels": "jaxthru.build.choices",
    "profile.clocks": "jaxthru.profile.collect.clocks",
    "profile.events": "jaxthru.profile.read.events",
    "profile.hlo": "jaxthru.profile.read.hlo",
    "profile.memory": "jaxthru.profile.read.buffers",
    "profile.trace": "jaxthru.profile.collect.trace",
    "training.loss": "jaxthru.engine.objective",
    "training.offload": "jaxthru.engine.offload",
    "training.programs": "jaxthru.engine.programs",
    "training.step": "jaxthru.engine.step",
}
"""Old module, within `jaxthru` -> where its other names are now."""

OLD = {f"jaxthru.{name}" for name in (*MODULES, *(path.rpartition(".")[0] for path in CLASSES))}


@functools.cache
def say(line: str) -> None:
    """Logs what has moved, once a process."""
    logging.getLogger("jaxthru").warning("%s; the old name goes with the next release", line)


def say_imports(source: bytes) -> None:
    """Says which classes a configuration's file imports from an old place, though they may still be there."""
    for node in ast.walk(ast.parse(source)):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if (home := _home(f"{node.module}", alias.name)) == CONFIG:
                say(f"{node.module}.{alias.name}: import {alias.name} from {home}")


def _home(module: str, name: str) -> str | None:
    """Returns the module to import a name of an old one from."""
    if f"{module}.{name}".removeprefix("jaxthru.") in CLASSES:
        return CONFIG
    return MODULES.get(module.removeprefix("jaxthru."))


class Finder:
    """Finds old modules, and gives them what has left them, whether or not there still is a file."""

    @staticmethod
    def find_spec(module: str, path=None, target=None) -> ModuleSpec | None:
        if module not in OLD:
            return None
        gone = SimpleNamespace(create_module=lambda spec: None, exec_module=lambda module: None)
        spec = PathFinder.find_spec(module, path, target) or ModuleSpec(module, gone)
        execute = spec.loader.exec_module

        def exec_module(made: ModuleType) -> None:
            made.__getattr__ = functools.partial(_left, module)
            execute(made)

        spec.loader.exec_module = exec_module
        return spec


def _left(module: str, name: str) -> Any:
    """Returns what has left a module. Raises AttributeError."""
    home = _home(module, name)
    with contextlib.suppress(ImportError):
        if home and not name.startswith("__"):
            found = getattr(importlib.import_module(home), name)
            say(f"{module}.{name}: import {name} from {home}")
            return found
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def renewed(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns nested plain values of a configuration with each key where it is now, and says which were not.

    Raises InputError where a key has two values, at its old and its new place.
    """
    from jaxthru.runtime.errors import require

    tree = {group: dict(keys) if isinstance(keys, dict) else keys for group, keys in tree.items()}
    for old, new in KEYS.items():
        (group, name), (to, key) = old.split("."), new.split(".")
        keys, there = tree.get(group), tree.get(to, {})
        groups = isinstance(keys, dict) and isinstance(there, dict)
        if groups and name in keys and keys.get("family", "llama") == "llama":
            value = keys.pop(name)
            both = f"{old} = {value!r} and {new} = {there.get(key)!r}: are one key now; give {new} alone"
            require(there.setdefault(key, value) == value, both)
            tree[to] = there
            say(f"{old}: is now {new}")
    return tree


def take_old_keys(cls: type, group: str) -> None:
    """Lets a group's class be made with keys that have left it. They wait in the instance's `old_keys`."""
    names = [old.removeprefix(f"{group}.") for old in KEYS if old.startswith(f"{group}.")]
    make: Callable = cls.__init__

    @functools.wraps(make)
    def init(self, *values, **keys):
        old = {name: keys.pop(name) for name in names if name in keys}
        make(self, *values, **keys)
        if old:
            object.__setattr__(self, "old_keys", old)

    cls.__init__ = init
