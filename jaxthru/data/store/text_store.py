"""The text store: the documents of one source as compressed text, for sources tokenised in training.

A folder is laid out as a token store's, but for its data files. Of each shard k and split:

    <split>-<k>.text       zlib streams ("frames"), one after the other
    <split>-<k>.frames     int64 [frames + 1], where each frame starts, and the end
    <split>-<k>.stretches  int32 [chunks, 5]: frame, first byte within it, bytes, tokens, and the bits FINAL,
                           MARKED and KEPT; of a KEPT one: its place in .kept, 0, 0, tokens, bits
    <split>-<k>.kept       the tokens of the longest chunks, see `kept_tokens.py`

A chunk is a document, or a part of a long one whose tokens are the same when it is tokenised alone: so a
row from the middle of a book costs a page or two more and not the book. How many tokens each chunk becomes
is known, so that rows are planned and packed as those of a token store are, and a run gets the same batches
from either. A document that a chat template wrote, or that says what of it is trained on, is one chunk: JSON,
with its text as the template and a transform have made it. Its `targets` are kept as in a token store.
A chunk that is long, for it cannot be cut, is kept as the tokens that are made of it anyway to count them.
"""

import itertools
import json
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxthru.data.store import token_store as store
from jaxthru.data.store.chunks import FINAL, KEPT, MARKED, Chunk, StoredText
from jaxthru.data.store.column_file import ENDING, ColumnFile, Writer, keep
from jaxthru.data.store.flat_file import REMEDY, Maps, map_array
from jaxthru.data.store.kept_tokens import KeptTokens, signed_dtype, write_kept
from jaxthru.data.store.targets import write_targets
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError

FRAME_BYTES = 1 << 16
"""Text in a frame: what is decompressed to get at one document, unless that is longer."""
DOCUMENT_TOKENS = 1 << 26
"""Tokens in a document, at most: it may be one chunk, and a token worker has memory for so many."""
KIND = "text"


def write_shard(folder: Path, number: int, splits: dict[str, list[Chunk]], record: dict) -> dict:
    """Writes one shard and returns its record, which stands for the shard once it is on disk."""
    record = {**record, "splits": {}}
    for split, parts in splits.items():
        path, (frames, index) = f"{folder}/{split}-{number:05d}", _compress(parts)
        starts = np.concatenate([[0], np.cumsum([len(frame) for frame in frames])]).astype("<i8")
        for name, content in (
            ("text", b"".join(frames)),
            ("frames", starts.tobytes()),
            ("stretches", index.tobytes()),
        ):
            write_atomically(Path(f"{path}.{name}"), content)
        ends = np.flatnonzero(index[:, 4] & FINAL)
        lengths = np.diff(np.cumsum(index[:, 3], dtype=np.int64)[ends], prepend=0)
        record["splits"][split] = {
            "documents": len(ends),
            "stretches": len(parts),
            "tokens": int(index[:, 3].sum(dtype=np.int64)),
            "frames": len(frames),
            "frames_crc32": zlib.crc32(starts.tobytes()),
            "stretches_crc32": zlib.crc32(index.tobytes()),
            **write_targets(path, lengths.tolist(), [parts[at].targets for at in ends.tolist()]),
            **write_kept(path, [part.kept for part in parts if part.kept is not None]),
        }
    write_atomically(folder / f"shard-{number:05d}.json", json.dumps(record).encode())
    return record


def _compress(parts: list[Chunk]) -> tuple[list[bytes], np.ndarray]:
    """Returns the frames, and the index of the chunks."""
    frames, waiting, size, place = [], [], 0, 0
    index = np.zeros((len(parts), 5), "<i4")
    for number, (text, tokens, final, targets, kept) in enumerate(parts):
        bits = FINAL * final + MARKED * (targets is not None)
        if kept is not None:
            index[number] = place, 0, 0, tokens, bits + KEPT
            place += tokens
            continue
        index[number] = len(frames), size, len(text), tokens, bits
        waiting.append(text)
        size += len(text)
        if size >= FRAME_BYTES:
            frames.append(zlib.compress(b"".join(waiting)))
            waiting, size = [], 0
    if waiting:
        frames.append(zlib.compress(b"".join(waiting)))
    return frames, index


class TextSplit(store.Split):
    """One split: chunks, numbered through all its shards, one after the other in one stream of tokens. Where
    they end is kept beside the store, see `column_file.py`."""

    INDEX = "stretches"

    def _open(self, about: dict, records: Sequence[dict]) -> None:
        counts = (
            [record[name] for name in ("stretches", "stretches_crc32", "frames", "frames_crc32")]
            for record in records
        )
        self._indexed = np.fromiter(itertools.chain.from_iterable(counts), np.int64).reshape(-1, 4)
        self._first = np.concatenate([[0], np.cumsum(self._indexed[:, 0])])
        self._chunk_ends: ColumnFile | None = None
        self._maps, self._verified, self._lock = Maps(), set(), threading.Lock()
        self._kept = KeptTokens(self._path, signed_dtype(about.get("vocabulary", 1)), records)

    @property
    def chunks(self) -> int:
        """How many there are."""
        return int(self._first[-1])

    def ends_by_shard(self) -> Iterator[np.ndarray]:
        """Yields where the documents of each shard end in the stream, int64 [documents]. Raises InputError
        for a damaged file."""
        for index, ends in self._indices():
            yield ends[index[:, 4] & FINAL > 0]

    def _indices(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the index of each shard and where its chunks end in the stream, int64 [chunks]."""
        before = 0
        for number, tokens in enumerate(self._counted[:, 1].tolist()):
            index = self._index(number)
            yield index, before + np.cumsum(index[:, 3], dtype=np.int64)
            before += tokens

    def chunks_at(self, position: np.ndarray) -> np.ndarray:
        """Returns int64 [n], which chunks the tokens at these places of the stream are in. Raises InputError
        for a damaged file."""
        ends, found = self._ends(), np.empty(len(position), np.int64)
        shards = np.searchsorted(np.cumsum(self._counted[:, 1]), position, side="right")
        for shard in np.unique(shards).tolist():  # in each only its own pages are touched
            chosen, first = shards == shard, int(self._first[shard])
            within = ends.read("ends", first, int(self._first[shard + 1]))
            found[chosen] = first + np.searchsorted(within, position[chosen], side="right")
        return found

    def lengths(self, chunk: np.ndarray) -> np.ndarray:
        """Returns int64 [n], how many tokens each of these chunks has. Raises InputError if damaged."""
        return self._ends_of(chunk) - self.starts(chunk)

    def starts(self, chunk: np.ndarray) -> np.ndarray:
        """Returns int64 [n], where in the stream of tokens each of these chunks starts. Raises InputError for
        a damaged file."""
        return np.where(chunk > 0, self._ends_of(np.maximum(chunk - 1, 0)), 0)

    def _ends_of(self, chunk: np.ndarray) -> np.ndarray:
        ends = self._ends()
        if ends.unverified:
            for number in chunk.tolist():
                ends.verify_range("ends", number, number + 1)
        return np.asarray(ends.views()["ends"])[chunk]

    def keep_index(self) -> None:
        self._ends()

    def _ends(self) -> ColumnFile:
        def make(writer: Writer) -> dict:
            writer.add("ends", "<i8", self.chunks)
            for _, ends in self._indices():
                writer.write("ends", ends)
            return {}

        with self._lock:  # several threads would each make it
            if self._chunk_ends is None:
                self._chunk_ends = keep(f"{self._path}.chunk_ends{ENDING}", self.identity, make)
        return self._chunk_ends

    def texts(self, chunk: np.ndarray) -> list[tuple[StoredText, bool, bool]]:
        """Returns the texts of chunks (int64 [n]) that are not kept as tokens, and whether each begins and
        ends its document.

        Raises InputError that names a damaged frame.
        """
        texts, opened = [], {}
        for number in chunk.tolist():
            shard, at = self._place(number)
            index = self._index(shard)
            frame, start, size, _, bits = index[at].tolist()
            begins = at == 0 or bool(index[at - 1, 4] & FINAL)  # a document lies in one shard
            if (shard, frame) not in opened:
                opened[shard, frame] = self._frame(shard, frame)
            text = opened[shard, frame][start : start + size].decode()
            stored = StoredText(*json.loads(text)) if bits & MARKED else StoredText(text)
            texts.append((stored, begins, bool(bits & FINAL)))
        return texts

    def are_kept(self, chunk: np.ndarray) -> np.ndarray:
        """Returns bool [n], which of these chunks are kept as tokens."""
        if not self._kept.tokens:
            return np.zeros(len(chunk), bool)
        shards, found = np.searchsorted(self._first, chunk, side="right") - 1, np.empty(len(chunk), bool)
        for shard in np.unique(shards).tolist():
            chosen = shards == shard
            found[chosen] = self._index(shard)[chunk[chosen] - self._first[shard], 4] & KEPT > 0
        return found

    def read_kept(self, chunk: int, start: int, stop: int) -> np.ndarray:
        """Returns int32, the tokens of a kept chunk from its `start`-th to before `stop`, which is above it;
        ~token where it is no target that is trained on. Raises InputError that names a damaged block."""
        shard, at = self._place(chunk)
        place = int(self._index(shard)[at, 0])
        return self._kept.read(shard, place + start, place + stop)

    def verify(self) -> None:
        """Reads everything. Raises InputError that names the first damaged frame, block or file."""
        self._maps.clear()
        self._verified.clear()
        self._kept.verify()
        for shard, frames in enumerate(self._indexed[:, 2].tolist()):
            self._index(shard)
            for frame in range(frames):
                self._frame(shard, frame)
        if self.targets:
            assert self.targets.count >= 0

    def _index(self, shard: int) -> np.ndarray:
        chunks, crc32, *_ = self._indexed[shard].tolist()
        return self._mapped("stretches", shard, "<i4", 5 * chunks, crc32).reshape(-1, 5)

    def _place(self, chunk: int) -> tuple[int, int]:
        """Returns the shard of a chunk, and its number there."""
        shard = int(np.searchsorted(self._first, chunk, side="right")) - 1
        return shard, chunk - int(self._first[shard])

    def _frame(self, shard: int, frame: int) -> bytes:
        _, _, count, crc32 = self._indexed[shard].tolist()
        frames = self._mapped("frames", shard, "<i8", count + 1, crc32)
        first, end = frames[frame : frame + 2].tolist()
        text = self._mapped("text", shard, "u1", int(frames[-1]))
        try:
            return zlib.decompress(text[first:end])  # zlib compares its own checksum
        except zlib.error as error:
            where = f"{self._path}-{shard:05d}.text: frame {frame} (bytes {first} to {end - 1})"
            raise InputError(f"{where} is damaged; {REMEDY}") from error

    def _mapped(self, name: str, shard: int, dtype: str, count: int, crc32: int | None = None) -> np.ndarray:
        """Returns a file of a shard, whose checksum is compared when it is first mapped."""
        key = name, shard
        found = self._maps.get(key)
        if found is None:
            path = f"{self._path}-{shard:05d}.{name}"
            found = map_array(path, dtype, count, None if key in self._verified else crc32)
            self._verified.add(key)
            self._maps.keep(key, found)
        return found


class TextStore(store.TokenStore):
    """An opened store of text."""

    KIND, SPLIT = KIND, TextSplit
