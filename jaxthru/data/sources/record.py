"""Turns a record into a document, or into damage with its place and reason."""

import dataclasses
import hashlib
from typing import ClassVar, NamedTuple

from jaxthru.runtime.errors import require

HARMLESS = 1 << 26
"""Bytes of a group of records that are decompressed though it holds some that are too long: the others are to
be had."""
KEYS_SHOWN = 8
"""Keys of a record without text that are told: one of them may be meant."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of every format; one that has others declares a class beneath this one.

    max_record_bytes: a longer record counts as damaged; as it stands in its file, decompressed.
    """

    max_record_bytes: int = 16_000_000

    split_by_file: ClassVar[bool] = False
    """Whether documents fall with their file on one side of the held-out split, whatever a transform makes of
    them, and not by their own text."""
    unit: ClassVar[int] = 1
    """Documents that belong together, one after the other: 2 of pairs, a preferred answer and another. They
    are of one origin, and lie in one row or are left out together."""

    def __post_init__(self):
        most = self.max_record_bytes
        require(most > 0, f"max_record_bytes = {most}: must not be empty")
        require(most < 2**31, f"max_record_bytes = {most}: must be below 2 GiB")


class Damage(NamedTuple):
    """A record that is left out. position: where in the file, in words."""

    file: str
    position: str
    reason: str


class Place(NamedTuple):
    """Where a record stands."""

    file: str
    position: str

    def damage(self, reason: str) -> Damage:
        """Returns the damage of the record at this place."""
        return Damage(self.file, self.position, reason)


class Document(NamedTuple):
    """text: what is tokenised. origin: the hash (hex) that decides on which side of the held-out split it
    falls: of the text, whatever file it stood in; of docstrings that of their file's text, which they follow.
    place: for what goes wrong with it later. read: the text before its transform.
    trained: the parts of the text that are trained on, as half-open ranges of its characters in order, none
    within another; None for all of it. rendered: whether a chat template wrote the text: it has its own
    beginning and end, and control tokens that it spells out are tokens. literal: ranges of such a text whose
    spellings stay text, for somebody typed them.
    """

    text: str
    origin: str
    place: Place
    read: str
    trained: tuple[tuple[int, int], ...] | None = None
    literal: tuple[tuple[int, int], ...] = ()
    rendered: bool = False

    @classmethod
    def of(cls, text: str, place: Place) -> "Document":
        """Returns the document of a text as it was read. Raises UnicodeEncodeError for half of a surrogate
        pair."""
        return cls(text, origin_of(text), place, text)


def origin_of(text: str) -> str:
    """Returns the SHA-256 of a text, in hex."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def over_long(max_record_bytes: int) -> str:
    """Returns the reason for a record that is longer than its recipe allows."""
    return f"longer than max_record_bytes = {max_record_bytes}"


def from_bytes(content: bytes, place: Place) -> Document | Damage:
    """Returns the document of a record that is its text."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return place.damage(f"not UTF-8 from byte {error.start}")
    return from_value(text, place, "")


def from_value(text: object, place: Place, reason: str) -> Document | Damage:
    """Returns the document of a value that should be text; `reason` says what is wrong if it is not."""
    if not isinstance(text, str):
        return place.damage(reason)
    try:
        return Document.of(text, place)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape and UTF-8 cannot hold
        return place.damage("not valid Unicode")
