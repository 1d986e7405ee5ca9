"""Samples of a model's text while it trains: what it makes of `evaluate.prompts`."""

import dataclasses
from typing import Any

import numpy as np

from jaxthru.data.tokenizer import Tokenizer
from jaxthru.engine.model import Model
from jaxthru.generation.generator import Generator
from jaxthru.generation.sampling import Sampling
from jaxthru.training.evaluate import EvaluateConfig, Sample

Tree = Any


class Samples:
    """Continues the prompts with the parameters of the moment: the same programs each time."""

    def __init__(
        self, config: EvaluateConfig, model: Model, tokenizer: Tokenizer, longest: int | None, seed: int
    ):
        """longest: tokens in a row of the model. seed: of the samples. Raises InputError for a prompt that is
        too long."""
        self.config, self.tokenizer = config, tokenizer
        self._sampling = Sampling(temperature=config.temperature, seed=seed, max_tokens=config.max_tokens)
        self._prompts: list[np.ndarray] = [tokenizer.encode_prompt(prompt) for prompt in config.prompts]
        self._generator = Generator(dataclasses.replace(model, policy="none"), None, longest)
        self._generator.check(self._prompts, self._sampling)

    def __call__(self, params: Tree) -> list[Sample]:
        """Returns what follows each prompt. params: of the training state, wherever they live."""
        generator = self._generator.with_parameters(params)
        found = generator.generate(self._prompts, self._sampling, (self.tokenizer.end_of_text,))
        texts = [self.tokenizer.decode(each.tokens, skip_special=True) for each in found]
        return [
            {"prompt": prompt, "text": text} for prompt, text in zip(self.config.prompts, texts, strict=True)
        ]
