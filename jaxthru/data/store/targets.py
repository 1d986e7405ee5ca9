"""What of each document is trained on, in both kinds of store: how many tokens, and where the first stands.

A row decides by these alone which documents it takes, and so needs neither tokens nor masks.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxthru.data.store.flat_file import map_array
from jaxthru.runtime.atomic import write_atomically


class Targets(NamedTuple):
    """count: tokens of a document that are targets and trained on. first: the place of the first of them, the
    document's length if there is none. Its first token is no target: nothing comes before it."""

    count: int
    first: int

    @classmethod
    def of(cls, tokens: int, trained: np.ndarray | None) -> "Targets":
        """trained: bool [tokens], None for all of them."""
        if trained is None:
            return cls(tokens - 1, 1)
        places = np.flatnonzero(trained[1:]) + 1
        return cls(len(places), int(places[0]) if len(places) else tokens)


class SplitTargets(NamedTuple):
    """count: targets that are trained on in all. first: int32 [documents], see `Targets`."""

    count: int
    first: np.ndarray


def write_targets(path: str, lengths: Sequence[int], targets: Sequence[Targets | None]) -> dict:
    """Writes the column of a shard, if a document has targets, and returns what its record has of it.

    path: of the shard's files, without their endings. lengths: int [documents], in tokens."""
    if all(each is None for each in targets):
        return {}
    pairs = [each or Targets.of(tokens, None) for tokens, each in zip(lengths, targets, strict=True)]
    content = np.array(pairs, "<i4").tobytes()
    write_atomically(Path(f"{path}.targets"), content)
    return {"targets_crc32": zlib.crc32(content)}


def read_targets(folder: Path, split: str, manifest: dict, ends: np.ndarray) -> SplitTargets | None:
    """Returns the targets of a split, None if no document of it says what is trained on.

    ends: int64 [documents], where each ends. Raises InputError for a damaged column."""
    records = [shard["splits"][split] for shard in manifest["shards"]]
    if not any("targets_crc32" in record for record in records):
        return None
    lengths = np.diff(ends, prepend=0)
    targets = np.stack([lengths - 1, np.ones_like(lengths)], axis=1).astype(np.int32)
    begin = 0
    for number, record in enumerate(records):
        end = begin + record["documents"]
        if "targets_crc32" in record:
            path, crc32 = f"{folder}/{split}-{number:05d}.targets", record["targets_crc32"]
            targets[begin:end] = map_array(path, "<i4", 2 * record["documents"], crc32).reshape(-1, 2)
        begin = end
    return SplitTargets(int(targets[:, 0].sum(dtype=np.int64)), targets[:, 1])
