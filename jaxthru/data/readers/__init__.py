"""From files to documents: one module a format. A record that cannot be read is reported, never dropped.

A reader is a function (files, *, options) -> documents and damage. Its keyword arguments are the options of a
recipe that it reads, by name: it is given no others, and `data.corpus` makes them part of a store's key.
"""

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator

from jaxthru.data.files import File
from jaxthru.data.mix import Recipe
from jaxthru.data.readers import array_record, docstrings, jsonl, parquet, tar, text
from jaxthru.data.readers.record import Damage, Document, origin_of
from jaxthru.data.transform import apply, find_transform
from jaxthru.runtime.errors import InputError

__all__ = ["Damage", "Document", "formats_with", "held_out", "options", "read"]

READERS = {
    "text": text.read,
    "docstrings": docstrings.read,
    "jsonl": jsonl.read,
    "parquet": parquet.read,
    "tar": tar.read,
    "array_record": array_record.read,
}


def options(format: str) -> list[str]:
    """Returns the options of a recipe that a format's reader reads."""
    return inspect.getfullargspec(READERS[format]).kwonlyargs


def formats_with(option: str) -> list[str]:
    """Returns the formats whose readers read an option of a recipe; none for one that no reader is given."""
    return [format for format in READERS if option in options(format)]


def read(files: list[File], recipe: Recipe, left_out: Counter | None = None) -> Iterator[Document | Damage]:
    """Yields the documents of the files in order, transformed, up to the recipe's cap.

    Empty texts are left out, and every text but the first of equal ones, as they are tokenised; `left_out`
    counts them. Memory holds one record at a time, and a hash of each text so far.
    """
    left_out = Counter() if left_out is None else left_out
    transform = find_transform(recipe.transform) if recipe.transform else None
    seen: set[int] = set()
    size = 0
    given = {name: getattr(recipe, name) for name in options(recipe.format)}
    for item in READERS[recipe.format](files, **given):
        if transform and isinstance(item, Document):
            item = _transformed(item, transform, follows=recipe.format == "docstrings")
        if isinstance(item, Document):
            content = item.text.encode()
            key = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
            if key in seen or not content:
                left_out["repeated" if content else "empty"] += 1
                continue
            seen.add(key)
            size += len(item.read.encode()) if transform else len(content)
        yield item
        if recipe.cap_bytes and size >= recipe.cap_bytes:
            return


def _transformed(document: Document, transform: Callable[[str], str], follows: bool) -> Document | Damage:
    """follows: on which side of the held-out split it is, its file decides."""
    try:
        text = apply(transform, document.read)
    except InputError as error:
        return document.place.damage(str(error))
    return document._replace(text=text, origin=document.origin if follows else origin_of(text))


def held_out(origin: str, share: float) -> bool:
    """Says whether a document of this origin (a SHA-256 in hex) is held out; true for `share` of origins.

    The last digits decide, for the first ones order plain files and so choose what a cap leaves.
    """
    return int(origin[-16:], 16) < share * 2**64
