"""A conversation with a model: its chat template writes what was said, and the model the next turn."""

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxthru.build.language_model import LanguageModel
from jaxthru.runtime.errors import require

Message = dict[str, Any]
"""{"role": "system", "user" or "assistant", "content": its words}."""


@dataclasses.dataclass
class Conversation:
    """messages: what was said so far. options: of `LanguageModel.tokens`, as temperature; of which
    `max_tokens` is what an answer has at most, and less where the model's context leaves no room."""

    model: LanguageModel
    messages: list[Message] = dataclasses.field(default_factory=list)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, model: LanguageModel, system: str | None = None, **options: Any) -> "Conversation":
        """Returns a new conversation. system: what the model is told before it. Raises InputError for a model
        without a chat template."""
        messages = [] if system is None else [{"role": "system", "content": system}]
        model.tokenizer.stop  # noqa: B018 (a template that cannot be is said now)
        return cls(model, messages, options)

    @property
    def prompt(self) -> np.ndarray:
        """The ids of what was said, int32, to where the assistant is to begin. Raises InputError."""
        return self.model.tokenizer.encode_conversation(self.messages, day=datetime.date.today())

    def answer(self, words: str, on_text: Callable[[str], None] | None = None) -> str:
        """Returns what the model says to a user's words; both are remembered.

        on_text: is given the answer piece by piece, as it is made. Raises InputError, and remembers nothing,
        for words that the template refuses, or that fill the model's context.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": words})
        try:
            text = self._next(on_text)
        except BaseException:  # an interrupt too
            self.messages = before
            raise
        self.messages.append({"role": "assistant", "content": text})
        return text

    def _next(self, on_text: Callable[[str], None] | None) -> str:
        tokenizer, prompt = self.model.tokenizer, self.prompt
        options = {"max_tokens": 512, "seed": 0} | self.options
        if self.model.longest is not None:
            room = self.model.longest - len(prompt)
            said = f"the conversation's {len(prompt)} tokens fill the model's context of {self.model.longest}"
            require(room > 0, f"{said}: begin a new one")
            options["max_tokens"] = min(options["max_tokens"], room)
        options["seed"] += len(self.messages)  # not the same draws in every turn
        made, shown = [], ""

        def show(tokens: Sequence[np.ndarray]) -> None:
            nonlocal shown
            made.extend(tokens[0].tolist())
            text = tokenizer.decode(made, skip_special=True)
            if not text.endswith("\ufffd") and text.startswith(shown):  # within a character
                on_text(text[len(shown) :])
                shown = text

        stop = tuple(dict.fromkeys((*self.model.stop, *tokenizer.stop)))
        (ids,) = self.model.tokens([prompt], stop=stop, on_tokens=show if on_text else None, **options)
        text = tokenizer.decode(ids, skip_special=True)
        if on_text and text.startswith(shown):
            on_text(text[len(shown) :])
        return text
