"""Samples of a model's text while it trains: what it makes of `evaluate.prompts`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.engine.model import Model
from jaxthru.generation.generator import Generator, check_context
from jaxthru.generation.sampling import Sampling
from jaxthru.training.evaluate import EvaluateConfig, Sample

Tree = Any


class Samples:
    """Continues the prompts with the parameters of the moment, by the same programs each time."""

    def __init__(
        self,
        config: EvaluateConfig,
        model: Model,
        tokenizer: Tokenizer,
        longest: int | None,
        seed: int,
        stop: Sequence[int] = (),
    ):
        """longest: tokens in a row of the model. seed: of the samples. stop: ids that end a text, beside the
        tokenizer's. Raises InputError for a prompt that is too long, or of no tokens."""
        self._stop = (*stop, *tokenizer.learnt_stop)
        self.config, self.tokenizer, self._model, self._longest = config, tokenizer, model, longest
        self._sampling = Sampling(temperature=config.temperature, seed=seed, max_tokens=config.max_tokens)
        self._prompts = [_encoded(tokenizer, prompt) for prompt in config.prompts]
        self._generator: Generator | None = None
        for prompt, ids in zip(config.prompts, self._prompts, strict=True):
            check_context(f"evaluate.prompts: {prompt!r}", len(ids), config.max_tokens, longest)

    def __call__(self, params: Tree) -> list[Sample]:
        """Returns what follows each prompt. params: of the training state, wherever they live."""
        if self._generator is None:
            self._generator = Generator(self._model, params, self._longest)
        else:
            self._generator.take(params)
        found = self._generator.generate(self._prompts, self._sampling, self._stop)
        self._generator.params = None  # a copy, of which the next step has no need
        texts = [self.tokenizer.decode(each.tokens, skip_special=True) for each in found]
        return [
            {"prompt": prompt, "text": text} for prompt, text in zip(self.config.prompts, texts, strict=True)
        ]


def _encoded(tokenizer: Tokenizer, prompt: str) -> np.ndarray:
    """Returns the ids of a prompt: of one who trains on conversations, what a user says."""
    if tokenizer.talks:
        return tokenizer.encode_conversation([{"role": "user", "content": prompt}])
    return tokenizer.encode_prompt(prompt)
