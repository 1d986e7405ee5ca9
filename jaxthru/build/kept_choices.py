"""What `auto` was settled to by an earlier start, kept beside the programs that JAX's cache keeps.

To find it takes seconds, 7 for all 32 layers of Llama 3 8B on an H200's host. A start with the same
configuration, documents, devices and code takes it from here, and searches only if it then does not fit as
compiled.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jaxlib

import jaxthru
import pallas_kernels
from jaxthru.build import choices
from jaxthru.build.choices import Choice, Documents
from jaxthru.build.defaults import replaced, searched
from jaxthru.build.memory_estimate import host_room
from jaxthru.config import RunConfig
from jaxthru.runtime import distributed
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.sharding import Layout
from pallas_kernels.triton_cache import cache_folder

SEARCHED_ON = "gpu"
"""The platform on which `auto` is searched for; elsewhere it costs no time."""


class KeptChoices:
    """Those of a configuration, as `choices.resolve` returns it. found: of an earlier start; none where
    nothing is searched for, or JAX keeps nothing on a disk."""

    def __init__(self, config: RunConfig, layout: Layout, documents: Callable[[], Documents]):
        """documents: asks what those of the mix are like; nothing is kept where that is assumed."""
        device, self._path, self.found = layout.mesh.devices.flat[0], None, ()
        if device.platform != SEARCHED_ON or not searched(config) or (of_mix := documents()).notes:
            return
        if folder := cache_folder():
            versions = jax.__version__, jaxlib.__version__, device.client.platform_version, _code()
            here = choices.device_name([*layout.mesh.devices.flat]), host_room(config), _compiler_settings()
            of = hashlib.sha256(repr((config, of_mix, versions, here)).encode())
            self._path = folder / "choices" / f"{of.hexdigest()[:32]}.json"
        self.found = tuple(Choice(*each) for each in distributed.from_first(self._read))

    @property
    def reasons(self) -> dict[str, str]:
        """Reasons of what an earlier start has found, by key."""
        return {each.key: each.reason for each in self.found}

    def settled(self, config: RunConfig) -> RunConfig:
        """Returns a configuration with what an earlier start has found."""
        return replaced(config, {each.key: each.chosen for each in self.found})

    def keep(self, made: Iterable[Choice]) -> None:
        """Keeps what this start has chosen; but not which kernels can run here, which tracing finds."""
        if self._path and not self.found and distributed.is_primary():
            with contextlib.suppress(InputError):  # without it, the next start searches too
                choices.write(self._path, [each for each in made if each.reason != choices.CAN_RUN])

    def drop(self) -> None:
        """Forgets what an earlier start has found, for it does not fit."""
        if self._path and distributed.is_primary():
            self._path.unlink(missing_ok=True)

    def _read(self) -> list[tuple]:
        with contextlib.suppress(InputError):  # of a file that is damaged
            return [dataclasses.astuple(each) for each in choices.read(self._path)] if self._path else []
        return []


@functools.cache
def _code() -> str:
    """Returns a digest that changes with the code and the tables that choices are made by."""
    digest = hashlib.sha256()
    for package in (jaxthru, pallas_kernels):
        folder = Path(package.__file__).parent
        for path in sorted(each for each in folder.rglob("*") if each.suffix in (".py", ".json")):
            found = path.stat()
            digest.update(f"{path.relative_to(folder)} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _compiler_settings() -> list[tuple[str, str]]:
    return sorted((name, value) for name, value in os.environ.items() if name.startswith("XLA_"))
