"""One directory of checkpoints: written in the background, committed with checksums, checked and read.

A checkpoint is written to a temporary directory and renamed when it is whole, so a directory whose name is a
number is one that was committed. In a bucket, where nothing can be renamed at once, it is one if it holds
COMMITTED. All processes call the methods together.
"""

import contextlib
import functools
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath  # Orbax's paths

from jaxthru.runtime import bucket
from jaxthru.runtime.distributed import from_first, gather_text, is_primary
from jaxthru.runtime.errors import InputError, TrainingError
from jaxthru.training import layout, orbax_settings
from jaxthru.training.checksums import AnyPath, absolute, broken, files_below

log = logging.getLogger(__name__)
PyTree = Any
COMMITTED = ocp.path.atomicity.COMMIT_SUCCESS_FILE
TEMPORARY = ocp.path.atomicity.TMP_DIR_SUFFIX
WRITE_TIMEOUT = 3600  # seconds that one background write may take


class CheckpointError(TrainingError):
    """A checkpoint could not be written, or none of those that exist can be read."""


def saved_steps(directory: AnyPath) -> list[int]:
    """Returns the steps of all committed checkpoints in a directory, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if path.name.isdecimal()]
    return sorted(int(path.name) for path in found if isinstance(path, Path) or (path / COMMITTED).exists())


class Tier:
    """The checkpoints that all processes write into one directory, each the shards that it holds, and
    process 0 commits."""

    name = "checkpoint"
    primary: int | None = 0
    """The process that commits; None is each."""

    def __init__(
        self,
        directory: AnyPath,
        keep: int,
        keep_every: int = 0,
        in_place: int = 0,
        before_commit: Callable[[], None] = lambda: None,
    ):
        """keep, keep_every: of `CheckpointConfig`. in_place, before_commit: as of `Checkpointer`."""
        orbax_settings.prepare(directory)
        in_bucket = isinstance(directory, epath.Path)
        self.directory = directory if in_bucket else Path(directory).absolute()
        self.newest: int | None = None  # last step saved or restored here
        self._keep, self._keep_every = keep, keep_every
        self._writing: int | None = None  # its write is not known to have succeeded
        prefix = None if self.primary == 0 else self.name.replace(" ", "_")
        shared = ocp.options.MultiprocessingOptions(self.primary, barrier_sync_key_prefix=prefix)
        self._arrays = functools.partial(
            ocp.PyTreeCheckpointHandler,
            # zstd takes a tenth off such floats and five times the CPU, which training needs.
            use_compression=False,
            multiprocessing_options=shared,
            **orbax_settings.of_arrays(self.primary, in_place),
        )
        self._json = functools.partial(ocp.JsonCheckpointHandler, multiprocessing_options=shared)
        # A directory is there before what is written into it, whatever else writes: where it is made by a
        # thread, the writers wait for a signal that a save of the other tier may have given. And where it
        # cannot be made, they wait for it for as long as a write may take.
        at_once = ocp.options.AsyncOptions(
            timeout_secs=WRITE_TIMEOUT, create_directories_asynchronously=False
        )
        composite = ocp.CompositeOptions(
            multiprocessing_options=shared,
            async_options=at_once,
            temporary_path_class=orbax_settings.path_that_commits(in_bucket),
        )
        self._orbax = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                composite_options=composite,
                state=self._arrays(),
                **{item: self._json() for item in self.items},
            ),
            multiprocessing_options=shared,
            async_options=at_once,
            temporary_path_class=orbax_settings.checksummed_path(before_commit, self._prune, in_bucket),
        )
        if self.commits:
            for unfinished in self._unfinished():  # of a process that was killed
                _remove(unfinished)

    items: tuple[str, ...] = ("data",)
    """What a checkpoint holds beside arrays, as JSON."""

    @property
    def commits(self) -> bool:
        """Says whether this process commits what is written here, and deletes it."""
        return self.primary is None or is_primary()

    def steps(self) -> list[int]:
        """Returns the steps of all committed checkpoints, oldest first."""
        return saved_steps(self.directory)

    def _unfinished(self) -> list[AnyPath]:
        if isinstance(self.directory, Path):
            return [*self.directory.glob(f"*{TEMPORARY}")]
        if not self.directory.is_dir():
            return []
        return [each for each in bucket.entries(self.directory) if not (each / COMMITTED).exists()]

    def check(self, step: int) -> None:
        """Raises CheckpointError if the write in progress is known to have failed."""
        try:
            self._orbax.check_for_errors()
        except Exception as error:
            failed, self._writing = self._writing, None
            raise self._failure(failed or step, error) from error

    def save(self, step: int, disk: PyTree, data_state: dict) -> None:
        """Starts to save what `layout.to_disk` returned, once the write before has ended: see
        `wait`. Raises CheckpointError if it cannot start."""
        items = {name: ocp.args.JsonSave(value) for name, value in self._said(disk, data_state).items()}
        arguments = ocp.args.Composite(state=ocp.args.PyTreeSave(disk), **items)
        try:
            self._orbax.save(self.directory / str(step), args=arguments)
        except Exception as error:
            raise self._failure(step, error) from error
        self._writing = self.newest = step

    def _said(self, disk: PyTree, data_state: dict) -> dict[str, Any]:
        """Returns `items` of a checkpoint. disk: its arrays."""
        return {"data": data_state}

    def wait(self) -> None:
        """Returns when nothing is being written. Raises CheckpointError if the last save failed."""
        step, self._writing = self._writing, None
        if step is None:
            return
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            raise self._failure(step, error) from error

    def close(self) -> None:
        """Frees Orbax's threads."""
        self._orbax.close()

    def read(self, step: int, abstract_state: PyTree) -> tuple[PyTree, dict]:
        """Returns state and data state. Raises InputError for a checkpoint of another model."""
        directory = absolute(self.directory / str(step))
        abstract = layout.abstract_disk(abstract_state)
        arrays = self._arrays()
        _require_same(directory, arrays.metadata(directory / "state").tree, abstract)
        arguments = ocp.args.PyTreeRestore(
            abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract)
        )
        disk = arrays.restore(directory / "state", args=arguments)
        data_state = self._json().restore(directory / "data")
        self.newest = step
        return layout.from_disk(disk, abstract_state), data_state

    def damage(self, step: int, abstract_state: PyTree) -> str | None:
        """Returns what is wrong with a checkpoint, the same in all processes; each reads a part of it."""
        return agreed(broken(self.directory / str(step), jax.process_index(), jax.process_count()))

    def move_aside(self, step: int, reason: str) -> None:
        """Moves a damaged checkpoint out of the way of one that may be saved at the same step."""
        from_first(functools.partial(self._move_aside, step, reason))

    def _move_aside(self, step: int, reason: str) -> None:
        target = self.directory.parent / "damaged" / str(step)
        while target.exists():
            target = target.with_name(f"{target.name}_")
        _move(self.directory / str(step), target)
        log.warning("checkpoint %d is damaged and passed over: %s; moved to %s", step, reason, target)

    def _prune(self) -> None:
        """Deletes what `keep` and `keep_every` do not keep. Runs in who commits, after each commit."""
        for step in self.steps()[: -self._keep]:
            if not self._keep_every or step % self._keep_every:
                self._delete(step)

    def _delete(self, step: int) -> None:
        # The new name comes first: a kill in between leaves rubbish, not a checkpoint with holes.
        rubbish = self._rubbish(step)
        try:
            if isinstance(rubbish, Path):
                (self.directory / str(step)).rename(rubbish)
            else:
                (rubbish / COMMITTED).unlink()
            _remove(rubbish)
        except OSError as error:
            reason = error.strerror or error
            log.warning("%s %d is no longer needed but cannot be deleted: %s", self.name, step, reason)

    def _rubbish(self, step: int) -> AnyPath:
        """Returns where a checkpoint lies that is none yet, or no more."""
        in_bucket = not isinstance(self.directory, Path)
        return self.directory / (str(step) if in_bucket else f"{step}{TEMPORARY}")

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        """Frees what a failed save had written, and returns the error that says so."""
        self.newest = None
        with contextlib.suppress(Exception):  # another thread may still write metadata there
            self._orbax.wait_until_finished()
        if self.commits:
            with contextlib.suppress(Exception):
                _remove(self._rubbish(step))
        code = re.search(r"os_error_code='(\d+)'", str(error))  # at the end of a long story
        reason = os.strerror(int(code[1])) if code else getattr(error, "strerror", None)
        reason = reason or " ".join(str(error).split()) or type(error).__name__
        return CheckpointError(f"{self.directory}: {self.name} {step} was not saved: {reason}")


def _remove(folder: AnyPath) -> None:
    shutil.rmtree(folder) if isinstance(folder, Path) else folder.rmtree()


def _move(folder: AnyPath, target: AnyPath) -> None:
    """Gives a folder another name: on a disk at once; in a bucket, which has files only, one by one."""
    if isinstance(folder, Path):
        target.parent.mkdir(exist_ok=True)
        folder.rename(target)
        return
    store = bucket.store_of(folder)
    for file in files_below(folder):
        store.cp_file(str(file), str(target / str(file.relative_to(folder))))
    _remove(folder)


def agreed(reason: str | None) -> str | None:
    """Returns the first reason that a process has, the same in all of them."""
    return next((each for each in gather_text(reason or "") if each), None)


def _require_same(directory: Path, saved: PyTree, wanted: PyTree) -> None:
    """Raises InputError naming the first array by which a checkpoint differs from what a run wants."""
    saved, wanted = _flat(saved), _flat(wanted)
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in saved:
            raise InputError(f"{directory}: holds no {name}, which this run's state has")
        if name not in wanted:
            raise InputError(f"{directory}: holds {name}, which this run's state has not")
        if saved[name] != wanted[name]:
            raise InputError(f"{directory}: {name} is {saved[name]}, this run's is {wanted[name]}")


def _flat(tree: PyTree) -> dict[str, str]:
    """Returns dtype and shape of each leaf, by its place."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        "/".join(layout.key_name(key) for key in path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    }
