"""The files of one source as a stream of documents, and the key that identifies its store."""

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jaxthru.data.files import File
from jaxthru.data.mix import ASIDE, Recipe
from jaxthru.data.readers import READERS, Damage, Document, options, read

VERSION = 3
"""Counts the changes to what documents the same files become, and to which of them are held out."""
FIRST = ("format", "text_key", "extension", "cap_bytes", "max_record_bytes")
"""The options that stand in every key, whoever reads them, and without their names: so they do in the keys of
stores that are prepared already. Nothing joins them: all others are found, see `further_options`."""
KEEP_BYTES = 64_000_000
"""A source capped below this is read once and kept, for the tokenizer's training and for encoding."""


class Corpus:
    """The files of one source. key: the hash of all that decides its documents, and of nothing else.
    left_out: how many texts were empty or repeated, of those read so far."""

    def __init__(self, name: str, recipe: Recipe, files: list[File]):
        self.name, self.recipe, self.files = name, recipe, files
        contents = [(file.digest, file.path.suffix) for file in files]
        first = [getattr(recipe, name) for name in FIRST]
        parts = [VERSION, first, recipe.transform.name, recipe.transform.digest, contents]
        further = further_options(recipe)
        self.key = hash_of([*parts, further] if further else parts)
        self.size = min(sum(file.size for file in files), recipe.cap_bytes or 2**63)
        self.left_out = Counter()
        keep = 0 < recipe.cap_bytes <= KEEP_BYTES
        self._kept = read(files, recipe, self.left_out) if keep else None

    def items(self) -> Iterator[Document | Damage]:
        """Yields the documents and damaged records, from the first."""
        if self._kept is None:
            self.left_out = Counter()
            return read(self.files, self.recipe, self.left_out)
        self._kept, items = itertools.tee(self._kept)
        return items


def further_options(recipe: Recipe) -> dict[str, Any]:
    """Returns the options beside FIRST and the transform that decide what a recipe's files become: all, but
    those that are declared not to (`mix.ASIDE`) and those that only readers of other formats read."""
    others = {name for format in READERS for name in options(format)} - {*options(recipe.format)}
    known = {*FIRST, "transform", *ASIDE, *others}
    names = [field.name for field in dataclasses.fields(recipe) if field.name not in known]
    return {name: getattr(recipe, name) for name in names}


def hash_of(parts: list) -> str:
    """Returns the SHA-256, in hex, of JSON values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
