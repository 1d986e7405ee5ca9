"""Saves and restores the training state, asynchronously and atomically; skips damaged checkpoints.

checkpoints/<step>/state/     Orbax: the arrays, laid out as in training/layout.py
checkpoints/<step>/data/      the data state, as JSON
checkpoints/<step>/seal.json  a checksum of every file, see training/checksums.py
damaged/<step>/               what was found broken; nothing is deleted

A checkpoint is written to a temporary directory and renamed when it is whole, so a directory whose name is a
number is one that was committed. All processes call the methods together and share one file system; each
writes the shards that it holds.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath  # Orbax's paths

from jaxthru.runtime.distributed import from_first, gather_text, is_primary
from jaxthru.runtime.errors import InputError, TrainingError, require
from jaxthru.training import layout, orbax_settings
from jaxthru.training.checksums import broken

log = logging.getLogger(__name__)
PyTree = Any
TEMPORARY = ocp.path.atomicity.TMP_DIR_SUFFIX
WRITE_TIMEOUT = 3600  # seconds that one background write may take
SECONDS_AFTER_A_FAULT = 8.0
"""How long one of several processes that failed waits for a write to be committed."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """every: steps between checkpoints, 0 for none. last: also save after the last step, or the one at which
    a signal ends the run; without both nothing is saved, as a measurement wants it, and a run that is
    repeated starts anew. keep: how many of the newest stay. keep_every: also keep each checkpoint at a
    multiple of this many steps, for good; 0 keeps none so."""

    every: int = 100
    last: bool = True
    keep: int = 2
    keep_every: int = 0

    def __post_init__(self):
        require(self.every >= 0, f"checkpoint.every = {self.every}: must be at least 0")
        require(self.keep >= 1, f"checkpoint.keep = {self.keep}: must be at least 1")
        require(self.keep_every >= 0, f"checkpoint.keep_every = {self.keep_every}: must be at least 0")


class CheckpointError(TrainingError):
    """A checkpoint could not be written, or none of those that exist can be read."""


def saved_steps(directory: Path) -> list[int]:
    """Returns the steps of all committed checkpoints in a directory, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def newest_step(directory: Path) -> int | None:
    """Returns the newest committed step as process 0 sees it: a file system may be slow to show it to all."""
    return from_first(lambda: max(saved_steps(directory), default=None))


def newest_data_state(directory: Path) -> dict:
    """Returns the data state of the newest checkpoint that it can be read from, {} if there is none.

    It is wanted before the parameters are restored, for it says which data to open.
    """

    def read() -> dict:
        for step in reversed(saved_steps(directory)):
            saved = epath.Path(directory).absolute() / f"{step}/data"
            # One that is damaged is passed over, as restoring does, which says so.
            with contextlib.suppress(OSError, ValueError, RecursionError):
                if isinstance(state := ocp.JsonCheckpointHandler().restore(saved), dict):
                    return state
        return {}

    return from_first(read)


class Checkpointer:
    """Writes checkpoints in the background and reads the newest whole one. A context manager: leaving it
    waits for the write in progress."""

    def __init__(self, directory: Path, config: CheckpointConfig, in_place: int = 0):
        """directory: `checkpoints` of a run directory; made with the first checkpoint.

        in_place: bytes of the largest array of a state that lives in host memory. It is written from there,
        and what of it lives on the device a little at a time, while the caller waits: copied to the host at
        once, as else, it would take the memory of a second state there. 0: of one on the device.
        """
        orbax_settings.quieten()
        self.directory = Path(directory).absolute()
        self.config = config
        self._writing: int | None = None  # its write is not known to have succeeded
        self._newest: int | None = None  # last step saved or restored here
        self._in_place = in_place > 0
        little = 1 + 2 * in_place // 10**9
        by_turns = ocp.type_handlers.ArrayHandler(callback=orbax_settings.ByTurns())
        settings = {
            "save_device_host_concurrent_gb": little,
            "restore_concurrent_gb": little,
            "type_handler_registry": ocp.type_handlers.create_type_handler_registry((jax.Array, by_turns)),
        }
        self._arrays = functools.partial(
            ocp.PyTreeCheckpointHandler,
            # zstd takes a tenth off such floats and five times the CPU, which training needs.
            use_compression=False,
            **(settings if self._in_place else {}),
        )
        self._orbax = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(state=self._arrays(), data=ocp.JsonCheckpointHandler()),
            async_options=ocp.options.AsyncOptions(
                timeout_secs=WRITE_TIMEOUT,
                # Else where one cannot be made, threads wait for it for as long as a write may take.
                create_directories_asynchronously=False,
            ),
            temporary_path_class=orbax_settings.checksummed_path(after_commit=self._prune),
        )
        if is_primary():
            for unfinished in self.directory.glob(f"*{TEMPORARY}"):  # of a process that was killed
                shutil.rmtree(unfinished)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self._wait_at_the_end(failed=error is not None)
        except CheckpointError as failure:
            if error is None:
                raise
            if isinstance(error, TrainingError):  # of the same full disk, say: one line for both
                raise CheckpointError(f"{error}; {failure}") from error
            log.error("%s", failure)  # and let the first error go on
        finally:
            if error is None or jax.process_count() == 1:  # else it may wait for others
                with contextlib.suppress(Exception):  # all that was to be saved has been waited for
                    self._orbax.close()

    def _wait_at_the_end(self, failed: bool) -> None:
        """Waits for the write in progress: for one that other processes may no more take part in, a while.
        Raises CheckpointError if it has failed."""
        if not failed or jax.process_count() == 1:
            self.wait()
            return
        failures = []

        def wait() -> None:  # an error that leaves a thread is a traceback of its own
            try:
                self.wait()
            except CheckpointError as failure:
                failures.append(failure)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(SECONDS_AFTER_A_FAULT)
        if failures:
            raise failures[0]

    def steps(self) -> list[int]:
        """Returns the steps of all committed checkpoints, oldest first."""
        return saved_steps(self.directory)

    def should_save(self, step: int, last: bool) -> bool:
        """Says whether the state after `step` updates is to be saved. last: it is the run's last. Raises
        CheckpointError if the write in progress is known to have failed: other processes may wait for it."""
        try:
            self._orbax.check_for_errors()
        except Exception as error:
            failed, self._writing = self._writing, None
            raise self._failure(failed or step, error) from error
        return (last and self.config.last) or (self.config.every > 0 and step % self.config.every == 0)

    def save(self, step: int, state: PyTree, data_state: dict) -> None:
        """Starts to save; returns when `state` may be donated to the next step. The step that was saved or
        restored last is not saved again.

        step: completed updates. data_state: anything that JSON can hold.
        Raises CheckpointError if this save cannot start or the one before it failed, ValueError for a state
        that a layered step has not settled.
        """
        if step == self._newest:
            return
        if "pending" in state:
            raise ValueError("a state with a pending update is not whole: save DispatchedStep.settled of it")
        self.wait()
        # On a GPU or TPU Orbax returns when all arrays have been copied to the host. On a CPU it keeps views
        # of the arrays' own memory; XLA does not reuse memory that is so held, but gives the update new.
        arguments = ocp.args.Composite(
            state=ocp.args.PyTreeSave(layout.to_disk(state)), data=ocp.args.JsonSave(data_state)
        )
        try:
            self._orbax.save(self.directory / str(step), args=arguments)
        except Exception as error:
            raise self._failure(step, error) from error
        self._writing = self._newest = step
        if self._in_place:
            self.wait()  # the next step uses the state up

    def wait(self) -> None:
        """Returns when nothing is being written. Raises CheckpointError if the last save failed."""
        step, self._writing = self._writing, None
        if step is None:
            return
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            raise self._failure(step, error) from error

    def restore(self, abstract_state: PyTree) -> tuple[int, PyTree, dict] | None:
        """Returns (step, state, data state) of the newest whole checkpoint, or None if none was ever saved.

        abstract_state: jax.ShapeDtypeStructs with shardings; the mesh and the form of the layers may differ
        from those that were saved. Damaged checkpoints are reported, moved aside and passed over.
        Raises InputError if the checkpoint is of another model or optimizer, CheckpointError if there were
        checkpoints but none of them is whole.
        """
        self.wait()
        while (step := newest_step(self.directory)) is not None:
            log.info("restoring checkpoint %d ...", step)
            reason = self._damage(step)
            if reason is None:
                state, data_state = self._read(step, abstract_state)
                self._newest = step
                return step, state, data_state
            from_first(functools.partial(self._move_aside, step, reason))
        damaged = self.directory.parent / "damaged"
        if from_first(damaged.is_dir):
            raise CheckpointError(
                f"{self.directory}: no checkpoint can be restored: all were damaged and lie in {damaged}; "
                "give another run directory to start from the beginning"
            )
        return None

    def _read(self, step: int, abstract_state: PyTree) -> tuple[PyTree, dict]:
        directory = epath.Path(self.directory / str(step))
        abstract = layout.abstract_disk(abstract_state)
        arrays = self._arrays()
        _require_same(directory, arrays.metadata(directory / "state").tree, abstract)
        arguments = ocp.args.PyTreeRestore(
            abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract)
        )
        disk = arrays.restore(directory / "state", args=arguments)
        data_state = ocp.JsonCheckpointHandler().restore(directory / "data")
        return layout.from_disk(disk, abstract_state), data_state

    def _damage(self, step: int) -> str | None:
        """Returns what is wrong with a checkpoint, the same in all processes; each reads a part of it."""
        found = broken(self.directory / str(step), jax.process_index(), jax.process_count())
        return next((reason for reason in gather_text(found or "") if reason), None)

    def _move_aside(self, step: int, reason: str) -> None:
        """Moves a damaged checkpoint out of the way of one that may be saved at the same step."""
        damaged = self.directory.parent / "damaged"
        damaged.mkdir(exist_ok=True)
        target = damaged / str(step)
        while target.exists():
            target = target.with_name(f"{target.name}_")
        (self.directory / str(step)).rename(target)
        log.warning("checkpoint %d is damaged and passed over: %s; moved to %s", step, reason, target)

    def _prune(self) -> None:
        """Deletes what `keep` and `keep_every` do not keep. Runs in process 0 after each commit."""
        steps, every = self.steps(), self.config.keep_every
        for step in steps[: -self.config.keep]:
            if every and step % every == 0:
                continue
            # The new name comes first: a kill in between leaves rubbish, not a checkpoint with holes.
            rubbish = self.directory / f"{step}{TEMPORARY}"
            try:
                (self.directory / str(step)).rename(rubbish)
                shutil.rmtree(rubbish)
            except OSError as error:
                reason = error.strerror or error
                log.warning("checkpoint %d is no longer needed but cannot be deleted: %s", step, reason)

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        """Frees what a failed save had written, and returns the error that says so."""
        self._newest = None
        if is_primary():
            shutil.rmtree(self.directory / f"{step}{TEMPORARY}", ignore_errors=True)
        code = re.search(r"os_error_code='(\d+)'", str(error))  # at the end of a long story
        reason = os.strerror(int(code[1])) if code else getattr(error, "strerror", None)
        reason = reason or " ".join(str(error).split()) or type(error).__name__
        return CheckpointError(f"{self.directory}: checkpoint {step} was not saved: {reason}")


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
