"""Tokenises text that a chat template wrote, or of which only parts are trained on, with a mask per token.

A control token's spelling means the token where the template wrote it, and is text where somebody typed it.
The text is tokenised in one piece all the same, for tokens may reach over the border between the two: in a
text that has such spellings, the template's are renamed, and the tokenizer has been told the new names.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import tokenizers

from jaxthru.data.sources.chat.marks import CLOSE, OPEN

Spans = Sequence[tuple[int, int]]
"""Half-open ranges of characters, in order, none within another."""


class Encoded(NamedTuple):
    """ids: of a document, [tokens], in the tokenizer's dtype. trained: bool [tokens], whether each is a
    target that is trained on; None for all."""

    ids: np.ndarray
    trained: np.ndarray | None


class Marked(Protocol):
    """What is read of a document: see `record.Document`."""

    text: str
    trained: Spans | None
    literal: Spans
    rendered: bool


class MarkedEncoder:
    """made: returns a new tokenizer of a tokenizer.json's text. content: that file. bos, end: the ids that a
    document which no template wrote begins and ends with, bos None for none. dtype: of ids."""

    def __init__(
        self,
        made: Callable[[bytes], tokenizers.Tokenizer],
        content: bytes,
        *,
        bos: int | None,
        end: int,
        dtype: np.dtype,
    ):
        self._make, self._content = made, content
        self._bos, self._end, self._dtype = bos, end, dtype

    def encode(self, documents: Sequence[Marked]) -> list[Encoded]:
        """Returns the ids and the mask of each document, on all cores."""
        encoded: list[Encoded | None] = [None] * len(documents)
        for kind in (self._as_text, self._as_template, self._as_both):
            numbers = [number for number, document in enumerate(documents) if self._kind(document) == kind]
            for number, made in zip(numbers, kind([documents[number] for number in numbers]), strict=True):
                encoded[number] = made
        return encoded

    def _kind(self, document: Marked) -> Callable[[Sequence[Marked]], list[Encoded]]:
        if not document.rendered:
            return self._as_text
        return self._as_both if document.literal else self._as_template

    def _as_text(self, documents: Sequence[Marked]) -> list[Encoded]:
        """Of what no template wrote: spellings are text, and the document's own borders are added. The end
        is trained on where a span reaches the end of the text."""
        return [
            self._bordered(document, encoding)
            for document, encoding in zip(documents, self._batch(self._text, documents), strict=True)
        ]

    def _bordered(self, document: Marked, encoding: tokenizers.Encoding) -> Encoded:
        begin = () if self._bos is None else (self._bos,)
        ids = np.array([*begin, *encoding.ids, self._end], self._dtype)
        if document.trained is None:
            return Encoded(ids, None)
        ends = bool(document.trained) and document.trained[-1][1] >= len(document.text)
        return Encoded(ids, np.array([*(False for _ in begin), *_trained(encoding, document.trained), ends]))

    def _as_template(self, documents: Sequence[Marked]) -> list[Encoded]:
        """Of what a template wrote, and nobody's words look like a control token."""
        encodings = self._batch(self._template, documents)
        return [
            Encoded(np.array(encoding.ids, self._dtype), _mask(encoding, document.trained))
            for document, encoding in zip(documents, encodings, strict=True)
        ]

    def _as_both(self, documents: Sequence[Marked]) -> list[Encoded]:
        """Of what a template wrote around words that spell a control token."""
        renamed = [self._renamed(document) for document in documents]
        tokenizer, original = self._both
        encodings = tokenizer.encode_batch([text for text, _ in renamed], add_special_tokens=False)
        return [
            Encoded(original[np.array(encoding.ids, np.int64)].astype(self._dtype), _mask(encoding, spans))
            for (_, spans), encoding in zip(renamed, encodings, strict=True)
        ]

    def _renamed(self, document: Marked) -> tuple[str, Spans | None]:
        """Returns the text in which the template's control tokens have their other names, and the spans of it
        that are trained on."""
        found = [match.span() for match in self._spellings.finditer(document.text)]
        meant = [span for span in found if not _overlap(span, document.literal)]
        parts, at = [], 0
        for begin, end in meant:
            parts += [document.text[at:begin], OPEN, document.text[begin:end], CLOSE]
            at = end
        text = "".join([*parts, document.text[at:]])
        if document.trained is None:
            return text, None
        opened, closed = np.array(meant, np.int64).reshape(-1, 2).T
        edges = np.array(document.trained, np.int64).reshape(-1, 2)
        # Behind the marks of what ends there, before those of what begins.
        moved = edges + np.searchsorted(opened, edges, "left") + np.searchsorted(closed, edges, "right")
        return text, moved.tolist()

    def _batch(self, tokenizer: tokenizers.Tokenizer, documents: Sequence[Marked]) -> list:
        return tokenizer.encode_batch([document.text for document in documents], add_special_tokens=False)

    @cached_property
    def _text(self) -> tokenizers.Tokenizer:
        """Takes control tokens for text."""
        made = _with_whole_offsets(self._make(self._content))
        made.encode_special_tokens = True
        return made

    @cached_property
    def _template(self) -> tokenizers.Tokenizer:
        """Takes them for what they name."""
        return _with_whole_offsets(self._make(self._content))

    @cached_property
    def _both(self) -> tuple[tokenizers.Tokenizer, np.ndarray]:
        """Knows them by other names alone; and int64, the id that each of its ids stands for. Those that are
        in the model's own vocabulary it numbers anew, and so added tokens behind them, too."""
        tree: dict[str, Any] = json.loads(self._content)
        names = {}
        for token in tree["added_tokens"]:
            name = token["content"]
            if token["special"]:
                token["content"] = OPEN + name + CLOSE
            names[token["content"]] = name
        if isinstance(tree["model"].get("vocab"), list):  # Unigram, which makes any piece that it has of text
            new = {name: content for content, name in names.items()}
            tree["model"]["vocab"] = [
                [new.get(piece, piece), score] for piece, score in tree["model"]["vocab"]
            ]
        tree["post_processor"] = None
        made = _with_whole_offsets(self._make(json.dumps(tree).encode()))
        original = np.arange(max(made.get_vocab(with_added_tokens=True).values()) + 1)
        for name, old in names.items():
            original[made.token_to_id(name)] = self._template.token_to_id(old)
        return made, original

    @cached_property
    def _spellings(self) -> re.Pattern:
        return spellings(self._template)


def spellings(tokenizer: tokenizers.Tokenizer) -> re.Pattern:
    """Returns the pattern of what spells a control token, the longest first."""
    added = tokenizer.get_added_tokens_decoder().values()
    names = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def _with_whole_offsets(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Takes away what adds nothing here, but would leave out the space before a word from where it begins."""
    tokenizer.post_processor = None
    return tokenizer


def _mask(encoding: tokenizers.Encoding, trained: Spans | None) -> np.ndarray | None:
    return None if trained is None else _trained(encoding, trained)


def _trained(encoding: tokenizers.Encoding, trained: Spans) -> np.ndarray:
    """Returns bool [tokens], whether each has a character of a span: as transformers' masks have it, of which
    one that the template began and the assistant went on with is the assistant's."""
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    if not len(trained):
        return np.zeros(len(starts), bool)
    begins, stops = np.array(trained, np.int64).T
    before = np.searchsorted(begins, ends, "left")  # spans that begin before each token ends
    return (before > 0) & (stops[before - 1] > starts)


def _overlap(span: tuple[int, int], spans: Spans) -> bool:
    return any(begin < span[1] and span[0] < end for begin, end in spans)
