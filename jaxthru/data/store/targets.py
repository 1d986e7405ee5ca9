"""What of each document is trained on, in both kinds of store: how many tokens, and where the first stands.

A row decides by these alone which documents it takes, and so needs neither tokens nor masks.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxthru.data.store.flat_file import map_array
from jaxthru.runtime.atomic import write_atomically

NONE = -1
"""In place of the checksum of a shard's column: it has none, as its documents are trained on in full."""


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


class SplitTargets:
    """The targets of a split, read anew each time that they are asked for."""

    def __init__(self, parts: Callable[[], Iterable[np.ndarray]]):
        """parts: of each shard, int32 [documents, 2], see `Targets`."""
        self._parts = parts

    @property
    def count(self) -> int:
        """Targets that are trained on in all. Raises InputError for a damaged column."""
        return sum(int(part[:, 0].sum(dtype=np.int64)) for part in self._parts())

    @property
    def first(self) -> np.ndarray:
        """int32 [documents], see `Targets`. Raises InputError for a damaged column."""
        return np.concatenate([np.zeros(0, np.int32), *(part[:, 1] for part in self._parts())])


def write_targets(path: str, lengths: Sequence[int], targets: Sequence[Targets | None]) -> dict:
    """Writes the column of a shard, if a document has targets, and returns what its record has of it.

    path: of the shard's files, without their endings. lengths: int [documents], in tokens."""
    if all(each is None for each in targets):
        return {}
    pairs = [each or Targets.of(tokens, None) for tokens, each in zip(lengths, targets, strict=True)]
    content = np.array(pairs, "<i4").tobytes()
    write_atomically(Path(f"{path}.targets"), content)
    return {"targets_crc32": zlib.crc32(content)}


def split_targets(
    path: str, documents: np.ndarray, crc32: np.ndarray, ends: Callable[[], Iterable[np.ndarray]]
) -> SplitTargets | None:
    """Returns the targets of a split, None if no document of it says what is trained on.

    path: of its files, without the number of their shard. documents, crc32: int64 [shards], how many each
    has, and the checksum of its column, or NONE. ends: of each shard's documents, int64 [documents].
    """
    if (crc32 == NONE).all():
        return None

    def parts() -> Iterator[np.ndarray]:
        before = 0
        shards = zip(documents.tolist(), crc32.tolist(), ends(), strict=True)
        for number, (count, known, part) in enumerate(shards):
            if known != NONE:
                yield map_array(f"{path}-{number:05d}.targets", "<i4", 2 * count, known).reshape(-1, 2)
            else:  # of text, which is trained on in full
                lengths = np.diff(part, prepend=before)
                yield np.stack([lengths - 1, np.ones_like(lengths)], axis=1).astype(np.int32)
            before = int(part[-1]) if count else before

    return SplitTargets(parts)
