"""Reads conversations and pairs of answers from records, in whichever of the usual formats they stand.

A record becomes one JSON text, the same for the same conversation however it was written down: by it
conversations are transformed, deduplicated and held out.

    {"messages": [{"role": ..., "content": ..., "weight": 0, "tool_calls": [...]}, ...], "tools": [...]}
    {"prompt": ..., "completion": ...}
    {"text": ...}
    {"chosen": <any of the first two>, "rejected": <the same>}

Formats: https://huggingface.co/docs/trl/dataset_formats; ShareGPT's `conversations` of `from` and `value`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from jaxthru.data.sources.record import KEYS_SHOWN, Damage, Document, Place, from_value

Records = Literal["text", "conversations", "pairs"]
KINDS: tuple[str, ...] = get_args(Records)
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"} | {role: role for role in ROLES}
"""What `from` may say, and the role that it is."""
MESSAGES = ("messages", "conversations", "conversation")
KEYS = {
    "conversations": (*MESSAGES, "prompt", "completion", "text", "tools"),
    "pairs": ("prompt", "chosen", "rejected", "tools"),
}
"""The keys of a record that are read, of each kind of records."""


class Malformed(ValueError):
    """A record that is no conversation; its message says why."""


def from_record(record: Any, place: Place, kind: Records) -> Document | Damage:
    """Returns the document of a record's conversation, or pair, as JSON (see above)."""
    try:
        if not isinstance(record, Mapping):
            raise Malformed(f"a {type(record).__name__} where a record should be")
        record = {key: value for key, value in record.items() if value is not None}
        found = _pair(record) if kind == "pairs" else _conversation(record)
        text = json.dumps(found, ensure_ascii=False)
    except Malformed as error:
        return place.damage(str(error))
    except RecursionError:
        return place.damage("nested too deeply")
    return from_value(text, place, "")


def from_canonical(text: str, kind: Records) -> dict[str, Any]:
    """Returns the conversation, or pair, of such a JSON text, which a transform may have changed.

    Raises Malformed.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed("the transform returned what is not valid JSON") from error
    if not isinstance(record, dict):
        raise Malformed("the transform returned JSON that is no object")
    if kind == "conversations":
        return _conversation(record)
    return {side: _conversation(_side(record, side)) for side in ("chosen", "rejected")}


def words_of(text: str) -> str:
    """Returns what is said in such a JSON text, as a tokenizer is trained on: words, and no JSON."""

    def words(value: Any) -> Iterator[str]:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(each, dict | list):
                yield from words(each)
            elif isinstance(each, str) and key not in ("role", "type", "id"):
                yield each

    try:
        return "\n".join(words(json.loads(text)))
    except (ValueError, AttributeError, TypeError):  # a transform has made something else of it
        return text


def said_by_assistant(conversation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the assistant's messages."""
    return [message for message in conversation.get("messages", ()) if message["role"] == "assistant"]


def _side(record: Mapping[str, Any], side: str) -> dict[str, Any]:
    if not isinstance(record.get(side), Mapping):
        raise Malformed(f"the transform returned a pair without its {side!r}")
    return dict(record[side])


def _conversation(record: Mapping[str, Any]) -> dict[str, Any]:
    tools = _tools(record)
    for key in MESSAGES:
        if key in record:
            return {"messages": _messages(record[key], key)} | tools
    if "prompt" in record and "completion" in record:
        return _answered(record["prompt"], record["completion"], "completion") | tools
    if "text" in record:
        if not isinstance(record["text"], str):
            raise Malformed("no text under 'text'")
        return {"text": record["text"]}
    if "chosen" in record and "rejected" in record:
        raise Malformed("a pair ('chosen', 'rejected'): the recipe needs records = 'pairs'")
    wanted = "'messages', 'conversations', 'prompt' with 'completion', or 'text'"
    raise Malformed(f"no conversation: looked for {wanted}{_keys_of(record)}")


def _pair(record: Mapping[str, Any]) -> dict[str, Any]:
    for side in ("chosen", "rejected"):
        if side not in record:
            raise Malformed(f"a pair needs 'chosen' and 'rejected', and has no {side!r}{_keys_of(record)}")
    chosen, rejected, tools = _said(record["chosen"]), _said(record["rejected"]), _tools(record)
    if "prompt" in record:
        both = [_answered(record["prompt"], answer, name) for name, answer in _named(chosen, rejected)]
    elif isinstance(chosen, str) and isinstance(rejected, str):
        prompt = _common_text(chosen, rejected)
        sides = (chosen[len(prompt) :], rejected[len(prompt) :])
        both = [_answered(prompt, answer, name) for name, answer in _named(*sides)]
    else:
        whole = [_messages(answer, name) for name, answer in _named(chosen, rejected)]
        common = _common_messages(*whole)
        both = [_continued(messages[:common], messages[common:]) for messages in whole]
    if both[0] == both[1]:
        raise Malformed("a pair whose two answers are the same")
    for name, side in _named(*both):
        answers = [message for message in said_by_assistant(side) if message.get("weight") != 0]
        said = any(message.get("content") or "tool_calls" in message for message in answers)
        if not said and not side.get("completion"):
            raise Malformed(f"a pair whose {name!r} holds no answer")
    return {name: side | (tools if "messages" in side else {}) for name, side in _named(*both)}


def _named(chosen: Any, rejected: Any) -> tuple[tuple[str, Any], tuple[str, Any]]:
    return ("chosen", chosen), ("rejected", rejected)


def _common_text(first: str, second: str) -> str:
    """Returns the words that two texts begin with, to the last white space: tokens begin there."""
    length = next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )
    while length > 0 and not first[length - 1 : length].isspace():
        length -= 1
    while length > 0 and first[length - 1 : length].isspace():  # the space is the answer's
        length -= 1
    return first[:length]


def _common_messages(first: Sequence[dict], second: Sequence[dict]) -> int:
    """Returns how many messages two conversations begin with that are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


def _answered(prompt: Any, answer: Any, name: str) -> dict[str, Any]:
    """Returns a prompt with its answer, which alone is trained on."""
    prompt, answer = _said(prompt), _said(answer)
    if isinstance(prompt, str) and isinstance(answer, str):
        return {"prompt": prompt, "completion": answer}
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    return _continued(_messages(prompt, "prompt"), _messages(answer, name))


def _continued(before: Sequence[dict], answer: Sequence[dict]) -> dict[str, Any]:
    """Returns messages with those that follow, of which alone the assistant's are trained on."""
    unlearnt = [each | {"weight": 0} if each["role"] == "assistant" else each for each in before]
    return {"messages": [*unlearnt, *answer]}


def _messages(value: Any, key: str) -> list[dict[str, Any]]:
    value = _from_json(value)
    if isinstance(value, Mapping):  # one message alone, as some pairs have their answers
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str) or not len(value):
        raise Malformed(f"no messages under {key!r}")
    return [_message(message, f"{key}[{at}]") for at, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise Malformed(f"{where} is no message, but a {type(message).__name__}")
    message = {key: value for key, value in message.items() if value is not None}
    if "role" in message:
        role, content, valid = message.pop("role"), message.pop("content", None), ROLES
    elif "from" in message:
        role, content, valid = message.pop("from"), message.pop("value", None), SHAREGPT
        role = SHAREGPT.get(role, role) if isinstance(role, str) else role
    else:
        raise Malformed(f"{where} has neither 'role' nor 'from'")
    if role not in ROLES:
        raise Malformed(f"{where} has the role {str(role)[:40]!r}; known are {', '.join(valid)}")
    found = {"role": role}
    calls = _calls(message.pop("tool_calls", None), where)
    if content is not None or not calls:
        found["content"] = _content(content, where)
    weight = message.pop("weight", None)
    if weight is not None:
        if weight not in (0, 1):
            raise Malformed(f"{where} has weight = {weight!r}: 0 leaves it out of the loss, 1 does not")
        found |= {"weight": 0} if weight == 0 and role == "assistant" else {}
    return found | ({"tool_calls": calls} if calls else {}) | _plain(message, where)


def _content(content: Any, where: str) -> str:
    """Returns a message's words, of which some APIs make a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise Malformed(f"{where} has no text as its content")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise Malformed(f"{where} has a part of type {str(kind)[:40]!r}: only text is read")
        texts.append(text)
    return "".join(texts)


def _calls(calls: Any, where: str) -> list[Any]:
    """Returns tool calls with their arguments as objects, which templates write as JSON: APIs give them as
    JSON already, and so they would be written as a string."""
    calls = _from_json(calls)
    if calls is None:
        return []
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise Malformed(f"{where}.tool_calls is no list")
    found = []
    for call in calls:
        if not isinstance(call, Mapping):
            raise Malformed(f"{where}.tool_calls holds a {type(call).__name__}")
        call = _plain(call, where)
        inner = call.get("function", call)
        if isinstance(inner, dict) and isinstance(inner.get("arguments"), str):
            inner["arguments"] = _from_json(inner["arguments"])
        found.append(call)
    return found


def _tools(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the functions that the assistant may call, which templates describe to it."""
    tools = _from_json(record.get("tools"))
    if not tools:
        return {}
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise Malformed("tools is no list")
    return {"tools": _plain({"tools": tools}, "the record")["tools"]}


def _from_json(value: Any) -> Any:
    """Returns what a JSON text holds, for columns of tables often hold nested values as such; else itself."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return value


def _said(value: Any) -> Any:
    """Returns the messages that a JSON text holds; else the value itself: a text may be JSON of its own."""
    found = _from_json(value)
    messages = isinstance(found, list) and bool(found)
    messages = messages and all(isinstance(each, Mapping) and _role(each) in SHAREGPT for each in found)
    return found if messages else value


def _role(message: Mapping[str, Any]) -> str:
    return str(message.get("role", message.get("from")))


def _plain(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a copy without nulls, which stand in tables for keys that are not there."""

    def without(each: Any) -> Any:
        if isinstance(each, Mapping):
            return {str(key): without(inner) for key, inner in each.items() if inner is not None}
        if isinstance(each, list | tuple):
            return [without(inner) for inner in each]
        if each is None or isinstance(each, str | int | float | bool):
            return each
        raise Malformed(f"{where} holds a {type(each).__name__}")

    return without(value)


def _keys_of(record: Mapping[str, Any]) -> str:
    return f"; its keys: {', '.join(repr(str(key)[:40]) for key in list(record)[:KEYS_SHOWN])}"
