"""A language model as lm-eval asks it, https://github.com/EleutherAI/lm-evaluation-harness.

Texts become tokens, and requests rows, as in lm-eval's own class for Hugging Face models (HFLM), so that
scores can be compared. What differs is how rows are batched.
"""

import datetime
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from jaxthru.build.language_model import LanguageModel
from jaxthru.data.sources.chat.sandbox import Failure
from jaxthru.generation.sizes import size
from jaxthru.runtime.errors import InputError, TrainingError, did_you_mean, require

MAX_TOKENS = 256  # of an answer whose task names no limit, as everywhere in lm-eval
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
BUILT = (*LIMITS, "until", "do_sample", "temperature", "top_k", "top_p")
NEUTRAL = {"num_beams": 1, "repetition_penalty": 1, "length_penalty": 1, "min_p": 0}
"""Settings that are not built, and the values at which they change nothing."""


class Asked(NamedTuple):
    """How an answer is to be generated. until: texts that end it."""

    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    until: tuple[str, ...]


class JaxthruLM(TemplateLM):
    """Answers lm-eval's requests. max_length: tokens of context that a token is predicted from, at most."""

    def __init__(self, model: LanguageModel, batch: int = 16384):
        """batch: tokens of a pass, over all devices."""
        super().__init__()
        self.model, self.batch, self._stop = model, batch, model.stop
        self.max_length = model.longest or model.config.data.sequence

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self.model.tokenizer.end_of_text

    @functools.cached_property
    def prefix_token_id(self) -> int:
        """The token that stands before the first one of a text: BOS, also one that the tokenizer has and does
        not put there, or else what ends a document."""
        if self.model.tokenizer.bos is not None:
            return self.model.tokenizer.bos
        keys = json.loads(self.model.tokenizer.files.get("tokenizer_config.json", b"{}"))
        name = keys.get("bos_token")
        name = name.get("content") if isinstance(name, dict) else name
        ids = self.tok_encode(name, add_special_tokens=False) if name else []
        return ids[0] if len(ids) == 1 else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """What tells this tokenizer from others: its hash."""
        return self.model.tokenizer.hash

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns a conversation as the model's chat template writes it: to where the assistant is to begin,
        or without `add_generation_prompt` to the end of the last message's words, which are to go on. A
        template that refuses the system's messages gets none. Raises InputError."""
        try:
            text = self._rendered(chat_history, add_generation_prompt)
        except InputError:
            without = [message for message in chat_history if message["role"] != "system"]
            if len(without) == len(chat_history):
                raise
            text = self._rendered(without, add_generation_prompt)
        if add_generation_prompt:
            return text
        words = chat_history[-1]["content"].rstrip()
        return text[: text.rindex(words) + len(words)]

    def _rendered(self, messages: list[dict[str, str]], prompt: bool) -> str:
        template = self.model.tokenizer.chat_template
        self._stop = tuple(dict.fromkeys((*self.model.stop, *self.model.tokenizer.stop)))  # a turn ends, too
        try:
            return template.render(messages, prompt=prompt, day=datetime.date.today()).text
        except Failure as error:
            raise InputError(f"chat template {template.name}: {error}") from error

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the ids of a text. add_special_tokens: whether BOS stands first; None is as the tokenizer
        does it."""
        bos = self.model.tokenizer.bos
        ids = self.model.tokenizer.encode_prompt(string).tolist()
        if bos is None or add_special_tokens is not False or ids[:1] != [bos]:
            return ids
        spelled = string.startswith(self.model.tokenizer.borders.bos)
        return ids if spelled else ids[1:]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Returns of each (anything, context, continuation) the log-probability of the continuation in nats,
        and whether each of its tokens is the most probable one. Of a row that is too long the end counts."""
        rows = []
        for _, context, continuation in requests:
            said = f"a continuation of {len(continuation):,} tokens: must be at most {self.max_length:,}"
            require(len(continuation) <= self.max_length, f"{said}, the model's context")
            rows.append(tuple([*context, *continuation][-self.max_length - 1 :]))
        found = self._scores(list(dict.fromkeys(rows)), disable_tqdm)
        results = []
        for row, (_, _, continuation) in zip(rows, requests, strict=True):
            logprobs, likeliest = found[row]
            first = len(logprobs) - len(continuation)
            results.append((float(logprobs[first:].sum(dtype=np.float64)), bool(likeliest[first:].all())))
        if not all(np.isfinite(total) for total, _ in results):
            raise TrainingError("the model's logits are not finite: its parameters, or what they overflow to")
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text in nats. One that is longer than the context is cut into
        pieces of its length, as HFLM does; the tokenizer's BOS, too, is predicted."""
        windows, counts = [], []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            cut = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            pieces = [(None, *make_disjoint_window(pair)) for pair in cut]
            windows += pieces
            counts.append(len(pieces))
        found = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        return [sum(next(found)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns what follows each prompt, up to the first of its task's stop strings. Of a prompt that is
        too long the end counts."""
        groups: dict[Asked, list[int]] = {}
        for at, request in enumerate(requests):
            groups.setdefault(self._asked(request.args[1]), []).append(at)
        texts = [""] * len(requests)
        seed = 0  # one a batch: a prompt may be asked several times, for several answers
        with _progress(len(requests), "Generating", disable_tqdm) as progress:
            for asked, members in groups.items():
                room = self.max_length - asked.max_tokens
                prompts = [self._prompt(requests[at].args[0], room) for at in members]
                for batch in batches([len(prompt) + asked.max_tokens for prompt in prompts], self.batch):
                    found = self._answers([prompts[each] for each in batch], asked, seed)
                    for each, text in zip(batch, found, strict=True):
                        texts[members[each]] = text
                    seed += 1
                    progress.update(len(batch))
        return texts

    def _scores(self, rows: list[tuple[int, ...]], quiet: bool) -> dict[tuple[int, ...], Any]:
        """Returns the scores of each row."""
        found = {}
        with _progress(len(rows), "Scoring", quiet) as progress:
            for batch in batches([len(row) - 1 for row in rows], self.batch):
                members = [rows[at] for at in batch]
                scores = self.model.scores([np.array(row, np.int32) for row in members])
                found |= dict(zip(members, scores, strict=True))
                progress.update(len(batch))
        return found

    def _prompt(self, text: str, room: int) -> np.ndarray:
        """Returns the last ids of a prompt."""
        return np.array((self.tok_encode(text) or [self.prefix_token_id])[-room:], np.int32)

    def _answers(self, prompts: list[np.ndarray], asked: Asked, seed: int) -> list[str]:
        """Returns what follows each prompt of a batch."""
        special = (each for stop in asked.until if (each := self._special(stop)) is not None)
        made: list[list[int]] = [[] for _ in prompts]
        done = [False] * len(prompts)

        def enough(pieces: list[np.ndarray]) -> bool:
            for at, piece in enumerate(pieces):
                if not done[at]:
                    made[at] += piece.tolist()
                    done[at] = not len(piece) or _until(self._text(made[at]), asked.until)[1]
            return all(done)

        options = {name: getattr(asked, name) for name in ("max_tokens", "temperature", "top_k", "top_p")}
        ends = [*self._stop, *special]
        found = self.model.tokens(prompts, **options, seed=seed, stop=ends, on_tokens=enough)
        return [_until(self._text(each), asked.until)[0] for each in found]

    def _text(self, ids: Iterable[int]) -> str:
        return self.model.tokenizer.decode(ids, skip_special=True)

    def _special(self, text: str) -> int | None:
        """Returns the id of a special token, which texts do not show; None for other texts."""
        ids = self.tok_encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and not self._text(ids) else None

    def _asked(self, settings: dict[str, Any]) -> Asked:
        """Returns what a task's generation_kwargs ask for. Raises InputError for what is not built."""
        settings = {name: value for name, value in settings.items() if value is not None}
        until = settings.pop("until", ())
        limits = [settings.pop(name) for name in LIMITS if name in settings]
        temperature = settings.pop("temperature", None)
        if not settings.pop("do_sample", bool(temperature)):
            temperature = 0
        elif temperature is None:
            temperature = self.model.defaults.temperature or 1
        top_k, top_p = settings.pop("top_k", None), settings.pop("top_p", None)
        for name, value in settings.items():
            said = f"generation_kwargs: {name} = {value!r}"
            require(name in NEUTRAL, f"{said}: is not built{did_you_mean(name, BUILT)}")
            require(value == NEUTRAL[name], f"{said}: must be {NEUTRAL[name]}; more is not built")
        tokens = int((limits or [MAX_TOKENS])[0])
        said = f"max_gen_toks = {tokens}: must be at least 1, and leave room in the model's context of"
        require(1 <= tokens < self.max_length, f"{said} {self.max_length}")
        stops = (until,) if isinstance(until, str) else tuple(until)
        return Asked(tokens, float(temperature), top_k, top_p, tuple(filter(None, stops)))


def batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yields the places of rows by batches, longest first: what takes too much memory does so at once.

    lengths: of rows. tokens: of a batch, the empty ones of its padded rows among them. The number of rows
    depends on the padded length alone, so that there are few shapes to compile for.
    """
    order = sorted(range(len(lengths)), key=lambda at: -lengths[at])
    first = 0
    while first < len(order):
        count = max(1, tokens // size(lengths[order[first]]))
        count = 1 << (count.bit_length() - 1)
        yield order[first : first + count]
        first += count


def _until(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Returns a text up to the first of some others in it, and whether there is one."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text, bool(ends)


def _progress(total: int, what: str, quiet: bool) -> tqdm:
    """Returns a bar for terminals."""
    return tqdm(total=total, desc=what, disable=quiet or None)
