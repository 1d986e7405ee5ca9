"""What `auto` was settled to by an earlier start, kept beside the programs that JAX's cache keeps.

To find it takes seconds, 7 for all 32 layers of Llama 3 8B on an H200's host. A start with the same
configuration, documents, devices and code takes it from here, and searches only if it then does not fit as
compiled.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import jaxthru
import pallas_kernels
from jaxthru import config as configuration
from jaxthru.build import choices
from jaxthru.build.choices import Choice, Documents
from jaxthru.build.defaults import SEARCHED, get, replaced, searched
from jaxthru.build.memory_estimate import host_room
from jaxthru.config import RunConfig
from jaxthru.models.family import module_of
from jaxthru.runtime import distributed
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.sharding import Layout
from jaxthru.training.environment import version_of
from pallas_kernels.triton_cache import cache_folder

log = logging.getLogger("jaxthru")

SEARCHED_ON = "gpu"
"""The platform whose choices are kept. On a CPU nothing is searched for, and on a TPU it was not tried."""
WITH_LEVEL = {*choices.KEPT_WITH["offload.level"]}
KEPT = {*SEARCHED, *WITH_LEVEL, "train.loss_chunk", "mesh.transfers", "kernels.attention"}
"""Keys that are found by a search. What changes numbers is none of them, and is chosen at each start."""
PACKAGES = "jax", "jaxlib", "jax-triton", "triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"
"""Those that change what fits, and which attention can run."""


class KeptChoices:
    """Those of a configuration, as `choices.resolve` returns it. found: of an earlier start; none where
    nothing is searched for, or JAX keeps nothing on a disk."""

    def __init__(self, config: RunConfig, layout: Layout, documents: Callable[[], Documents]):
        """documents: asks what those of the mix are like; nothing is kept where that is assumed. All
        processes must ask for it in the same order."""
        device, self._path, self.found = layout.mesh.devices.flat[0], None, ()
        if device.platform != SEARCHED_ON or not searched(config):
            return
        if not (of_mix := documents()).notes and (folder := cache_folder()):
            versions = device.client.platform_version, *map(version_of, PACKAGES)
            here = choices.device_name([*layout.mesh.devices.flat]), host_room(config), _compiler_settings()
            of = configuration.to_dict(config), of_mix, versions, here, _code(module_of(config.model))
            self._path = folder / "choices" / f"{hashlib.sha256(repr(of).encode()).hexdigest()[:32]}.json"
        self.found = tuple(Choice(*each) for each in distributed.from_first(self._read))
        if self.found:
            log.debug("auto: as an earlier start chose (%s)", self._path)

    def settled(self, config: RunConfig) -> RunConfig:
        """Returns a configuration with what an earlier start has found of what it leaves open."""
        values = {each.key: each.chosen for each in self.found}
        named = {key for key in values if get(config, key) != "auto"} - WITH_LEVEL
        return replaced(config, {key: value for key, value in values.items() if key not in named})

    def reason(self, key: str) -> str:
        """Returns why it was chosen; nothing for what was not."""
        return next((each.reason for each in self.found if each.key == key), "")

    def keep(self, made: Iterable[Choice]) -> None:
        """Keeps what this start has chosen; but not which kernels can run here, which tracing finds."""
        found = [each for each in made if each.key in KEPT and each.reason != choices.CAN_RUN]
        if self._path and not self.found and distributed.is_primary():
            with contextlib.suppress(InputError):  # without it, the next start searches too
                choices.write(self._path, found)

    def drop(self) -> None:
        """Forgets what an earlier start has found."""
        self.found = ()
        if self._path and distributed.is_primary():
            with contextlib.suppress(OSError):  # of a folder that is read alone: it is found again, in vain
                self._path.unlink(missing_ok=True)

    def _read(self) -> list[tuple]:
        with contextlib.suppress(InputError, OSError):  # of a file that is damaged, or not to be read
            return [dataclasses.astuple(each) for each in choices.read(self._path)] if self._path else []
        return []


@functools.cache
def _code(family: ModuleType) -> str:
    """Returns a digest that changes with the code and the tables that choices are made by, and with a family
    of the user's own. Remembered: a start asks before and after its data is prepared."""
    digest, files = hashlib.sha256(), [Path(family.__file__)]
    for package in (jaxthru, pallas_kernels):
        folder = Path(package.__file__).parent
        files += sorted(each for each in folder.rglob("*") if each.suffix in (".py", ".json"))
    for path in files:
        found = path.stat()
        digest.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _compiler_settings() -> list[tuple[str, str]]:
    return sorted((name, value) for name, value in os.environ.items() if name.startswith("XLA_"))
