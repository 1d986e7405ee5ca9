"""Direct preference optimisation (arXiv:2305.18290): of two answers the chosen one becomes more probable.

A pair is two documents that share a prompt: the chosen answer's and the rejected one's. They follow one
another in a row, so that of its segments 2k+1 and 2k+2 are pair k's, and only answers are trained on.

Shapes: B rows, T tokens, N = B·T, D embed, S segments of a row, K = S // 2 pairs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxthru.engine.model import Batch, Model
from jaxthru.engine.objectives.answers import Answers, answers_of, log_probabilities, numbered
from jaxthru.engine.objectives.objective import Objective
from jaxthru.engine.terms import Terms


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DPO(Objective):
    """-log σ(chosen reward - rejected reward), a mean over the pairs of the whole batch.

    An answer's reward is `beta` times by how much more probable it is than to the reference model. base: that
    model where it is one of the same parameters, as the one without its adapters: a step then asks it first.
    Without one its log-probabilities come with the batch: `reference` [B, S], of each segment.

    The gradient of a token's logits needs the whole pair's rewards first. So the LM head is gone over twice:
    once for the log-probabilities, one product, and once for a cross-entropy whose weights are the loss'
    derivatives by them, three products. To keep hidden vectors and go over it in the backward pass would be
    four products too.
    """

    beta: float
    base: Model | None = None
    masked: bool = True

    means: ClassVar[tuple[str, ...]] = (
        *("reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward"),
        *("chosen_log_probability", "rejected_log_probability"),
    )

    @property
    def columns(self) -> Mapping[str, int]:
        """The reference's log-probability of each segment, where it is not asked in the step."""
        return {} if self.base else {"reference": self.max_segments}

    @property
    def reference(self) -> Answers | None:
        """What the base makes of each segment."""
        return self.base and answers_of(self, self.base)

    @property
    def kept(self) -> "DPO":
        """The same, with the base's log-probabilities in the batch."""
        return dataclasses.replace(self, base=None)

    def weight(self, batch: Batch) -> jax.Array:
        """Returns one over the pairs of a whole batch."""
        return 1.0 / jnp.maximum(jnp.sum(_pairs_in(batch)).astype(jnp.float32), 1.0)

    def __call__(
        self, params: Any, hidden_ND: jax.Array, batch: Batch, weight: jax.Array
    ) -> tuple[jax.Array, Terms]:
        """Returns `weight` × the pairs' summed loss, and sums, see `Objective`: those of sources, too, count
        pairs."""
        answers_BS = log_probabilities(self, params, hidden_ND, batch)
        chosen_BK, rejected_BK = _by_pair(self.beta * (answers_BS - batch["reference"]))
        exists_BK = jnp.arange(self.max_segments // 2)[None] < _pairs_in(batch)[:, None]
        margin_BK = chosen_BK - rejected_BK
        loss_BK = jnp.where(exists_BK, jax.nn.softplus(-margin_BK), 0.0)

        # By the log-probability of the chosen answer; by that of the rejected one it is the opposite.
        slope_BK = jnp.where(exists_BK, -self.beta * weight * jax.nn.sigmoid(-margin_BK), 0.0)
        slope_BS = jnp.stack([slope_BK, -slope_BK], axis=-1).reshape(len(slope_BK), -1)
        own = numbered(batch, slope_BS.shape[1])
        slope_BT = jnp.sum(jnp.where(own, slope_BS[:, None], 0.0), axis=-1)
        weights_BT = -slope_BT * batch["loss_mask"]  # of cross-entropy, which is -log-probability
        same_slope, _ = self.cross_entropy(params, hidden_ND, batch, weights_BT)
        loss = jnp.sum(loss_BK) * weight
        minimised = same_slope + jax.lax.stop_gradient(loss - same_slope)

        def mean(values_BK: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(exists_BK, values_BK, 0.0)) * weight

        log_chosen_BK, log_rejected_BK = _by_pair(answers_BS)
        source_BK = jnp.broadcast_to(batch["source"][:, :1], loss_BK.shape)
        sums = {
            "loss": loss,
            "source_loss": self.by_source(loss_BK, source_BK),
            "source_tokens": self.by_source(exists_BK.astype(jnp.float32), source_BK),
            "trained_tokens": jnp.sum(batch["loss_mask"]),
            "reward_accuracy": mean((margin_BK > 0).astype(jnp.float32)),
            "reward_margin": mean(margin_BK),
            "chosen_reward": mean(chosen_BK),
            "rejected_reward": mean(rejected_BK),
            "chosen_log_probability": mean(log_chosen_BK),
            "rejected_log_probability": mean(log_rejected_BK),
        }
        return minimised, jax.lax.stop_gradient(sums)


def _pairs_in(batch: Batch) -> jax.Array:
    """Returns how many pairs each row has, int32 [B]."""
    return jnp.max(batch["segment_ids"], axis=1) // 2


def _by_pair(values_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what belongs to the chosen answers and to the rejected ones, [B, K] each."""
    K = values_BS.shape[1] // 2
    return values_BS[:, 0 : 2 * K : 2], values_BS[:, 1 : 2 * K : 2]
