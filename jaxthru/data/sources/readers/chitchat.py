"""The package chitchat-dataset: one JSON file of conversations between two people, a conversation each.

Whoever speaks first is the user, the other one the assistant. What somebody says before the other answers is
one message, a line for each time that they pressed enter. Source: https://pypi.org/project/chitchat-dataset/
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, ClassVar

from jaxthru.data.sources import record
from jaxthru.data.sources.chat.records import Records, from_record
from jaxthru.data.sources.files import File
from jaxthru.data.sources.record import Damage, Document, Place, over_long
from jaxthru.data.sources.streams import READ_ERRORS, cannot_be_read, opened


@dataclasses.dataclass(frozen=True)
class Options(record.Options):
    """Records are conversations."""

    records: ClassVar[Records] = "conversations"


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
        for name, conversation in found.items():
            place = Place(str(file.path), f"conversation {name[:40]}")
            try:
                messages = _messages(conversation["messages"])
            except (KeyError, TypeError):
                yield place.damage("no messages of utterances with 'text' and 'sender'")
                continue
            document = from_record({"messages": messages}, place, Options.records)
            fits = isinstance(document, Damage) or len(document.text.encode()) <= options.max_record_bytes
            yield document if fits else place.damage(over_long(options.max_record_bytes))


def _messages(turns: list[list[dict[str, Any]]]) -> list[dict[str, str]]:
    """Returns a conversation's messages. Raises KeyError, TypeError for what is none."""
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
