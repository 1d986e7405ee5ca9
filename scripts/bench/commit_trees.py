"""Two commits in one process: the packages of each, and its configurations, built beside the other's."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import harness
import jax
import numpy as np

from jaxthru.data.loading.dataset import open_data
from jaxthru.runtime.errors import InputError

OWN = ("jaxthru", "pallas_kernels")
BEFORE = "mesh.collective_matmul="


class Tree:
    """A commit's packages, imported beside another's of the same names."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._modules: dict[str, ModuleType] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Makes this commit the one that imports within find."""
        if self.folder == harness.ROOT:  # whose modules this script itself uses
            yield
            return
        others = _taken_out()
        sys.modules.update(self._modules)
        sys.path.insert(0, str(self.folder))
        try:
            yield
        finally:
            sys.path.remove(str(self.folder))
            self._modules = _taken_out()
            sys.modules.update(others)

    def build(
        self, path: Path, settings: list[str], documents: int, devices: list[jax.Device] | None = None
    ) -> Any:
        """Returns the `Build` of this commit's configuration, compiled, for all devices or these. documents:
        of random tokens in a row; 0 takes the run's own data. Raises InputError."""
        configuration = importlib.import_module("jaxthru.config")
        path = str(self.folder / path.resolve().relative_to(harness.ROOT))
        try:
            build = importlib.import_module("jaxthru.build.compiled").build_step
        except ModuleNotFoundError:  # a commit from before there was jaxthru/build
            build = importlib.import_module("jaxthru.train").build
        assert Path(build.__code__.co_filename).is_relative_to(self.folder), build.__code__.co_filename
        if not hasattr(configuration.load(path), "kernels"):  # or before there was that group
            settings = [text.replace("kernels.collective_matmul=", BEFORE) for text in settings]
        config = configuration.load(path, [*settings, "train.steps=1000000"])
        data = random_data(config, documents) if documents else open_data(config.data)
        try:
            return build(config, data, devices)
        except Exception as refusal:  # whose class is the commit's own
            if type(refusal).__name__ == InputError.__name__:
                raise InputError(str(refusal)) from refusal
            raise


def without_editable(finders: list) -> list:
    """Returns what finds modules, without an editable install, which would find in its own tree what another
    commit does not have."""
    return [finder for finder in finders if "editable" not in finder.__module__]


def _taken_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in OWN]
    return {name: sys.modules.pop(name) for name in names}


def random_data(config: Any, documents: int) -> SimpleNamespace:
    """Returns what a step has to know of data that is random."""
    lengths = np.full(documents, config.data.sequence / documents)
    mixture = SimpleNamespace(count="tokens", weights=lambda *at: {"random": 1.0})
    return SimpleNamespace(
        vocabulary=config.model.vocabulary,
        segments=documents,
        names=("random",),
        mixture=mixture,
        tokens={"random": config.data.sequence},
        pieces={"random": documents},
        train=[(None, SimpleNamespace(length=lengths))],
        masked=False,
        units={},
    )
