"""Chunks: the parts of a document that a text store has, each of which is tokenised by itself."""

import functools
import json
from typing import NamedTuple

import numpy as np

from jaxthru.data.store.kept_tokens import KEEP_TOKENS, signed_dtype
from jaxthru.data.store.marked import Encoded, Marked, Spans
from jaxthru.data.store.targets import Targets
from jaxthru.data.store.tokenizer import Tokenizer

CHUNK_BYTES = 1 << 12
"""Text in a chunk of a longer document, to the next line end. Half of that is tokenised for nothing at each
end of a row."""
LINES = "It is one.\nThe next\n\n\nhas (some)\n    more\n\n    lines\nto go\n\non, and on."
"""Line ends of all kinds, on which is tried where a tokenizer lets texts be cut."""
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
    parts = _paragraphs(text, _cut_behind(tokenizer), CHUNK_BYTES)
    encoded = _encoded(parts, tokenizer) if len(parts) > 1 else [ids]
    if not np.array_equal(np.concatenate(encoded), ids):
        parts, encoded = [text], [ids]
    last = len(parts) - 1
    pairs = zip(parts, encoded, strict=True)
    size = tokenizer.vocabulary
    return [Chunk.of(part, Encoded(made, None), size, at == last) for at, (part, made) in enumerate(pairs)]


def _encoded(parts: list[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Returns the tokens of the parts of a document, with its borders at its own ends alone."""
    last = len(parts) - 1
    return [tokenizer.part(ids, at == 0, at == last) for at, ids in enumerate(tokenizer.encode(parts))]


@functools.lru_cache(maxsize=8)
def _cut_behind(tokenizer: Tokenizer) -> bool:
    """Returns whether to cut texts behind line ends, and not before them.

    Most tokenizers of this decade join a line end to what stands before it; those with the pattern of
    GPT-2's, as one that is trained here, join whitespace to what comes after it.
    """
    parts = _paragraphs(LINES, behind=True, size=1)
    return np.array_equal(np.concatenate(_encoded(parts, tokenizer)), tokenizer.encode([LINES])[0])


def _paragraphs(text: str, behind: bool, size: int) -> list[str]:
    """Cuts a text behind or before line ends, into parts of at least `size` characters.

    Tokenizers join a line end to whitespace around it: a cut is at one side of all of it.
    """
    parts, begin = [], 0
    while len(text) - begin > 2 * size:
        end = text.find("\n", begin + size)
        while 0 <= end < len(text) - 1 and text[end + 1 if behind else end - 1].isspace():
            end = text.find("\n", end + 1)
        if not 0 <= end < len(text) - 1:
            break
        parts.append(text[begin : end + behind])
        begin = end + behind
    return [*parts, text[begin:]]
