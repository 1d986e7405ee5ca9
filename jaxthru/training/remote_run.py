"""A run directory in a bucket: `--run-dir gs://BUCKET/RUN`, or of S3.

Orbax writes checkpoints straight to the bucket. All other files are written to a mirror on this host's disk,
since none can be added to there, and process 0 copies those that have changed to the bucket: before each
checkpoint is committed, so that what a run resumes from never runs ahead of its record, and at the end. A
start fetches them, into a mirror for each process.
"""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import jax
from etils import epath

from jaxthru.runtime.atomic import PARTIAL, write_atomically
from jaxthru.runtime.bucket import address, entries, reason_of, scheme_of
from jaxthru.runtime.distributed import from_first
from jaxthru.runtime.errors import InputError, TrainingError
from jaxthru.training.checksums import files_below

LEFT_OUT = frozenset({"checkpoints", "damaged", ".lock"})
"""Of a run directory, what is not copied: Orbax writes it, or it means nothing elsewhere."""
IDENTITY = ".run"
"""A file in the bucket: which run lies there."""
ADDED_TO = (".jsonl",)
"""How names of files end that are only added to: where a mirror has more of one, that stays."""


class Mirror:
    """The files of a run in a bucket, on this host's disk. path: there. url: of the bucket's folder."""

    def __init__(self, url: str, trains: bool):
        """Fetches what lies there. url: see `address`. trains: this process is one of those that write to it,
        and has a mirror of its own; who reads alone takes no notice of what a run here has not sent. Raises
        InputError."""
        self.url, self._trains = address(url), trains
        self._sent: dict[Path, tuple[int, int]] = {}
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        who = f"process_{jax.process_index()}" if trains else "reader"
        try:
            self.path = home / "jaxthru" / "runs" / f"{self.url.name}-{self._identity(trains)}" / who
            if trains and scheme_of(url) == "s3":
                from jaxthru.training import s3  # not before: it loads Orbax

                s3.check(self.url, IDENTITY)
            with self._alone():
                self._fetch()
        except InputError:
            raise
        except Exception as error:  # of whichever library it is
            raise InputError(f"--run-dir {url}: cannot be read or written ({reason_of(error)})") from error

    def _identity(self, trains: bool) -> str:
        """Returns what tells this run from one that lay there before, whose mirror may be here still."""
        file = self.url / IDENTITY

        def known() -> str:
            if not file.exists():
                if not trains:
                    return "none"
                self.url.mkdir(parents=True, exist_ok=True)
                file.write_text(uuid.uuid4().hex[:8])
            return file.read_text()

        return from_first(known) if trains else known()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps a mirror that a run writes to from being changed below it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if self._trains else 0))
            except BlockingIOError as error:
                raise InputError(f"--run-dir {self.url}: another process trains here now") from error
            yield

    def _fetch(self) -> None:
        """Makes the mirror hold what the bucket does; of files that are only added to, one that a run writes
        to also keeps what this host has added since."""
        here = set(self._files())
        for path in self._there():
            mine, content = self.path / str(path.relative_to(self.url)), path.read_bytes()
            here.discard(mine)
            added_to = self._trains and mine.suffix in ADDED_TO and mine.is_file()
            if not (added_to and mine.read_bytes().startswith(content)):
                write_atomically(mine, content)
                self._sent[mine] = _version(mine)
        for path in here:
            if not (self._trains and path.suffix in ADDED_TO):
                path.unlink()

    def send(self) -> None:
        """Copies what has changed since to the bucket, and deletes there what is here no more. Raises
        TrainingError."""
        try:
            self._send()
        except Exception as error:  # of whichever library it is
            raise TrainingError(f"{self.url}: cannot be written ({reason_of(error)})") from error

    def _send(self) -> None:
        files = self._files()
        for path in self._sent.keys() - set(files):
            (self.url / str(path.relative_to(self.path))).unlink(missing_ok=True)
            del self._sent[path]
        for path in files:
            with contextlib.suppress(FileNotFoundError):  # another thread may just have removed it
                if self._sent.get(path) == (version := _version(path)):
                    continue
                content = path.read_bytes()
                target = self.url / str(path.relative_to(self.path))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
                self._sent[path] = version

    def _files(self) -> list[Path]:
        found = [path for path in sorted(self.path.rglob("*")) if path.is_file()]
        parts = {path: path.relative_to(self.path).parts for path in found}
        return [path for path in found if parts[path][0] not in LEFT_OUT and not PARTIAL.search(path.name)]

    def _there(self) -> list[epath.Path]:
        if not self.url.is_dir():
            return []
        top = [each for each in entries(self.url) if each.name not in (*LEFT_OUT, IDENTITY)]
        return [file for each in top for file in (files_below(each) if each.is_dir() else [each])]


def _version(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size
