"""Kept tokens: of chunks of a text store that are too long to be tokenised anew for every row from them.

A shard that has such chunks has, of each split, the tokens of all of them in `<split>-<k>.kept`, one chunk
after the other: int16, or int32 of a tokenizer that needs it; ~token where it is no target that is trained
on. Their text is not kept: nothing would read it.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxthru.data.store.flat_file import Column, checksums
from jaxthru.runtime.atomic import write_atomically

KEEP_TOKENS = 1 << 13
"""Chunks of more tokens are kept as tokens. A token worker makes some 0.8 million tokens a second: so no row
costs it more than ten milliseconds for a chunk of which it takes next to nothing, where one from pages of
4 KiB costs it three. As tokens a chunk takes about as much of the disk again as its text, compressed."""


def signed_dtype(vocabulary: int) -> str:
    """Returns the dtype of kept tokens. vocabulary: highest id + 1."""
    return "<i2" if vocabulary <= 2**15 else "<i4"


def write_kept(path: str, chunks: Sequence[np.ndarray]) -> dict:
    """Writes the kept tokens of a shard and returns what its record says of them; nothing of none.

    path: of the shard's files, without their endings. chunks: [tokens] each, in their dtype."""
    if not chunks:
        return {}
    tokens = np.concatenate(chunks)
    content = tokens.tobytes()
    write_atomically(Path(f"{path}.kept"), content)
    size = {"chunks": len(chunks), "tokens": len(tokens), "bytes": len(content)}
    return {"kept": {**size, "crc32": checksums(content)}}


class KeptTokens:
    """Those of a split, in all its shards. tokens: how many."""

    def __init__(self, path: str, dtype: str, records: Sequence[dict]):
        """path: of the split's files, without the number of their shard. records: of its shards."""
        kept = [record.get("kept", {"tokens": 0, "crc32": None}) for record in records]
        counts = np.array([each["tokens"] for each in kept], np.int64)
        self._first = np.cumsum(counts) - counts
        self._column = Column(path, "kept", dtype, counts, [each["crc32"] for each in kept])
        self.tokens = int(counts.sum())

    def read(self, shard: int, start: int, stop: int) -> np.ndarray:
        """Returns int32, the tokens of a shard from `start` to before `stop`, which is above it.

        Each block's checksum is compared when it is first read; raises InputError when it differs, and for a
        file that is not there or of another size."""
        first = int(self._first[shard])
        return self._column.read(first + start, first + stop).astype(np.int32)

    def verify(self) -> None:
        """Compares every block with its checksum; raises InputError that names the first that differs."""
        self._column.verify()
