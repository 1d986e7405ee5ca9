"""The package chitchat-dataset: one JSON file of conversations between two people, a conversation each.

Whoever speaks first is the user, the other one the assistant. What somebody says before the other answers is
one message, a line for each time that they pressed enter.

Nobody has said which of two answers they prefer. As pairs the answer that was given is the chosen one, and
the rejected one was given in the conversation before, to something else.
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Literal

from jaxthru.data.sources import record
from jaxthru.data.sources.chat.records import from_record
from jaxthru.data.sources.files import File
from jaxthru.data.sources.record import Damage, Document, Place, over_long
from jaxthru.data.sources.streams import READ_ERRORS, cannot_be_read, opened
from jaxthru.runtime.errors import require

PAIR_MESSAGES = 8
"""Messages of a pair, at most: the user's and the assistant's in turn, the last one an answer."""


@dataclasses.dataclass(frozen=True)
class Options(record.Options):
    """records: `conversations`, or `pairs` of answers, one for each conversation."""

    records: Literal["conversations", "pairs"] = "conversations"

    @property
    def unit(self) -> int:
        """See `record.Options`."""
        return 2 if self.records == "pairs" else 1

    def __post_init__(self):
        super().__post_init__()
        kinds = ("conversations", "pairs")
        require(self.records in kinds, f"records = {self.records!r}: must be one of {', '.join(kinds)}")


def read(files: list[File], options: Options) -> Iterator[Document | Damage]:
    """Yields each conversation of a file, which is read as a whole."""
    for file in files:
        whole = Place(str(file.path), "whole file")
        try:
            with opened(file.path) as stream:
                found = json.loads(stream.read().decode("utf-8-sig"))
        except READ_ERRORS as error:
            yield whole.damage(cannot_be_read(error))
            continue
        except (ValueError, RecursionError):
            yield whole.damage("not valid JSON")
            continue
        if not isinstance(found, dict):
            yield whole.damage("no JSON object of conversations")
            continue
        answer = ""  # of the conversation before
        for name, conversation in found.items():
            place = Place(str(file.path), f"conversation {name[:40]}")
            try:
                messages = _messages(conversation["messages"])
            except (KeyError, TypeError, AttributeError):
                yield place.damage("no messages of utterances with 'text' and 'sender'")
                continue
            record = {"messages": messages}
            if options.records == "pairs":
                record, answer = _pair(messages, answer)
                if record is None:
                    continue
            document = from_record(record, place, options.records)
            fits = isinstance(document, Damage) or len(document.text.encode()) <= options.max_record_bytes
            yield document if fits else place.damage(over_long(options.max_record_bytes))


def _pair(messages: list[dict[str, str]], other: str) -> tuple[dict[str, Any] | None, str]:
    """Returns the pair that the beginning of a conversation makes with another's answer, None where it has no
    answer or there is no other; and its answer."""
    begun = messages[: min(len(messages), PAIR_MESSAGES) // 2 * 2]
    if not begun:
        return None, other
    *prompt, chosen = begun
    answer = chosen["content"]
    if other in ("", answer):
        return None, answer
    return {"prompt": prompt, "chosen": [chosen], "rejected": [chosen | {"content": other}]}, answer


def _messages(turns: list[list[dict[str, Any]]]) -> list[dict[str, str]]:
    """Returns a conversation's messages. Raises KeyError, TypeError or AttributeError for
    what is none."""
    messages: list[dict[str, str]] = []
    first = turns[0][0]["sender"] if turns and turns[0] else None
    for turn in turns:
        said = "\n".join(utterance["text"].strip() for utterance in turn).strip()
        role = "user" if turn and turn[0]["sender"] == first else "assistant"
        if not said:
            continue
        if messages and messages[-1]["role"] == role:  # the other one said nothing between
            messages[-1]["content"] += f"\n{said}"
        elif messages or role == "user":
            messages.append({"role": role, "content": said})
    return messages
