"""The run directory: the contract between a run and everything that reads it afterwards.

config.json          the resolved configuration; `--config RUN_DIR/config.json` runs it again
choices.json         what was asked to be `auto`: key, asked, chosen, reason, device
environment.json     versions, devices, flags
metrics.jsonl        one object a step, with METRICS_FIELDS and what the model adds; unknown values are null
eval.jsonl           one object an evaluation, with EVAL_FIELDS
goodput.jsonl        one object an event: what the hours of all starts went to, see training/goodput.py
goodput.svg          a picture of it
tensorboard/         event files
trackers.json        by which id each experiment tracker continues the run
checkpoints/<step>/  Orbax; <step> counts completed updates
tokenizer/           the tokenizer of the run's text, its files as they were found, and what documents begin
                     and end with: `jaxthru.data.store.tokenizer.Tokenizer.of(RUN_DIR)`
reference.npz        with train.objective = dpo: how probable each answer was before the first update
base/                of published weights that the run started from: what an export carries on beside weights
profile/<step>/      traces and what was read from them
plan_data.svg        what `plan data --run-dir` drew
autotune/            what XLA chose for a GPU by timing, as text, with train.deterministic
damaged/<step>/      checkpoints found broken
local_tier.json      which folder on the hosts' disks has the run's local checkpoints
failures.json        how often each step has failed, for a scheduler's script
.lock                held while a job trains here

Nothing in it is code, and nothing in it is run: whoever is given one may look at it and resume it.
"""

import contextlib
import fcntl
import itertools
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxthru.engine.terms import METRICS_FIELDS
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.bucket import is_url
from jaxthru.runtime.distributed import from_first, is_primary
from jaxthru.runtime.errors import InputError, TrainingError, require
from jaxthru.training.environment import environment
from jaxthru.training.goodput import Account, account
from jaxthru.training.plot import Panel, Picture
from jaxthru.training.remote_run import Mirror
from jaxthru.training.rows import append, last, read
from jaxthru.training.table import Table

log = logging.getLogger(__name__)

EVAL_FIELDS = ("step", "loss", "loss_by_source", "tokens")

BASE_FILES = ("config.json", "generation_config.json", "README.md", "LICENSE*", "NOTICE*")
"""What a folder of published weights says about them, beside its tokenizer."""
BASE_BYTES = 10_000_000


ROOT = "runs"  # of run directories that are given no place


class RunDirectory:
    """The files of one run; nothing is made before it is needed, the directory itself when it is locked.

    Only process 0 may append rows. All call the other methods that write: process 0 does it, and what stops
    it stops them all.
    """

    def __init__(self, path: Path | str, trains: bool = False):
        """path: or an address, gs://BUCKET/RUN: what lies there is fetched. trains: this process is one of
        those that write here, and not one that reads alone. Raises InputError."""
        require(path != "", "--run-dir: is empty; give a directory, or leave it out")
        self.mirror = Mirror(str(path), trains) if is_url(path) else None
        self.path = self.mirror.path if self.mirror else Path(path)
        self.where = str(self.mirror.url if self.mirror else path)
        self.config = self.path / "config.json"
        self.choices = self.path / "choices.json"
        self.environment = self.path / "environment.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.eval_file = self.path / "eval.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.trackers = self.path / "trackers.json"
        self.checkpoints = (self.mirror.url if self.mirror else self.path) / "checkpoints"
        self.profile = self.path / "profile"
        self.autotune = self.path / "autotune"
        self.tokenizer = self.path / "tokenizer"
        self.base = self.path / "base"
        self.reference = self.path / "reference.npz"

    def __repr__(self) -> str:
        row, steps = last(self.metrics_file), self.steps()
        if row is None:
            return f"RunDirectory({self.where!r}): no steps yet"
        of = f" of {steps:,}" if steps else ""
        loss = "" if row.get("loss") is None else f", loss {row['loss']:.4f}"
        return f"RunDirectory({self.where!r}): {row['step']:,}{of} steps{loss}"

    @classmethod
    def fresh(cls, name: str, root: Path | str = ROOT) -> "RunDirectory":
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
                raise _no_place(parent, error) from error

        return cls(from_first(make))

    def holds_run(self) -> bool:
        """Says whether a run was started here. Raises InputError for a path that can be no directory."""
        try:
            taken = self.path.exists() and not self.path.is_dir()
            found = any(path.exists() for path in (self.config, self.metrics_file, self.checkpoints))
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
                raise _unwritable(self.where, error) from error
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
            try:
                yield
            finally:
                self.send_at_the_end()

    def send(self) -> None:
        """Copies what has changed to the bucket, if the run directory lies in one. Process 0 alone calls it.
        Raises TrainingError."""
        if self.mirror:
            self.mirror.send()

    def send_at_the_end(self) -> None:
        """Does the same in process 0, whatever has ended the run, and does not change how it has ended."""
        try:
            if is_primary():
                self.send()
        except TrainingError as error:
            log.warning("%s; not all of its files have been copied there from %s", error, self.path)

    def write_environment(self) -> None:
        """Writes environment.json: with what, on what and by which command the run was last started."""
        from_first(lambda: write_atomically(self.environment, json.dumps(environment(), indent=2) + "\n"))

    def keep_tokenizer(self, files: Callable[[], Mapping[str, bytes]]) -> None:
        """Writes the tokenizer's files, so that whoever is given the run can read what it reads and writes.

        files: returns {name: content}, `Tokenizer.kept`; process 0 alone calls it. What a run has kept stays
        as it is: the keys of its data see to it that it goes on with the same tokenizer. Raises
        InputError if it cannot be written.
        """
        from_first(lambda: _keep(self.tokenizer, files(), "tokenizer.json"))

    def keep_base(self, folder: Path) -> None:
        """Copies, byte for byte, what a folder of published weights says about them: those of BASE_FILES that
        are there. What a run has kept already stays as it is.

        A file above BASE_BYTES is left out, with a warning. Raises InputError for one that cannot be read or
        written.
        """
        from_first(lambda: _keep(self.base, _base_files(Path(folder)), "config.json"))

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl: METRICS_FIELDS, then further ones. Raises TrainingError if it cannot
        be written, ValueError if the row lacks one of METRICS_FIELDS."""
        append(self.metrics_file, row, METRICS_FIELDS)

    def append_eval(self, row: dict[str, Any]) -> None:
        """Adds a line to eval.jsonl: EVAL_FIELDS, then further ones. Raises TrainingError if it cannot be
        written, ValueError if the row lacks one of EVAL_FIELDS."""
        append(self.eval_file, row, EVAL_FIELDS)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Returns the rows of metrics.jsonl without what a kill left behind them."""
        return [dict.fromkeys(METRICS_FIELDS) | row for _, row in read(self.metrics_file)]

    def read_eval(self) -> list[dict[str, Any]]:
        """Returns the rows of eval.jsonl without what a kill left behind them."""
        return [dict.fromkeys(EVAL_FIELDS) | row for _, row in read(self.eval_file)]

    def metrics(self) -> Table:
        """Returns metrics.jsonl as a table, a row a step: `run.metrics()["loss"]` is a NumPy array [steps].

        METRICS_FIELDS are its columns; what is a value by source is a column each, `loss_by_source.NAME`.
        """
        return Table(self.read_metrics(), METRICS_FIELDS)

    def evaluations(self) -> Table:
        """Returns eval.jsonl as a table, a row an evaluation, with the columns EVAL_FIELDS."""
        return Table(self.read_eval(), EVAL_FIELDS)

    def plot(self, beside: Mapping[str, "RunDirectory"] | None = None) -> Picture:
        """Returns loss and learning rate over the steps: a notebook shows it, `save(FILE)` writes it as SVG.

        beside: {name: another run}, drawn into the same plots. Raises InputError before the first step.
        """
        losses, rates = {}, {}
        for name, run in {"": self, **(beside or {})}.items():
            rows, held_out = run.metrics(), run.evaluations()
            require(len(rows) > 0, f"{run.path}: no step has been recorded yet")
            losses[f"{name}, training" if name else "training"] = rows["step"], rows["loss"]
            if len(held_out):
                losses[f"{name}, held out" if name else "held out"] = held_out["step"], held_out["loss"]
            rates[name] = rows["step"], rows["learning_rate"]
        return Picture(
            (Panel("loss (nats per token), by step", losses), Panel("learning rate, by step", rates))
        )

    def goodput(self) -> Account:
        """Returns where the hours of all starts went; a notebook shows it as a picture. Raises InputError
        before the first."""
        try:
            return account(self.path)
        except ValueError as error:
            raise InputError(str(error)) from error

    def steps(self) -> int | None:
        """Returns the steps that the run is to have, `train.steps` of its config.json; None if not known."""
        steps = self.asked("train").get("steps")
        return steps if isinstance(steps, int) else None

    def asked(self, group: str) -> dict[str, Any]:
        """Returns a group of keys of the run's config.json, as it stands there; {} if that cannot be read."""
        try:
            return dict(json.loads(self.config.read_text())[group])
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def cut(self, step: int) -> None:
        """Forgets what was written after `step`, where the run resumes: rows beyond it, and whatever follows.

        From step 0 the run starts anew: the evaluation before the first update will be made again too.
        Raises InputError for a damaged line before the last that is kept.
        """

        def keep() -> None:
            kept = {path: read(path, step) if step else [] for path in (self.metrics_file, self.eval_file)}
            for path in filter(Path.exists, kept):
                write_atomically(path, b"\n".join([*(line for line, _ in kept[path]), b""]))
            newest = max((row["step"] for _, row in kept[self.metrics_file]), default=0)
            if newest < step:
                log.warning(
                    "%s: has no rows of steps %d to %d; going on", self.metrics_file, newest + 1, step
                )

        from_first(keep)


def _keep(folder: Path, files: Mapping[str, bytes], last: str) -> None:
    """Writes files into a folder that does not hold `last` yet, which is written last: it says that all are
    there."""
    if (folder / last).exists():
        return
    for name in sorted(files, key=lambda name: name == last):
        write_atomically(folder / name, files[name])


def _base_files(folder: Path) -> dict[str, bytes]:
    """Returns the contents of what `keep_base` copies. Raises InputError."""
    found = {}
    for path in sorted({path for pattern in BASE_FILES for path in folder.glob(pattern) if path.is_file()}):
        try:
            size = path.stat().st_size
            if size > BASE_BYTES:
                log.warning("%s: %d bytes, is not kept with the run", path, size)
                continue
            found[path.name] = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    return found


def check_place(directory: RunDirectory | None, name: str) -> None:
    """Raises InputError where this directory, or a fresh one of a name, cannot be; leaves nothing there."""
    path = directory.path if directory else Path(ROOT, name)
    try:
        with tempfile.TemporaryFile(dir=next(there for there in (path, *path.parents) if there.exists())):
            pass
    except OSError as error:
        raise (_unwritable(directory.where, error) if directory else _no_place(path, error)) from error


def _unwritable(where: str, error: OSError) -> InputError:
    return InputError(f"--run-dir {where}: cannot be written ({error.strerror})")


def _no_place(parent: Path, error: OSError) -> InputError:
    return InputError(f"{parent}: no run directory can be made in it ({error.strerror}); give a --run-dir")
