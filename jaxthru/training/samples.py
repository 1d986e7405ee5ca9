"""Samples of a model's text while it trains: what it makes of `evaluate.prompts`."""

from typing import Any

from jaxthru.data.tokenizer import Tokenizer
from jaxthru.engine.model import Model
from jaxthru.generation.generator import Generator
from jaxthru.generation.sampling import Sampling
from jaxthru.runtime.errors import require
from jaxthru.training.evaluate import EvaluateConfig, Sample

Tree = Any


class Samples:
    """Continues the prompts with the parameters of the moment, by the same programs each time."""

    def __init__(
        self, config: EvaluateConfig, model: Model, tokenizer: Tokenizer, longest: int | None, seed: int
    ):
        """longest: tokens in a row of the model. seed: of the samples. Raises InputError for a prompt that is
        too long, or of no tokens."""
        self.config, self.tokenizer, self._model, self._longest = config, tokenizer, model, longest
        self._sampling = Sampling(temperature=config.temperature, seed=seed, max_tokens=config.max_tokens)
        self._prompts = [tokenizer.encode_prompt(prompt) for prompt in config.prompts]
        self._generator: Generator | None = None
        for prompt, ids in zip(config.prompts, self._prompts, strict=True):
            said = f"evaluate.prompts: {prompt!r} is {len(ids)} tokens, and with evaluate.max_tokens = "
            total = len(ids) + config.max_tokens
            fits = longest is None or total <= longest
            require(len(ids) > 0, f"evaluate.prompts: {prompt!r} has no tokens; leave it out")
            require(fits, f"{said}{config.max_tokens} {total}: more than the model's context of {longest}")

    def __call__(self, params: Tree) -> list[Sample]:
        """Returns what follows each prompt. params: of the training state, wherever they live."""
        if self._generator is None:
            self._generator = Generator(self._model, params, self._longest)
        else:
            self._generator.take(params)
        found = self._generator.generate(self._prompts, self._sampling, (self.tokenizer.end_of_text,))
        self._generator.params = None  # a copy, of which the next step has no need
        texts = [self.tokenizer.decode(each.tokens, skip_special=True) for each in found]
        return [
            {"prompt": prompt, "text": text} for prompt, text in zip(self.config.prompts, texts, strict=True)
        ]
