"""What every objective is to an executor: the loss of hidden vectors, and what is recorded of it.

Shapes: B rows, T tokens, N = B·T, D embed, S segments of a row.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxthru.engine.model import Batch, Model
from jaxthru.engine.terms import Terms
from jaxthru.models import scopes


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Objective(abc.ABC):
    """What a step minimises. max_segments: most segments in a row. sources: how many the mix has. masked:
    whether documents say which of their tokens are trained on; the LM head is then computed for those alone.
    """

    model: Model
    max_segments: int
    sources: int
    masked: bool = False

    means: ClassVar[tuple[str, ...]] = ()
    """Its metrics beside the loss: each a mean over what the loss is a mean over."""

    @property
    def columns(self) -> Mapping[str, int]:
        """What it needs of a batch beside the fields that every batch has: float32 [rows, width], by name."""
        return {}

    @property
    def reference(self) -> "Objective | None":
        """Whose `answers` a step makes first, of the same parameters, and adds to the batch as `reference`;
        None if of none."""
        return None

    @property
    def kept(self) -> "Objective":
        """The same, with what its reference says in `columns`, for executors that walk the stages once."""
        return self

    @abc.abstractmethod
    def weight(self, batch: Batch) -> jax.Array:
        """Returns one over how many there are in a whole batch of what the loss is a mean over."""

    @abc.abstractmethod
    def __call__(
        self, params: Any, hidden_ND: jax.Array, batch: Batch, weight: jax.Array
    ) -> tuple[jax.Array, Terms]:
        """Returns what a step minimises of a batch or a part of it, and sums for the record: `loss`, the
        `means`, which are times `weight`, and of each source `source_loss` and `source_tokens`, which say by
        their ratio its mean: of trained tokens, or of what else the loss is a mean over, and then those are
        `trained_tokens`.

        params: without layers will do. hidden_ND: of the head. weight: that of the whole batch.
        """

    def cross_entropy(
        self, params: Any, hidden_ND: jax.Array, batch: Batch, weights_BT: jax.Array, z_loss: float = 0.0
    ) -> tuple[jax.Array, jax.Array]:
        """Returns Σ weights × cross-entropy, and each token's cross-entropy, [B, T] float32, nats.

        With gradients asked for, those of the logits are formed along with the sum. Where `masked`, nothing
        is computed for a token whose weight is 0.
        """
        with jax.named_scope(scopes.LOSS):
            minimised, cross_entropy_BT, _ = self.model.ops.linear_cross_entropy(
                hidden_ND,
                *self.model.lm_head(params),
                batch["targets"],
                weights_BT,
                z_loss,
                self.masked,
            )
        return minimised, cross_entropy_BT

    def by_source(self, values: jax.Array, source: jax.Array) -> jax.Array:
        """Returns the sum of values over each source's, float32 [sources]. source: int32, of each value."""
        numbers = jnp.arange(self.sources, dtype=jnp.int32).reshape(*(1,) * source.ndim, -1)
        belongs = source[..., None] == numbers
        return jnp.sum(jnp.where(belongs, values[..., None], 0.0), axis=tuple(range(values.ndim)))
