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

import json
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxthru.data.store import token_store as store
from jaxthru.data.store.flat_file import REMEDY, map_array
from jaxthru.data.store.kept_tokens import KEEP_TOKENS, KeptTokens, signed_dtype, write_kept
from jaxthru.data.store.marked import Encoded, Marked, Spans
from jaxthru.data.store.targets import Targets, read_targets, write_targets
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError

FRAME_BYTES = 1 << 16
"""Text in a frame: what is decompressed to get at one document, unless that is longer."""
CHUNK_BYTES = 1 << 12
"""Text in a chunk of a longer document, to the next line end. Half of that is tokenised for nothing at each
end of a row."""
DOCUMENT_TOKENS = 1 << 26
"""Tokens in a document, at most: it may be one chunk, and a token worker has memory for so many."""
KIND = "text"
FINAL, MARKED, KEPT = 1, 2, 4
"""Bits of a chunk: it ends its document; its text is JSON, the values of a `StoredText`; it is kept as
tokens."""


class Chunk(NamedTuple):
    """text: UTF-8. tokens: how many. final: whether it ends its document, with one token for that end; the
    next one begins another. targets: what of its document is trained on, of one that is a `StoredText`; None
    for text. kept: [tokens], in `signed_dtype`, what takes the place of the text of a long one: ~token where
    it is no target that is trained on."""

    text: bytes
    tokens: int
    final: bool
    targets: Targets | None = None
    kept: np.ndarray | None = None

    @classmethod
    def of(
        cls, text: str, encoded: Encoded, vocabulary: int, final: bool = True, targets: Targets | None = None
    ) -> "Chunk":
        """Returns a chunk of these tokens, of so large a vocabulary. They are kept if they are many."""
        ids, trained = encoded
        if len(ids) <= KEEP_TOKENS:
            return cls(text.encode(), len(ids), final, targets)
        return cls(b"", len(ids), final, targets, signed(ids, trained).astype(signed_dtype(vocabulary)))


def signed(ids: np.ndarray, trained: np.ndarray | None) -> np.ndarray:
    """Returns int32 [tokens], ~token where it is no target that is trained on. trained: bool [tokens], None
    for all of them."""
    ids = ids.astype(np.int32)
    return ids if trained is None else np.where(trained, ids, ~ids)


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

    def chunk(self, encoded: Encoded, vocabulary: int, targets: Targets) -> Chunk:
        """Returns a whole document as a chunk."""
        return Chunk.of(json.dumps(self, ensure_ascii=False), encoded, vocabulary, targets=targets)


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
    size = tokenizer.vocabulary
    return [Chunk.of(part, Encoded(made, None), size, at == last) for at, (part, made) in enumerate(pairs)]


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


class TextSplit:
    """One split: chunks, numbered through all its shards, one after the other in one stream of tokens.

    ends: int64 [documents], where each document ends in the stream. chunk_ends: int64 [chunks].
    targets: what of each document is trained on, None if all documents are in full.
    """

    def __init__(self, folder: Path, split: str, manifest: dict):
        self.folder, self.split = folder, split
        self._paths, self._text, self._frames, self._index = [], [], [], []
        for number, shard in enumerate(manifest["shards"]):
            record, path = shard["splits"][split], f"{folder}/{split}-{number:05d}"
            counted = (("frames", "<i8", record["frames"] + 1), ("stretches", "<i4", 5 * record["stretches"]))
            frames, index = (
                map_array(f"{path}.{name}", dtype, count, record[f"{name}_crc32"])
                for name, dtype, count in counted
            )
            self._paths.append(f"{path}.text")
            self._text.append(map_array(f"{path}.text", "u1", int(frames[-1])))
            self._frames.append(frames)
            self._index.append(index.reshape(-1, 5))
        counts = [len(index) for index in self._index]
        self._first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        whole = np.concatenate([np.zeros((0, 5), np.int32), *self._index])
        self.chunk_ends = np.cumsum(whole[:, 3], dtype=np.int64)
        self.ends = self.chunk_ends[whole[:, 4] & FINAL > 0]
        self.tokens = int(self.ends[-1]) if len(self.ends) else 0
        self.targets = read_targets(folder, split, manifest, self.ends)
        records = [shard["splits"][split] for shard in manifest["shards"]]
        self._kept = KeptTokens(f"{folder}/{split}", signed_dtype(manifest.get("vocabulary", 1)), records)

    def lengths(self, chunk: np.ndarray) -> np.ndarray:
        """Returns int64 [n], how many tokens each of these chunks has."""
        return self.chunk_ends[chunk] - self.starts(chunk)

    def starts(self, chunk: np.ndarray) -> np.ndarray:
        """Returns int64 [n], where in the stream of tokens each of these chunks starts."""
        return np.where(chunk > 0, self.chunk_ends[chunk - 1], 0)

    def texts(self, chunk: np.ndarray) -> list[tuple[StoredText, bool, bool]]:
        """Returns the texts of chunks (int64 [n]) that are not kept as tokens, and whether each begins and
        ends its document.

        Raises InputError that names a damaged frame.
        """
        texts, opened = [], {}
        for number in chunk.tolist():
            shard, at = self._place(number)
            frame, start, size, _, bits = self._index[shard][at].tolist()
            begins = at == 0 or bool(self._index[shard][at - 1, 4] & FINAL)  # a document lies in one shard
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
        places = (self._place(number) for number in chunk.tolist())
        return np.array([bool(self._index[shard][at, 4] & KEPT) for shard, at in places], bool)

    def read_kept(self, chunk: int, start: int, stop: int) -> np.ndarray:
        """Returns int32, the tokens of a kept chunk from its `start`-th to before `stop`, which is above it;
        ~token where it is no target that is trained on. Raises InputError that names a damaged block."""
        shard, at = self._place(chunk)
        place = int(self._index[shard][at, 0])
        return self._kept.read(shard, place + start, place + stop)

    def verify(self) -> None:
        """Reads everything. Raises InputError that names the first damaged frame or block."""
        self._kept.verify()
        for shard, frames in enumerate(self._frames):
            for frame in range(len(frames) - 1):
                self._frame(shard, frame)

    def _place(self, chunk: int) -> tuple[int, int]:
        """Returns the shard of a chunk, and its number there."""
        shard = int(np.searchsorted(self._first, chunk, side="right")) - 1
        return shard, chunk - int(self._first[shard])

    def _frame(self, shard: int, frame: int) -> bytes:
        first, end = self._frames[shard][frame : frame + 2].tolist()
        try:
            return zlib.decompress(self._text[shard][first:end])  # zlib compares its own checksum
        except zlib.error as error:
            where = f"{self._paths[shard]}: frame {frame} (bytes {first} to {end - 1})"
            raise InputError(f"{where} is damaged; {REMEDY}") from error


class TextStore(store.TokenStore):
    """An opened store of text."""

    KIND, SPLIT = KIND, TextSplit
