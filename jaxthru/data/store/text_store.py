"""The text store: the documents of one source as compressed text, for sources tokenised in training.

A folder is laid out as a token store's, but for its data files. Of each shard k and split:

    <split>-<k>.text       zlib streams ("frames"), one after the other
    <split>-<k>.frames     int64 [frames + 1], where each frame starts, and the end
    <split>-<k>.stretches  int32 [chunks, 5]: frame, first byte within it, bytes, tokens, FINAL and MARKED

A chunk is a document, or a part of a long one whose tokens are the same when it is tokenised alone: so a
row from the middle of a book costs a page or two more and not the book. How many tokens each chunk becomes
is known, so that rows are planned and packed as those of a token store are, and a run gets the same batches
from either. A document that a chat template wrote, or that says what of it is trained on, is one chunk: JSON,
with its text as the template and a transform have made it. Its `targets` are kept as in a token store.
"""

import itertools
import json
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxthru.data.store import token_store as store
from jaxthru.data.store.column_file import ENDING, ColumnFile, Writer, keep
from jaxthru.data.store.flat_file import REMEDY, Maps, map_array
from jaxthru.data.store.marked import Marked, Spans
from jaxthru.data.store.targets import Targets, write_targets
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError

FRAME_BYTES = 1 << 16
"""Text in a frame: what is decompressed to get at one document, unless that is longer."""
CHUNK_BYTES = 1 << 12
"""Text in a chunk of a longer document, to the next line end. Half of that is tokenised for nothing at each
end of a row."""
LONG_BYTES = 1 << 16
"""A longer chunk is worth a word: each row from it has tens of milliseconds of a token worker's work."""
DOCUMENT_TOKENS = 1 << 26
"""Tokens in a document, at most: it may be one chunk, and a token worker has memory for so many."""
KIND = "text"
FINAL, MARKED = 1, 2
"""Bits of a chunk: it ends its document; its text is JSON, the values of a `StoredText`."""


class Chunk(NamedTuple):
    """text: UTF-8. tokens: how many. final: whether it ends its document, with one token for that end; the
    next one begins another. targets: what of its document is trained on, of one that is a `StoredText`; None
    for text."""

    text: bytes
    tokens: int
    final: bool
    targets: Targets | None = None


class StoredText(NamedTuple):
    """The text of a chunk, and, of a document that is one, what `record.Document` says of it."""

    text: str
    trained: Spans | None = None
    literal: Spans = ()
    rendered: bool = False

    @classmethod
    def of(cls, document: Marked) -> "StoredText":
        return cls(document.text, document.trained, document.literal, document.rendered)

    @property
    def marked(self) -> bool:
        """Whether it is more than text."""
        return self.rendered or self.trained is not None

    def chunk(self, tokens: int, targets: Targets) -> Chunk:
        """Returns a whole document as a chunk of so many tokens."""
        return Chunk(json.dumps(self, ensure_ascii=False).encode(), tokens, True, targets)


def chunks(text: str, ids: np.ndarray, tokenizer: Tokenizer) -> list[Chunk]:
    """Returns a document in chunks of about CHUNK_BYTES, cut at line ends.

    ids: its tokens. It stays whole where the parts' tokens would not be the whole's, as when a merge of the
    tokenizer reaches over a line end.
    """
    parts = _paragraphs(text)
    encoded = tokenizer.encode(parts) if len(parts) > 1 else [ids]
    last = len(parts) - 1
    encoded = [tokenizer.part(tokens, at == 0, at == last) for at, tokens in enumerate(encoded)]
    if not np.array_equal(np.concatenate(encoded), ids):
        parts, encoded = [text], [ids]
    last = len(parts) - 1
    pairs = zip(parts, encoded, strict=True)
    return [Chunk(part.encode(), len(tokens), at == last) for at, (part, tokens) in enumerate(pairs)]


def _paragraphs(text: str) -> list[str]:
    """Cuts a text behind line ends, into parts of at least CHUNK_BYTES characters."""
    parts, begin = [], 0
    while len(text) - begin > 2 * CHUNK_BYTES:
        end = text.find("\n", begin + CHUNK_BYTES)
        # Where whitespace follows, tokenizers may join it to the line end.
        while end >= 0 and end + 1 < len(text) and text[end + 1].isspace():
            end = text.find("\n", end + 1)
        if end < 0 or end + 1 >= len(text):
            break
        parts.append(text[begin : end + 1])
        begin = end + 1
    return [*parts, text[begin:]]


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
            "longest": int(index[:, 2].max(initial=0)),
            "tokens": int(index[:, 3].sum(dtype=np.int64)),
            "frames": len(frames),
            "frames_crc32": zlib.crc32(starts.tobytes()),
            "stretches_crc32": zlib.crc32(index.tobytes()),
            **write_targets(path, lengths.tolist(), [parts[at].targets for at in ends.tolist()]),
        }
    write_atomically(folder / f"shard-{number:05d}.json", json.dumps(record).encode())
    return record


def _compress(parts: list[Chunk]) -> tuple[list[bytes], np.ndarray]:
    """Returns the frames, and the index of the chunks."""
    frames, waiting, size = [], [], 0
    index = np.zeros((len(parts), 5), "<i4")
    for number, (text, tokens, final, targets) in enumerate(parts):
        bits = FINAL * final + MARKED * (targets is not None)
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
        return self._ends().at("ends", chunk) - self.starts(chunk)

    def starts(self, chunk: np.ndarray) -> np.ndarray:
        """Returns int64 [n], where in the stream of tokens each of these chunks starts. Raises InputError for
        a damaged file."""
        return np.where(chunk > 0, self._ends().at("ends", np.maximum(chunk - 1, 0)), 0)

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
        """Returns the texts of chunks (int64 [n]), and whether each begins and ends its document.

        Raises InputError that names a damaged frame.
        """
        texts, opened = [], {}
        for number in chunk.tolist():
            shard = int(np.searchsorted(self._first, number, side="right")) - 1
            index, at = self._index(shard), number - int(self._first[shard])
            frame, start, size, _, bits = index[at].tolist()
            begins = at == 0 or bool(index[at - 1, 4] & FINAL)  # a document lies in one shard
            if (shard, frame) not in opened:
                opened[shard, frame] = self._frame(shard, frame)
            text = opened[shard, frame][start : start + size].decode()
            stored = StoredText(*json.loads(text)) if bits & MARKED else StoredText(text)
            texts.append((stored, begins, bool(bits & FINAL)))
        return texts

    def verify(self) -> None:
        """Reads everything. Raises InputError that names the first damaged frame or file."""
        self._maps.clear()
        self._verified.clear()
        for shard, frames in enumerate(self._indexed[:, 2].tolist()):
            self._index(shard)
            for frame in range(frames):
                self._frame(shard, frame)
        if self.targets:
            assert self.targets.count >= 0

    def _index(self, shard: int) -> np.ndarray:
        chunks, crc32, *_ = self._indexed[shard].tolist()
        return self._mapped("stretches", shard, "<i4", 5 * chunks, crc32).reshape(-1, 5)

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
