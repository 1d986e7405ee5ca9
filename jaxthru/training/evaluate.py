"""Evaluation: the held-out loss, per source, and samples of the model's text."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxthru.engine.step import Batch
from jaxthru.engine.terms import Terms
from jaxthru.runtime.errors import require


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """every: steps between evaluations; 0 evaluates before the first and after the last step alone.
    rows: held-out rows in one evaluation, shared evenly by the sources; 0 is off.
    prompts: texts that the model continues at each evaluation; in a run of conversations, what a user says
        and the model answers. The samples are printed, and kept in eval.jsonl.
    max_tokens: at most so many tokens a sample.
    temperature: of the samples; 0 takes the most probable token each time."""

    every: int = 0
    rows: int = 64
    prompts: tuple[str, ...] = ()
    max_tokens: int = 64
    temperature: float = 0.0

    def __post_init__(self):
        require(self.every >= 0, f"evaluate.every = {self.every}: must be at least 0")
        require(self.rows >= 0, f"evaluate.rows = {self.rows}: must be at least 0")
        require(self.max_tokens >= 1, f"evaluate.max_tokens = {self.max_tokens}: must be at least 1")
        require(self.temperature >= 0, f"evaluate.temperature = {self.temperature}: must be at least 0")
        require(all(self.prompts), "evaluate.prompts: none may be empty")


Sample = dict[str, str]
"""`prompt`, and the `text` that the model continues it with."""


class Evaluation:
    """Measures the loss on the same held-out batches each time."""

    def __init__(
        self,
        config: EvaluateConfig,
        sums: Callable[[Any, Batch, jax.Array], Terms],
        batches: Sequence[Batch],
        sources: Sequence[str],
        samples: Callable[[Any], list[Sample]] | None = None,
        means: Sequence[str] = (),
    ):
        """sums: (params, batch, weight) -> the terms of an objective. samples: params -> what the model makes
        of each prompt. means: the objective's."""
        self.config, self.sums, self.batches, self.sources = config, sums, batches, sources
        self.samples, self.means = samples, means

    def due(self, step: int, last: bool) -> bool:
        """Says whether to evaluate after `step` updates. last: it is the run's last."""
        return step == 0 or last or (self.config.every > 0 and step % self.config.every == 0)

    def __call__(self, step: int, params: Any) -> dict[str, Any]:
        """Returns the row for eval.jsonl: the mean loss over all held-out tokens, or over what else the
        objective's is a mean, and by source; the objective's means; and the samples where there are
        prompts."""
        one = jnp.ones((), jnp.float32)
        sums = jax.device_get([self.sums(params, batch, one) for batch in self.batches])
        nothing = np.zeros(len(self.sources))
        loss = np.sum([nothing, *(s["source_loss"] for s in sums)], axis=0, dtype=np.float64)
        count = np.sum([nothing, *(s["source_tokens"] for s in sums)], axis=0, dtype=np.float64)
        row = {
            "step": step,
            "loss": float(loss.sum() / count.sum()) if count.any() else None,
            "loss_by_source": mean_by_source(self.sources, loss, count),
            "tokens": int(
                sum(s.get("trained_tokens", s["source_tokens"].sum(dtype=np.float64)) for s in sums)
            ),
        }
        for name in self.means:
            total = np.sum([s[name] for s in sums], dtype=np.float64)
            row[name] = float(total / count.sum()) if count.any() else None
        return row | ({"samples": self.samples(params)} if self.samples else {})


class NoEvaluation:
    """Evaluation switched off."""

    def due(self, step: int, last: bool) -> bool:
        return False


def mean_by_source(sources: Sequence[str], loss: np.ndarray, tokens: np.ndarray) -> dict[str, float | None]:
    """Returns each source's mean loss; None for one without tokens."""
    return {
        name: float(total / count) if count else None
        for name, total, count in zip(sources, loss, tokens, strict=True)
    }
