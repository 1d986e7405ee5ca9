"""The training loss of a batch: the cross-entropy that a step minimises, and what is recorded of it.

Shapes: B rows, T tokens, N = B·T, D embed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.engine.model import Batch, Model
from jaxthru.engine.terms import Terms
from jaxthru.models import scopes


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
    """The cross-entropy of a batch. max_segments: most segments in a row. sources: how many the mix has."""

    model: Model
    z_loss: float
    max_segments: int
    sources: int

    def __call__(
        self, params: Any, hidden_ND: jax.Array, batch: Batch, weight: jax.Array
    ) -> tuple[jax.Array, Terms]:
        """Returns `weight` × the summed loss to minimise, and sums of cross-entropy for the record.

        params: without layers will do. hidden_ND: of the head. weight: one over the tokens that count, of the
        whole batch where this is a part of it. With gradients asked for, those of the logits are formed along
        with the loss.
        """
        mask = batch["loss_mask"]
        with jax.named_scope(scopes.LOSS):
            minimised, cross_entropy, _ = self.model.ops.linear_cross_entropy(
                hidden_ND,
                *self.model.lm_head(params),
                batch["targets"],
                mask * weight,
                self.z_loss,
            )
        cross_entropy = cross_entropy * mask
        sums = {
            "loss": jnp.sum(cross_entropy) * weight,
            "source_loss": self.by_source(cross_entropy, batch),
            "source_tokens": self.by_source(mask, batch),
        }
        return minimised, jax.lax.stop_gradient(sums)

    def by_source(self, values_BT: jax.Array, batch: Batch) -> jax.Array:
        """Returns the sum of `values_BT` over each source's tokens, float32 [sources]."""
        belongs = batch["source"][..., None] == jnp.arange(self.sources, dtype=jnp.int32)[None, None]
        return jnp.sum(jnp.where(belongs, values_BT[..., None], 0.0), axis=(0, 1))
