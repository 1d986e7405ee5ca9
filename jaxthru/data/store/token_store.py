"""The token store: the tokens of one source on disk, flat and memory-mapped.

A folder `<source>-<key>/` holds, for each shard k and split (train, held_out):

    <split>-<k>.tokens    little-endian uint16 or uint32 ids, document after document
    <split>-<k>.offsets   int64 [documents + 1], where each document starts, and the end
    <split>-<k>.trained   uint8 for each token, 1 if it is a target that is trained on, else 0
    <split>-<k>.targets   int32 [documents, 2]: how many of its tokens are trained on, and the first's place
    shard-<k>.json        counts, checksums of each MiB, damaged records, where reading goes on
    manifest.json         written last: only a folder that has one can be opened

The columns `trained` and `targets` are there only where a document says what of it is trained on: the shards
of others, which are trained on in full, have neither.

Every file is written under a name of its own and then renamed, and every file's content is decided by the
store's key. So a kill leaves whole shards, which the next preparation keeps, and two preparations at once
write the same bytes: whichever is last changes nothing.
"""

import contextlib
import hashlib
import itertools
import json
import resource
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxthru.data.store.column_file import verify_columns
from jaxthru.data.store.flat_file import Column, checksums, map_array
from jaxthru.data.store.targets import NONE, Targets, split_targets, write_targets
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError, require

VERSION = 1
SPLITS = ("train", "held_out")
MAPS = 65_530
"""Memory maps that a process may have, if Linux's own limit of them is as it comes."""


class Entry(NamedTuple):
    """A document. ids: its tokens. targets: what of it is trained on, None for one that may be cut anywhere
    and is trained on in full. trained: bool [tokens], each of them that is; None for all."""

    ids: np.ndarray
    targets: Targets | None = None
    trained: np.ndarray | None = None


def write_shard(folder: Path, number: int, splits: dict[str, list[Entry]], record: dict) -> dict:
    """Writes one shard and returns its record, which stands for the shard once it is on disk.

    splits: the documents of each split. record: what else to remember, as JSON values.
    """
    record = {**record, "splits": {}}
    for split, documents in splits.items():
        path, lengths = f"{folder}/{split}-{number:05d}", [len(document.ids) for document in documents]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype("<i8").tobytes()
        tokens = b"".join(document.ids.tobytes() for document in documents)
        for name, content in (("tokens", tokens), ("offsets", offsets)):
            write_atomically(Path(f"{path}.{name}"), content)
        trained = {}
        if any(document.trained is not None for document in documents):
            masks = (
                np.ones(len(each.ids), bool) if each.trained is None else each.trained for each in documents
            )
            content = b"".join(mask.astype("u1").tobytes() for mask in masks)
            write_atomically(Path(f"{path}.trained"), content)
            trained = {"trained_crc32": checksums(content)}
        record["splits"][split] = {
            "documents": len(documents),
            "tokens": sum(lengths),
            "tokens_crc32": checksums(tokens),
            "offsets_crc32": zlib.crc32(offsets),
            **trained,
            **write_targets(path, lengths, [document.targets for document in documents]),
        }
    write_atomically(folder / f"shard-{number:05d}.json", json.dumps(record).encode())
    return record


def finished_shards(folder: Path) -> list[dict]:
    """Returns the records of the shards that are whole, up to the first that is not."""
    records = []
    while (path := folder / f"shard-{len(records):05d}.json").is_file():
        try:
            records.append(json.loads(path.read_bytes()))
        except ValueError:  # damaged: that shard is made again
            break
    return records


def write_manifest(folder: Path, manifest: dict) -> None:
    """Makes the store one that opens. manifest: `dtype`, `shards`, and what describes the source."""
    write_atomically(folder / "manifest.json", json.dumps({"version": VERSION, **manifest}).encode())


def read_manifest(folder: Path, each: Callable[[dict], Any] | None = None) -> dict:
    """Returns the manifest of a store. each: what becomes of every object in it, the inner ones first. Raises
    InputError if there is none that this version reads."""
    try:
        with open(f"{folder}/manifest.json", encoding="utf-8") as file:  # noqa: PTH123 (see `Split`)
            manifest = json.loads(file.read(), object_hook=each)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: not a token store ({error})") from error
    version = manifest.get("version")
    require(version == VERSION, f"{folder}: token store of version {version}, this is version {VERSION}")
    return manifest


class Split:
    """One split of a store: a stream of tokens, numbered through all its shards. Opened, it holds what its
    shards count and their checksums; what there is of each document is read when it is asked for.

    tokens, documents: how many. targets: what of each document is trained on, None if all documents are in
    full. identity: says which documents these are.
    """

    INDEX = "offsets"
    """The file of a shard that says where its documents end."""

    def __init__(self, folder: Path, split: str, about: dict, records: Sequence[dict]):
        """about: the manifest of the store. records: of the split's shards, see `write_shard`."""
        self.folder, self.split = folder, split
        # Paths as text: of thousands of sources most of the time would go into pathlib.
        self._path = f"{folder}/{split}"
        counts = (self._counts(record) for record in records)
        self._counted = np.fromiter(itertools.chain.from_iterable(counts), np.int64).reshape(-1, 4)
        self.documents, self.tokens = self._counted[:, :2].sum(axis=0).tolist()
        self.identity = hashlib.blake2b(self._counted.tobytes(), digest_size=16).hexdigest()
        self.targets = split_targets(self._path, *self._counted[:, [0, 3]].T, self.ends_by_shard)
        self._open(about, records)

    def _counts(self, record: dict) -> tuple[int, int, int, int]:
        crc32 = record[f"{self.INDEX}_crc32"], record.get("targets_crc32", NONE)
        return record["documents"], record["tokens"], *crc32

    def _open(self, about: dict, records: Sequence[dict]) -> None:
        tokens = self._counted[:, 1]
        known = [record["tokens_crc32"] for record in records]
        self._tokens = Column(self._path, "tokens", about["dtype"], tokens, known)
        known = [record.get("trained_crc32") for record in records]
        self.masked = any(each is not None for each in known)
        self._trained = Column(self._path, "trained", "u1", tokens, known) if self.masked else None

    def ends_by_shard(self) -> Iterator[np.ndarray]:
        """Yields where the documents of each shard end in the stream, int64 [documents]. Raises InputError
        for a damaged file."""
        before = 0
        for number, (documents, tokens, crc32, _) in enumerate(self._counted.tolist()):
            offsets = map_array(f"{self._path}-{number:05d}.offsets", "<i8", documents + 1, crc32)
            yield offsets[1:] + before
            before += tokens

    @property
    def ends(self) -> np.ndarray:
        """int64 [documents], where each document ends in the stream; it starts where the last one ended. Read
        anew each time. Raises InputError for a damaged file."""
        return np.concatenate([np.zeros(0, np.int64), *self.ends_by_shard()])

    def keep_index(self) -> None:
        """Makes what is kept beside the store to find tokens by, if there is such and it is missing. Raises
        InputError for a damaged file."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the tokens from `start` to before `stop`, which is above it: a view of the memory map where
        one shard holds them all.

        Each block's checksum is compared when it is first read; raises InputError when it differs.
        """
        return self._tokens.read(start, stop)

    def read_trained(self, start: int, stop: int) -> np.ndarray | None:
        """Returns uint8, which of the tokens `read` returns are targets that are trained on; None for all of
        them. Raises InputError as that does."""
        return self._trained.read(start, stop) if self.masked else None

    def verify(self) -> None:
        """Compares everything with its checksum; raises InputError that names the first that differs."""
        self._tokens.verify()
        if self.masked:
            self._trained.verify()
        for _ in self.ends_by_shard():
            pass
        if self.targets:
            assert self.targets.count >= 0


class TokenStore:
    """An opened store. about: its manifest, but for its shards. train, held_out: its splits."""

    KIND, SPLIT = None, Split

    def __init__(self, folder: Path):
        self.folder, self.about = folder, read_manifest(folder, _compact)
        require(self.about.get("kind") == self.KIND, f"{folder}: not a {self.KIND or 'token'} store")
        shards = self.about.pop("shards")
        self.train, self.held_out = (
            self.SPLIT(folder, split, self.about, [shard[split] for shard in shards]) for split in SPLITS
        )

    @property
    def manifest(self) -> dict:
        """What was written, read anew: of each shard, too. Raises InputError."""
        return read_manifest(self.folder)

    def verify(self) -> None:
        """Reads everything, and what is kept beside it. Raises InputError that names what is damaged."""
        for split in (self.train, self.held_out):
            split.verify()
        verify_columns(self.folder)


def _compact(record: dict) -> Any:
    """Returns an object of a manifest in the memory that it needs: of a shard its splits alone."""
    if "splits" in record:
        return record["splits"]
    for name in ("tokens_crc32", "trained_crc32"):
        if name in record:
            record[name] = np.array(record[name], np.uint32)
    return record


def let_files_open() -> None:
    """Raises the limit of open files: a memory map keeps its file open, and the usual 1,024 would be some
    hundreds of shards. Processes that are started from here on have the same."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAPS if most == resource.RLIM_INFINITY else min(MAPS, most)
    if resource.RLIM_INFINITY != now < wanted:
        with contextlib.suppress(ValueError, OSError):  # a system may have less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
