"""The log-probability of each document's answer: of its tokens that are trained on, together.

Shapes: B rows, T tokens, N = B·T, D embed, S segments of a row.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.engine.model import Batch, Model
from jaxthru.engine.objectives.objective import Objective
from jaxthru.engine.terms import Terms


class Answers(Objective):
    """Nothing to minimise: `answers` [B, S], whole on each device, is what a reference model is asked for."""

    def weight(self, batch: Batch) -> jax.Array:
        """Returns 1."""
        return jnp.ones((), jnp.float32)

    def __call__(
        self, params: Any, hidden_ND: jax.Array, batch: Batch, weight: jax.Array
    ) -> tuple[jax.Array, Terms]:
        """Returns 0, and `answers`, see `log_probabilities`."""
        answers_BS = log_probabilities(self, params, hidden_ND, batch)
        return jnp.zeros((), jnp.float32), {"answers": self.model.ops.constrain(answers_BS, None, None)}


def answers_of(objective: Objective, model: Model) -> Answers:
    """Returns what asks a model for the answers that an objective is about."""
    rest = {"max_segments": objective.max_segments, "sources": objective.sources}
    return Answers(model=model, masked=objective.masked, **rest)


def log_probabilities(objective: Objective, params: Any, hidden_ND: jax.Array, batch: Batch) -> jax.Array:
    """Returns the log-probability of what is trained on in each segment, [B, S] float32, nats; without a
    gradient, and so for one product of the LM head."""
    mask = batch["loss_mask"]
    params, hidden_ND = jax.lax.stop_gradient((params, hidden_ND))
    _, cross_entropy_BT = objective.cross_entropy(params, hidden_ND, batch, mask)
    own = numbered(batch, objective.max_segments)
    return -jnp.sum(jnp.where(own, (cross_entropy_BT * mask)[..., None], 0.0), axis=1)


def numbered(batch: Batch, segments: int) -> jax.Array:
    """Returns which of so many segments each token belongs to, bool [B, T, S]; to none in padding. A
    comparison, which fuses into what is summed over it."""
    numbers = 1 + jnp.arange(segments, dtype=jnp.int32)
    return batch["segment_ids"][..., None] == numbers[None, None]
