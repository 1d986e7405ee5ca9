"""The files of a source, and their content hashes."""

import csv
import dataclasses
import errno
import fnmatch
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import stat
import sysconfig
from collections.abc import Set
from pathlib import Path

from jaxthru.data.sources.recipes import Recipe
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError, require

NO_FILE = errno.ENOENT, errno.ENOTDIR, errno.ELOOP
SITE_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclasses.dataclass(frozen=True)
class File:
    """digest: SHA-256 of the content, in hex. It orders the files."""

    path: Path
    size: int
    digest: str


class HashCache:
    """Content hashes remembered by (path, size, time of change), so that a second start reads no text."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.known: dict[str, list] = json.loads(path.read_text())
        except (OSError, ValueError):
            self.known = {}
        self.changed = False

    def file(self, path: str) -> File | None:
        """Returns the file of a path with its hash, which is read from the disk only when the file has
        changed; None where there is no file. Raises OSError for one that cannot be read."""
        try:
            status = os.stat(path)  # noqa: PTH116 (of thousands at each start: a Path takes longer)
        except OSError as error:
            if error.errno in NO_FILE:
                return None
            raise
        if not stat.S_ISREG(status.st_mode):
            return None
        known = self.known.get(path)
        if known is None or known[:2] != [status.st_size, status.st_mtime_ns]:
            with Path(path).open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            known = self.known[path] = [status.st_size, status.st_mtime_ns, digest]
            self.changed = True
        return File(Path(path), status.st_size, known[2])

    def save(self) -> None:
        """Writes what was learnt. Two writers may lose each other's news, never more."""
        if self.changed:
            write_atomically(self.path, json.dumps(self.known).encode())
            self.changed = False


def collect(source: str, recipe: Recipe, cache: HashCache, exclude: Set[str]) -> list[File]:
    """Returns the files of a source, each content once, ordered by content hash.

    The order depends on the contents alone: a corpus that moves to another folder or machine stays the same.
    exclude: hashes of files that other sources have taken. Raises InputError when there are none.
    """
    paths: dict[str, str] = {}  # path -> what `exclude` sees of it: not the folders above the installation
    if recipe.stdlib:
        paths |= _stdlib()
    for package in recipe.packages:
        paths |= _package(package)
    for pattern in recipe.paths:
        paths |= {path: path for path in glob.glob(pattern, recursive=True)}  # noqa: PTH207 (a whole path)
    chosen, taken = {}, 0
    for name in sorted(paths):
        if recipe.suffixes and not name.endswith(recipe.suffixes):
            continue
        if any(fnmatch.fnmatch(paths[name], pattern) for pattern in recipe.exclude):
            continue
        try:
            file = cache.file(name)
        except OSError as error:
            raise InputError(f"source {source}: {name}: cannot be read ({error.strerror})") from error
        if file is None:
            continue
        taken += file.digest in exclude
        if file.digest not in exclude and (not recipe.max_file_bytes or file.size <= recipe.max_file_bytes):
            chosen.setdefault(file.digest, file)
    require(bool(chosen), lambda: f"source {source}: {_why_none(recipe, paths, taken)}")
    return [chosen[digest] for digest in sorted(chosen)]


def _why_none(recipe: Recipe, paths: dict[str, str], taken: int) -> str:
    """Returns why a source has no files. paths: that its globs match; taken: of these, by other sources."""
    remote = next((path for path in recipe.paths if re.search(r"\w+:/+", path)), None)
    if remote:
        what = re.search(r"\w+:/.*", remote)[0].replace(":/", "://", 1)
        return f"no files found: {what} is not on this machine; copy or mount it, and give the path"
    if taken:
        return f"all its {taken} files have been taken by sources of the same format before it: take one out"
    if folders := [path for path in paths if Path(path).is_dir()]:
        return f"no files found: {folders[0]} is a folder; give a glob, {folders[0]}/**"
    missing = [name for name in recipe.packages if not _package(name)]
    if missing and not paths:
        return f"needs a package that is not installed: python -m pip install {' '.join(missing)}"
    left = f": {len(paths)} match; suffixes, exclude and max_file_bytes leave none" if paths else ""
    return f"no files found in {', '.join(recipe.paths) or 'the installed packages'}{left}"


@functools.cache
def _stdlib() -> dict[str, str]:
    """Returns {path: its part below the standard library, "/" first}."""
    paths, root = {}, sysconfig.get_path("stdlib")
    for folder, folders, names in os.walk(root):
        folders[:] = [item for item in folders if item not in SITE_FOLDERS]
        paths |= {f"{folder}/{name}": f"{folder.removeprefix(root)}/{name}" for name in names}
    return paths


@functools.cache
def _package(name: str) -> dict[str, str]:
    """Returns {path: its part below the folder on sys.path} of all files that an installed distribution
    lists, be they there or not."""
    try:
        distribution = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):  # that is no name
        return {}
    if record := distribution.read_text("RECORD"):  # `files` would look for each of them
        names = (row[0] for row in csv.reader(record.splitlines()) if row)
        root = str(distribution.locate_file(""))
        return {os.path.join(root, name): f"/{name}" for name in names if not name.endswith(".pyc")}  # noqa: PTH118
    if distribution.files is not None:
        return {str(file.locate()): f"/{file}" for file in distribution.files if file.suffix != ".pyc"}
    # Some system packagers leave the list out: then take the folder of the module of the same name.
    specification = importlib.util.find_spec(name.replace("-", "_"))
    folders = specification.submodule_search_locations or () if specification else ()
    roots = [Path(folder) for folder in folders]
    return {str(path): f"/{path.relative_to(root.parent)}" for root in roots for path in root.rglob("*")}
