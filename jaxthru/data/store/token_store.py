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
import json
import resource
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxthru.data.store.flat_file import Column, checksums, map_array
from jaxthru.data.store.targets import Targets, read_targets, write_targets
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
        records.append(json.loads(path.read_bytes()))
    return records


def write_manifest(folder: Path, manifest: dict) -> None:
    """Makes the store one that opens. manifest: `dtype`, `shards`, and what describes the source."""
    write_atomically(folder / "manifest.json", json.dumps({"version": VERSION, **manifest}).encode())


def read_manifest(folder: Path) -> dict:
    """Returns the manifest of a store. Raises InputError if there is none that this version reads."""
    try:
        with open(f"{folder}/manifest.json", "rb") as file:  # noqa: PTH123 (see `Split`)
            manifest = json.loads(file.read())
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: not a token store ({error})") from error
    version = manifest.get("version")
    require(version == VERSION, f"{folder}: token store of version {version}, this is version {VERSION}")
    return manifest


class Split:
    """One split of a store: a stream of tokens, numbered through all its shards.

    ends: int64 [documents], where each document ends in the stream; it starts where the last one ended.
    targets: what of each document is trained on, None if all documents are in full.
    """

    def __init__(self, folder: Path, split: str, manifest: dict):
        self._tokens, self._trained = Column(), Column()
        self.masked = any("trained_crc32" in shard["splits"][split] for shard in manifest["shards"])
        starts, ends = [0], [np.zeros(0, np.int64)]
        for number, shard in enumerate(manifest["shards"]):
            # Paths as text: of thousands of sources most of the time would go into pathlib.
            record, path = shard["splits"][split], f"{folder}/{split}-{number:05d}"
            count, crc32 = record["documents"] + 1, record["offsets_crc32"]
            offsets = map_array(f"{path}.offsets", "<i8", count, crc32)
            self._tokens.add(f"{path}.tokens", manifest["dtype"], record["tokens"], record["tokens_crc32"])
            if self.masked:
                self._trained.add(f"{path}.trained", "u1", record["tokens"], record.get("trained_crc32"))
            ends.append(offsets[1:] + starts[-1])
            starts.append(starts[-1] + record["tokens"])
        self.ends = np.concatenate(ends)
        self.tokens: int = starts[-1]
        self.targets = read_targets(folder, split, manifest, self.ends)

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
        """Compares every block with its checksum; raises InputError that names the first that differs."""
        for column in (self._tokens, self._trained):
            column.verify()


class TokenStore:
    """An opened store. manifest: what was written. train, held_out: its splits."""

    KIND, SPLIT = None, Split

    def __init__(self, folder: Path):
        self.manifest = read_manifest(folder)
        require(self.manifest.get("kind") == self.KIND, f"{folder}: not a {self.KIND or 'token'} store")
        self.folder = folder
        self.train, self.held_out = (self.SPLIT(folder, split, self.manifest) for split in SPLITS)

    def verify(self) -> None:
        """Reads everything. Raises InputError that names the first damaged block."""
        for split in (self.train, self.held_out):
            split.verify()


def let_files_open() -> None:
    """Raises the limit of open files: a memory map keeps its file open, and the usual 1,024 would be some
    hundreds of shards. Processes that are started from here on have the same."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAPS if most == resource.RLIM_INFINITY else min(MAPS, most)
    if resource.RLIM_INFINITY != now < wanted:
        with contextlib.suppress(ValueError, OSError):  # a system may have less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
