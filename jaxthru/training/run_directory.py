"""The run directory: the contract between a run and everything that reads it afterwards.

config.json          the resolved configuration; `--config RUN_DIR/config.json` runs it again
environment.json     versions, devices, flags
metrics.jsonl        one object a step, with METRICS_FIELDS and what the model adds; unknown values are null
eval.jsonl           one object an evaluation, with EVAL_FIELDS
tensorboard/         event files
checkpoints/<step>/  Orbax; <step> counts completed updates
profile/<step>/      traces and what was read from them
autotune/            what XLA chose for a GPU by timing, as text, with train.deterministic
damaged/<step>/      checkpoints found broken
.lock                held while a job trains here

Nothing in it is code, and nothing in it is run: whoever is given one may look at it and resume it.
"""

import contextlib
import fcntl
import importlib.metadata
import itertools
import json
import logging
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxthru.engine.terms import METRICS_FIELDS
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.distributed import from_first
from jaxthru.runtime.errors import InputError, TrainingError, require

log = logging.getLogger(__name__)

EVAL_FIELDS = ("step", "loss", "loss_by_source", "tokens")

PACKAGES = ("jaxthru", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
FLAG_PREFIXES = ("XLA_", "LIBTPU_", "JAX_", "NCCL_", "NVSHMEM_", "TORCH_SYMM_")


class RunDirectory:
    """The files of one run; nothing is made before it is needed, the directory itself when it is locked.

    Only process 0 may append rows. All call the other methods that write: process 0 does it, and what stops
    it stops them all.
    """

    def __init__(self, path: Path | str):
        require(path != "", "--run-dir: is empty; give a directory, or leave it out")
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.eval = self.path / "eval.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.profile = self.path / "profile"
        self.autotune = self.path / "autotune"

    @classmethod
    def fresh(cls, name: str, root: Path | str = "runs") -> "RunDirectory":
        """Makes and returns `root`/`name`/<n> with the next free n, the same in all processes.

        Raises InputError, in all of them, if it cannot be made.
        """
        parent = Path(root) / name

        def make() -> str:
            try:
                parent.mkdir(parents=True, exist_ok=True)
                taken = [int(path.name) for path in parent.iterdir() if path.name.isdecimal()]
                for number in itertools.count(max(taken, default=0) + 1):
                    with contextlib.suppress(FileExistsError):  # another run was faster
                        (parent / str(number)).mkdir()
                        return str(parent / str(number))
            except OSError as error:
                said = f"{parent}: no run directory can be made in it ({error.strerror}); give a --run-dir"
                raise InputError(said) from error

        return cls(from_first(make))

    def holds_run(self) -> bool:
        """Says whether a run was started here. Raises InputError for a path that can be no directory."""
        try:
            taken = self.path.exists() and not self.path.is_dir()
            found = any(path.exists() for path in (self.config, self.metrics, self.checkpoints))
        except OSError as error:
            raise InputError(f"--run-dir {self.path}: cannot be read ({error.strerror})") from error
        require(not taken, f"--run-dir {self.path}: is a file; give a directory")
        return found

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the directory, and keeps other jobs from training in it at the same time.

        Raises InputError if one does, or if the directory cannot be made.
        """

        def lock() -> None:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                file = held.enter_context((self.path / ".lock").open("w"))
            except OSError as error:
                raise InputError(f"--run-dir {self.path}: cannot be written ({error.strerror})") from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(f"--run-dir {self.path}: another process trains here now") from error
            except OSError as error:  # as of some network file systems
                raise InputError(
                    f"--run-dir {self.path}: its file system locks no file ({error.strerror}), so two jobs "
                    "could train in it at once; give a directory on another, or mount it with locks"
                ) from error

        with contextlib.ExitStack() as held:
            from_first(lock)
            yield

    def write_environment(self) -> None:
        """Writes environment.json: with what, on what and by which command the run was last started."""
        from_first(lambda: write_atomically(self.environment, json.dumps(environment(), indent=2) + "\n"))

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl: METRICS_FIELDS, then further ones. Raises TrainingError if it cannot
        be written, ValueError if the row lacks one of METRICS_FIELDS."""
        _append(self.metrics, row, METRICS_FIELDS)

    def append_eval(self, row: dict[str, Any]) -> None:
        """Adds a line to eval.jsonl: EVAL_FIELDS, then further ones. Raises TrainingError if it cannot be
        written, ValueError if the row lacks one of EVAL_FIELDS."""
        _append(self.eval, row, EVAL_FIELDS)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Returns the rows of metrics.jsonl without what a kill left behind them."""
        return [dict.fromkeys(METRICS_FIELDS) | row for _, row in _rows(self.metrics)]

    def read_eval(self) -> list[dict[str, Any]]:
        """Returns the rows of eval.jsonl without what a kill left behind them."""
        return [dict.fromkeys(EVAL_FIELDS) | row for _, row in _rows(self.eval)]

    def cut(self, step: int) -> None:
        """Forgets what was written after `step`, where the run resumes: rows beyond it, and whatever follows.

        From step 0 the run starts anew: the evaluation before the first update will be made again too.
        Raises InputError for a damaged line before the last that is kept.
        """

        def keep() -> None:
            kept = {path: _rows(path, step) if step else [] for path in (self.metrics, self.eval)}
            for path in filter(Path.exists, kept):
                write_atomically(path, b"\n".join([*(line for line, _ in kept[path]), b""]))
            last = max((row["step"] for _, row in kept[self.metrics]), default=0)
            if last < step:
                log.warning("%s: has no rows of steps %d to %d; going on", self.metrics, last + 1, step)

        from_first(keep)


def environment() -> dict[str, Any]:
    """Returns versions, devices, flags, the commit (null outside a git checkout) and the command line."""
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        "platform": platform.platform(),
        "backend": devices[0].client.platform_version,
        "devices": {"kind": devices[0].device_kind, "count": len(devices)},
        "processes": jax.process_count(),
        "flags": {key: os.environ[key] for key in sorted(os.environ) if key.startswith(FLAG_PREFIXES)},
        "commit": _commit(),
        "command": sys.orig_argv,
    }


def _append(path: Path, row: dict[str, Any], fields: tuple[str, ...]) -> None:
    if missing := sorted(set(fields) - row.keys()):
        raise ValueError(f"{path.name}: missing fields {missing}")
    try:
        with path.open("a") as file:  # closed, so flushed, at once: a kill loses at most this line
            file.write(_line({field: row[field] for field in fields} | row))
    except OSError as error:
        raise TrainingError(f"{path}: cannot be written ({error.strerror})") from error


def _line(row: dict[str, Any]) -> str:
    return json.dumps(_plain(row), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Returns a value as JSON can hold it. NaN and infinity become null: JSON has neither."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # an array, or a scalar of NumPy's
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rows(path: Path, last: float = math.inf) -> list[tuple[bytes, dict[str, Any]]]:
    """Returns (line, row) of the rows up to step `last`. Behind them may stand anything: what a kill, a power
    cut or a full disk leaves. Raises InputError for a line among them that is no row."""
    kept, damaged = [], None
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is None:
            damaged = damaged or number
        elif row["step"] > last:
            break
        else:
            require(
                damaged is None,
                f"{path}: line {damaged} is damaged, and rows that are needed follow; remove that line "
                f"(`sed -i {damaged}d FILE`): nothing else depends on it",
            )
            kept.append((line, row))
    return kept


def _row(line: bytes) -> dict[str, Any] | None:
    """Returns the row that a line holds, if it holds one."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Returns the commit of jaxthru's own checkout; None without one, be it within another project's."""
    tree = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(tree), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return said[1] if said[0] == str(tree) else None
