"""Chat templates: a conversation as the text that its model knows, and which of it the assistant says.

Templates come with models, as files that anybody may have written: they run in Jinja's sandbox, within a time
limit, and all that they are given are plain values. What they can expect:
https://huggingface.co/docs/transformers/chat_templating_writing
"""

import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from jaxthru.data.sources.chat.marks import CLOSE, OPEN, SAID, UNSAID
from jaxthru.data.sources.chat.sandbox import DAY, Failure, compiled, within_limits
from jaxthru.data.sources.chat.turns import turns_of
from jaxthru.runtime.errors import InputError, require

MARKS = re.compile(f"([{OPEN}{CLOSE}{SAID}{UNSAID}])")
VERSION = 1
"""Counts the changes to what the same template makes of the same conversation."""
REASONING = ("reasoning_content", "thinking", "reasoning")
QUESTION, ANSWER = "Which river?", "The Oder."
PROBE = ({"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER})


class Rendered(NamedTuple):
    """trained: what the assistant says, with the end of its turn. literal: spellings of control tokens that
    stood in the conversation. Both are half-open ranges of the text's characters, in order."""

    text: str
    trained: tuple[tuple[int, int], ...]
    literal: tuple[tuple[int, int], ...]


class ChatTemplate:
    """text: of the template, as it was found. name: where, for messages. variables: what it may write beside
    the conversation, as `bos_token`. control: what spells a control token.

    Raises InputError for a text that is no template.
    """

    def __init__(self, text: str, name: str, variables: Mapping[str, str], control: re.Pattern):
        self.text, self.name, self._control = text, name, control
        self._variables = {key: value for key, value in variables.items() if key in text}
        self._tagged = re.search(r"\{%[-+]?\s*generation\b", text) is not None
        self._turns = None if self._tagged else turns_of(text)
        try:
            self._template = compiled(text)
        except Failure as error:
            raise InputError(f"chat template {name}: is no template: {error}") from error

    def __repr__(self) -> str:
        return f"<chat template {self.name}>"

    @property
    def digest(self) -> str:
        """The hash of what decides which text a conversation becomes, and which of it is trained on."""
        parts = [VERSION, self.text, self._turns, sorted(self._variables.items())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        prompt: bool = False,
        day: datetime.date = DAY,
    ) -> Rendered:
        """Returns a conversation as text.

        prompt: let the text end where the assistant is to begin. day: what `strftime_now` tells. A message of
        weight 0 is not trained on. Raises `Failure`, and InputError where a time limit is passed.
        """
        plain = self._marked([_plain(message) for message in messages])
        given = {"messages": plain, "tools": self._marked(tools), "documents": None} | self._variables
        given |= {"add_generation_prompt": prompt}
        text = within_limits(lambda: self._template.render(given, day=day), f"chat template {self.name}")
        if self._turns is not None:
            text = self._turns.pattern.sub(rf"\g<begin>{SAID}\g<said>{UNSAID}", text)
        rendered = _unmarked(text)
        trained = tuple(self._with_its_end(span, rendered) for span in rendered.trained)
        if any(message.get("weight") == 0 for message in messages):
            trained = _weighted(trained, messages)
        return rendered._replace(trained=tuple(span for span in trained if span[0] < span[1]))

    def check(self) -> None:
        """Raises InputError unless the template renders a plain conversation, and says which of it is the
        assistant's."""
        said = f"chat template {self.name}"
        rendered, answer = self._probed
        own = (
            "write {% generation %} before and {% endgeneration %} behind what the assistant says, with the "
            "end of its turn, into a copy, and name that in the mix: tokenizer.chat_template = FILE"
        )
        known = self._tagged or self._turns is not None
        require(known, f"{said}: does not say which text is the assistant's, nor is it a known one: {own}")
        end = answer + len(ANSWER)
        inside = any(begin <= answer and end <= stop for begin, stop in rendered.trained)
        require(inside, f"{said}: its {{% generation %}} does not hold what the assistant says: {own}")

    def begins_with(self, bos: str) -> bool:
        """Says whether a conversation's text begins with this token. Raises InputError."""
        return self._probed[0].text.startswith(bos)

    @property
    def control_tokens(self) -> set[str]:
        """The control tokens that it may write."""
        return {
            found for each in (self.text, *self._variables.values()) for found in self._control.findall(each)
        }

    @property
    def turn_end(self) -> str | None:
        """The control token that ends the assistant's turn, by which generation stops; None if there is
        none. Raises InputError."""
        rendered, answer = self._probed
        behind = rendered.text[answer + len(ANSWER) :].lstrip()
        found = self._control.match(behind)
        return found[0] if found else None

    @cached_property
    def _probed(self) -> tuple[Rendered, int]:
        """A question with its answer, and where in it the answer begins."""
        said = f"chat template {self.name}"
        try:
            rendered = self.render(PROBE)
        except Failure as error:
            raise InputError(f"{said}: fails at a question with its answer: {error}") from error
        answer = rendered.text.find(ANSWER)
        require(answer >= 0, f"{said}: leaves out what the assistant says; there is nothing to train on")
        bos = self._variables.get("bos_token")
        twice = bool(bos) and rendered.text.startswith(2 * bos)
        require(not twice, f"{said}: begins a conversation with {bos} twice; take one of them out")
        return rendered, answer

    def _marked(self, value: Any) -> Any:
        """Returns a copy in which OPEN and CLOSE stand around what spells a control token, or looks like one
        to the template's turns. Raises Failure for a text that has such marks itself."""
        if isinstance(value, str):
            if MARKS.search(value):
                raise Failure("a message holds a noncharacter of U+FDD0 to U+FDD3, which no text should")
            return self._spelled.sub(rf"{OPEN}\g<0>{CLOSE}", value)
        if isinstance(value, Mapping):
            return {key: self._marked(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(each) for each in value]
        return value

    @cached_property
    def _spelled(self) -> re.Pattern:
        return self._turns.typed(self._control) if self._turns else self._control

    def _with_its_end(self, span: tuple[int, int], rendered: Rendered) -> tuple[int, int]:
        """Returns a span with the control token behind it, where the template's author left the end of the
        turn outside: who does not learn to end a turn goes on for ever."""
        begin, end = span
        said = rendered.text[begin:end].rstrip()
        found = self._control.match(rendered.text, end)
        if not found or (end, found.end()) in rendered.literal:
            return span
        last = next((match for match in self._control.finditer(said) if match.end() == len(said)), None)
        typed = last and (begin + last.start(), begin + last.end()) in rendered.literal
        return span if last and not typed else (begin, found.end())


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as templates expect it: its reasoning under the names that they read, whatever the
    record calls it."""
    plain = {key: value for key, value in message.items() if key != "weight"}
    thought = next((plain[key] for key in REASONING if plain.get(key) is not None), None)
    return plain if thought is None else {"thinking": thought} | plain | {"reasoning_content": thought}


def _unmarked(text: str) -> Rendered:
    """Returns a text without marks, and the ranges that lay between two that belong together."""
    parts, at = [], 0
    opened: dict[str, int] = {}
    spans: dict[str, list[tuple[int, int]]] = {OPEN: [], SAID: []}
    for part in MARKS.split(text):
        if part in (OPEN, SAID):
            opened[part] = at
        elif part in (CLOSE, UNSAID):
            begin = opened.pop(OPEN if part == CLOSE else SAID, None)
            if begin is not None:
                spans[OPEN if part == CLOSE else SAID].append((begin, at))
        else:
            parts.append(part)
            at += len(part)
    return Rendered("".join(parts), tuple(spans[SAID]), tuple(spans[OPEN]))


def _weighted(
    trained: Sequence[tuple[int, int]], messages: Sequence[Mapping[str, Any]]
) -> tuple[tuple[int, int], ...]:
    """Returns the spans of the assistant's messages whose weight is not 0. Raises Failure."""
    said = [message for message in messages if message["role"] == "assistant"]
    if len(said) != len(trained):
        count = f"{len(said)} messages of the assistant, and {len(trained)} turns in the rendered text"
        raise Failure(f"cannot leave out messages of weight 0: {count}")
    pairs = zip(said, trained, strict=True)
    return tuple(span for message, span in pairs if message.get("weight") != 0)
