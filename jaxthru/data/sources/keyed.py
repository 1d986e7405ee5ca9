"""Records that are objects or rows: under which key their text stands, or that they are conversations."""

import dataclasses
import json
from collections.abc import Mapping

from jaxthru.data.sources import record
from jaxthru.data.sources.chat.records import KINDS, Records, from_record
from jaxthru.data.sources.record import KEYS_SHOWN, Damage, Document, Place, from_value
from jaxthru.runtime.errors import did_you_mean, require


@dataclasses.dataclass(frozen=True)
class Options(record.Options):
    """text_key: the key or the column that holds the text. records: what a record is: `text`; or, whatever
    `text_key` says, `conversations` (of `messages`, `conversations`, `prompt` with `completion`, or `text`),
    which a chat template writes as text and of which the assistant's part is trained on; or `pairs` of
    answers, `chosen` and `rejected`."""

    text_key: str = "text"
    records: Records = "text"

    @property
    def unit(self) -> int:
        """See `record.Options`."""
        return 2 if self.records == "pairs" else 1

    def __post_init__(self):
        super().__post_init__()
        require(
            self.records in KINDS,
            lambda: f"records = {self.records!r}{did_you_mean(str(self.records), KINDS)}",
        )


@dataclasses.dataclass(frozen=True)
class KeyedOptions(Options):
    """Those of formats whose records are always objects or rows."""

    def __post_init__(self):
        super().__post_init__()
        require(bool(self.text_key), f"text_key = {self.text_key!r}: must not be empty")


def from_json(content: bytes, place: Place, options: Options) -> Document | Damage:
    """Returns the document that a JSON object holds."""
    try:
        # Not json.loads of bytes, which takes what begins like UTF-16 for UTF-16.
        found = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return place.damage("not UTF-8")
    except (ValueError, RecursionError):
        return place.damage("not valid JSON")
    if options.records != "text":
        return from_record(found, place, options.records)
    text_key = options.text_key
    if not isinstance(found, Mapping) or text_key in found or not found:
        text = found.get(text_key) if isinstance(found, Mapping) else None
        return from_value(text, place, f"no text under {text_key!r}")
    keys = ", ".join(repr(key[:40]) for key in list(found)[:KEYS_SHOWN])
    return place.damage(f"no text under {text_key!r}; its keys: {keys}")
