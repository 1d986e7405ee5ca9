"""From files to documents: read by their format, transformed, deduplicated, conversations rendered."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator

from jaxthru.data.sources.files import File
from jaxthru.data.sources.readers import reader
from jaxthru.data.sources.recipes import Recipe
from jaxthru.data.sources.record import Damage, Document, origin_of
from jaxthru.data.sources.transforms import apply, find_transform
from jaxthru.runtime.errors import InputError

Render = Callable[[Document], "list[Document] | Damage"]
"""Makes of a document that is a conversation, as JSON, the document that a chat template writes; two of a
pair."""
UNTRAINED = "without anything to train on"


def read(
    files: list[File], recipe: Recipe, left_out: Counter | None = None, render: Render | None = None
) -> Iterator[Document | Damage]:
    """Yields the documents of the files in order, transformed, up to the recipe's cap.

    Empty texts are left out, and every text but the first of equal ones, as they are tokenised; `left_out`
    counts them. Memory holds one record at a time, and a hash of each text so far. render: of a recipe whose
    records are conversations, which are what is compared and held out, as JSON; those in which the assistant
    says nothing are left out.
    """
    left_out = Counter() if left_out is None else left_out
    transform = find_transform(recipe.transform) if recipe.transform else None
    seen: set[int] = set()
    size = 0
    for item in reader(recipe.format).read(files, recipe.options):
        if transform and isinstance(item, Document):
            item = _transformed(item, transform, recipe.options.split_by_file)
        if isinstance(item, Document):
            content = item.text.encode()
            key = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
            if key in seen or not content:
                left_out["repeated" if content else "empty"] += 1
                continue
            seen.add(key)
            size += len(item.read.encode()) if transform else len(content)
            item = render(item) if render else item
        if isinstance(item, list):
            if not all(each.text for each in item):
                left_out["empty"] += 1
            elif any(each.trained == () for each in item):
                left_out[UNTRAINED] += 1
            else:
                yield from item
        else:
            yield item
        if recipe.cap_bytes and size >= recipe.cap_bytes:
            return


def _transformed(document: Document, transform: Callable[[str], str], by_file: bool) -> Document | Damage:
    """by_file: on which side of the held-out split it is, its file decides."""
    try:
        text = apply(transform, document.read)
    except InputError as error:
        return document.place.damage(str(error))
    return document._replace(text=text, origin=document.origin if by_file else origin_of(text))


def held_out(origin: str, share: float) -> bool:
    """Says whether a document of this origin (a SHA-256 in hex) is held out; true for `share` of origins.

    The last digits decide, for the first ones order plain files and so choose what a cap leaves.
    """
    return int(origin[-16:], 16) < share * 2**64
