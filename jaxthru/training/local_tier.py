"""The local tier: each process saves its own part of the state to a disk of its host.

<checkpoint.local.directory>/<run>-<id>/process_<k>/<step>/    as a checkpoint of the run directory, with the
                                                               shards of process k alone, and part/: what they
                                                               are of
RUN_DIR/local_tier.json                                        <run>-<id>, so that no other run takes them

A step counts where each process of a run finds its part of it, whole, written by the same start of the run:
parts of two starts may be of different states, as on a GPU, where sums have no fixed order.

Orbax's emergency and multi-tier checkpoint managers (orbax.checkpoint.experimental, 0.12.8) are not used:
they have no checksums of what files hold, so that a flipped bit would be trained on, and are made for meshes
with an axis of replicas. How each process has Orbax write to its own disk is as they do it.
"""

import hashlib
import json
import logging
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Sharding

from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.distributed import from_first, gather_text
from jaxthru.runtime.errors import InputError, require
from jaxthru.training import layout
from jaxthru.training.checkpoint_config import LocalTierConfig
from jaxthru.training.checksums import broken
from jaxthru.training.tier import PyTree, Tier, agreed, saved_steps

log = logging.getLogger(__name__)
FILE = "local_tier.json"
ASKED = 30
"""Steps, the newest, that processes compare."""


def check(config: LocalTierConfig | None) -> None:
    """Raises InputError unless local checkpoints can be written, or are not asked for."""
    if config is None:
        return
    said = f"checkpoint.local.directory = {config.directory}"
    folder = _folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{said}: cannot be made on {socket.gethostname()} ({error.strerror})") from error
    require(os.access(folder, os.W_OK | os.X_OK), f"{said}: cannot be written on {socket.gethostname()}")


def _folder(config: LocalTierConfig) -> Path:
    """Returns the folder of local checkpoints of all runs, ~ being a home on this host. Raises InputError."""
    try:
        return Path(config.directory).expanduser().absolute()
    except RuntimeError as error:
        said = f"checkpoint.local.directory = {config.directory}"
        raise InputError(f"{said}: {socket.gethostname()} knows no such home; give the whole path") from error


def located(run_dir: Path, config: LocalTierConfig | None, begin: bool = False) -> Path | None:
    """Returns this process's directory of local checkpoints of a run, None if there is none yet.

    begin: give the run one; where none is asked for, forget the one that it had: its checkpoints would come
    from before those that the run saves without.
    """
    name = from_first(lambda: _name(run_dir, config, begin))
    return _folder(config) / name / f"process_{jax.process_index()}" if name else None


def _name(run_dir: Path, config: LocalTierConfig | None, begin: bool) -> str:
    path, name = run_dir / FILE, ""
    if config is None:
        if begin:
            path.unlink(missing_ok=True)
        return ""
    try:
        name = str(json.loads(path.read_text())["folder"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        if begin:
            name = f"{run_dir.absolute().name}-{uuid.uuid4().hex[:8]}"
            write_atomically(path, json.dumps({"folder": name}) + "\n")
    require(name == Path(name).name, f"{path}: names {name!r}, which is no name of a folder; remove the file")
    return name


def common_steps(directory: Path | None) -> list[int]:
    """Returns the steps of which all processes, as many as there were, find their part by the same start of
    the run, newest first. All must ask; directory: as `located` returned it."""
    if directory is None:
        return []
    starts = {step: _start(directory / str(step)) for step in saved_steps(directory)[-ASKED:]}
    told = gather_text(" ".join(f"{step}:{start}" for step, start in starts.items() if start))
    counts = Counter(word for text in told for word in set(text.split()))
    return sorted((int(word.partition(":")[0]) for word, n in counts.items() if n == len(told)), reverse=True)


def _start(checkpoint: Path) -> str | None:
    """Returns which start of a run has written a part, None if it is of another process, or of no use."""
    try:
        part = json.loads((checkpoint / "part/metadata").read_text())
        own = (part["process"], part["processes"]) == (jax.process_index(), jax.process_count())
        return str(part["start"]).partition(" ")[0] if own else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


class LocalTier(Tier):
    """The parts of a state that this process holds, in a directory of its own, which it commits itself."""

    name = "local checkpoint"
    primary = None
    items = ("data", "part")

    def __init__(self, directory: Path, keep: int, in_place: int = 0):
        """directory: as `located` returned it. Raises InputError if it cannot be made."""
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            said = f"checkpoint.local.directory: {directory}: cannot be made on {socket.gethostname()}"
            raise InputError(f"{said} ({error.strerror})") from error
        super().__init__(directory, keep, in_place=in_place)
        self._digested: tuple[Any, str] = None, ""  # of the last state that was saved
        self._began = from_first(lambda: uuid.uuid4().hex[:8])
        self.shared_at = time.time()
        """When the run last saved to where all share it, in seconds since 1970; before that, when it began.
        It is in each part: the time to the next such save goes on over restarts from here."""

    def _said(self, disk: PyTree, data_state: dict) -> dict[str, Any]:
        own = {"process": jax.process_index(), "processes": jax.process_count()}
        part = {"start": self._began, **own, "shared_at": self.shared_at, "shards": self._shards(disk)}
        return {"data": data_state, "part": part}

    def _shards(self, disk: PyTree) -> str:
        """Returns `shards` of a state: worked out once, as a run's states differ in their values alone."""
        leaves, structure = jax.tree.flatten(disk)
        of = structure, [(leaf.sharding, leaf.shape, leaf.dtype) for leaf in leaves]
        if of != self._digested[0]:
            self._digested = of, shards(disk)
        return self._digested[1]

    def read(self, step: int, abstract_state: PyTree) -> tuple[PyTree, dict]:
        """Does what `Tier.read` does, and takes `shared_at` over."""
        found = super().read(step, abstract_state)
        part = json.loads((self.directory / f"{step}/part/metadata").read_text())
        self.shared_at = min(part["shared_at"], time.time())
        return found

    def damage(self, step: int, abstract_state: PyTree) -> str | None:
        """Returns why the parts of a step cannot be restored, the same in all processes: one is damaged, or
        holds other shards than its process needs."""
        checkpoint = self.directory / str(step)
        reason = broken(checkpoint)
        if reason is None:
            saved = json.loads((checkpoint / "part/metadata").read_text())["shards"]
            wanted = shards(layout.abstract_disk(abstract_state))
            reason = None if saved == wanted else "it holds other shards, as of another mesh"
        return agreed(reason and f"process {jax.process_index()} ({socket.gethostname()}): {reason}")

    def drop(self, after: int, useless: Collection[int] = ()) -> None:
        """Deletes this process's parts of steps after one, and of those that were of no use."""
        for step in self.steps():
            if step > after or step in useless:
                self._delete(step)


def shards(disk: PyTree) -> str:
    """Returns a digest of which shards this process holds of all arrays, concrete or abstract ones.

    Raises InputError where it would not write all of them: Orbax has each process write the shards of one
    copy of an array, and devices may hold parts of several.
    """
    said, found = [], {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(disk)[0]:
        name, key = "/".join(map(layout.key_name, path)), (leaf.sharding, leaf.shape)
        if key not in found:
            found[key] = _own_shards(leaf.sharding, leaf.shape)
        own = found[key]
        if own is None:
            raise InputError(
                f"checkpoint.local: the devices of process {jax.process_index()} hold parts of several "
                f"copies of {name}, which cannot be saved alone; choose a mesh whose copies end where a host "
                "ends, or leave checkpoint.local.directory out"
            )
        said.append(f"{name} {leaf.dtype}{list(leaf.shape)} {own}")
    return hashlib.sha256("\n".join(sorted(said)).encode()).hexdigest()


def _own_shards(sharding: Sharding, shape: tuple[int, ...]) -> list[tuple] | None:
    """Returns (start, stop) of each dim of each shard of this process; None if they are of several copies."""
    copies: Counter = Counter()
    own: dict[int, set] = {}
    first = None
    for device, index in sharding.devices_indices_map(shape).items():
        place = tuple(slice_.indices(size)[:2] for slice_, size in zip(index, shape, strict=True))
        if device in sharding.addressable_devices:
            first = copies[place] if first is None else first
            own.setdefault(copies[place], set()).add(place)
        copies[place] += 1
    every = set().union(*own.values())
    return sorted(every) if own[first] == every else None
