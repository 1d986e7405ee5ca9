"""The corpus of one source: its files as a stream of documents, and the key that identifies its store."""

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jaxthru.data.sources.documents import UNTRAINED, Render, read
from jaxthru.data.sources.files import File
from jaxthru.data.sources.recipes import ASIDE, Recipe
from jaxthru.data.sources.record import Damage, Document
from jaxthru.runtime.errors import require

VERSION = 3
"""Counts the changes to what documents the same files become, and to which of them are held out."""
FIRST = {"format": None, "text_key": "text", "extension": "", "cap_bytes": None, "max_record_bytes": None}
"""What stands in every key without its name, and as what where a format has no such option: so it does in the
keys of stores that are prepared already. Nothing joins these: all others are found by `_decisive`."""
KEEP_BYTES = 64_000_000
"""A source capped below this is read once and kept, for the tokenizer's training and for encoding."""


class Corpus:
    """The files of one source. key: the hash of all that decides its documents, and of nothing else.
    left_out: how many texts were empty or repeated, of those read so far. noted: what else there is
    to be said of these. render: what makes documents of conversations, to be given before they are read."""

    def __init__(self, name: str, recipe: Recipe, files: list[File]):
        self.name, self.recipe, self.files = name, recipe, files
        contents = [(file.digest, file.path.suffix) for file in files]
        decisive = _decisive(recipe)
        first = [decisive.get(name, default) for name, default in FIRST.items()]
        parts = [VERSION, first, recipe.transform.name, recipe.transform.digest, contents]
        further = {name: value for name, value in decisive.items() if name not in FIRST}
        self.key = hash_of([*parts, further] if further else parts)
        self.size = min(sum(file.size for file in files), recipe.cap_bytes or 2**63)
        self.left_out, self.noted = Counter(), Counter()
        self.render: Render | None = None
        self._keep = 0 < recipe.cap_bytes <= KEEP_BYTES
        self._kept: Iterator[Document | Damage] | None = None

    def items(self) -> Iterator[Document | Damage]:
        """Yields the documents and damaged records, from the first."""
        if self._kept is None:
            self.left_out.clear(), self.noted.clear()
            items = self._checked(read(self.files, self.recipe, self.left_out, self.render))
            if not self._keep:
                return items
            self._kept = items
        self._kept, items = itertools.tee(self._kept)
        return items

    def _checked(self, items: Iterator[Document | Damage]) -> Iterator[Document | Damage]:
        """Yields them. Raises InputError at the end of conversations in which nothing is to be learnt."""
        some = False
        for item in items:
            some = some or isinstance(item, Document)
            yield item
        untrained = self.left_out[UNTRAINED]
        said = f"source {self.name}: all of its {untrained:,} conversations are {UNTRAINED}: in none of them "
        require(some or not untrained, said + "does the assistant say anything")


def _decisive(recipe: Recipe) -> dict[str, Any]:
    """Returns what decides what a recipe's files become, but for the transform: its keys that are not said to
    change nothing (`recipes.ASIDE`), and the options of its format."""
    own = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    own = {name: value for name, value in own.items() if name not in (*ASIDE, "options", "transform")}
    options = dataclasses.asdict(recipe.options)
    if recipe.records == "text":  # as in keys of stores that were prepared when there was nothing else
        options.pop("records", None)
    return own | options


def hash_of(parts: list) -> str:
    """Returns the SHA-256, in hex, of JSON values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
