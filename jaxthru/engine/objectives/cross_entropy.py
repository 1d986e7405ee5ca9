"""The cross-entropy of the next token: what pre-training minimises, and supervised fine-tuning.

Shapes: N tokens of all rows, D embed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.engine.gradients import token_weight
from jaxthru.engine.model import Batch
from jaxthru.engine.objectives.objective import Objective
from jaxthru.engine.terms import Terms


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CrossEntropy(Objective):
    """A mean over the tokens of the whole batch that are trained on. z_loss: weight of log(Z)²."""

    z_loss: float = 0.0

    def weight(self, batch: Batch) -> jax.Array:
        """Returns one over the tokens of a whole batch that are trained on."""
        return token_weight(batch)

    def __call__(
        self, params: Any, hidden_ND: jax.Array, batch: Batch, weight: jax.Array
    ) -> tuple[jax.Array, Terms]:
        """Returns `weight` × the summed loss, and sums, see `Objective`."""
        mask = batch["loss_mask"]
        minimised, cross_entropy = self.cross_entropy(params, hidden_ND, batch, mask * weight, self.z_loss)
        cross_entropy = cross_entropy * mask
        sums = {
            "loss": jnp.sum(cross_entropy) * weight,
            "source_loss": self.by_source(cross_entropy, batch["source"]),
            "source_tokens": self.by_source(mask, batch["source"]),
        }
        return minimised, jax.lax.stop_gradient(sums)
