"""The router of a mixture of experts: which experts each token goes to, and what keeps them equally busy.

All of it is float32 and whole on each device: the scores of experts lie close together, and a rounding would
choose others. Padding goes to no expert, and counts for nothing.

Shapes: B rows, T tokens, N = B·T, D embed, E experts, K experts of a token, L layers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxthru.models import scopes
from jaxthru.models.experts import routed
from jaxthru.models.layers import Weight, drawn
from jaxthru.models.split_matmul import router_matmul
from jaxthru.models.stage import Context, Extras, Metric
from jaxthru.runtime.weights import WeightInfo
from pallas_kernels.routing import Routing

Tree = Any
TOKENS = "expert_tokens"
"""Metric: how many tokens each expert of a layer was given in a step, int32 [E]."""


class Router(nnx.Module):
    """Scores all experts for each token by a linear layer, and chooses some of them.

    The bias, where there is one (`bias_rate`), takes part in the choice alone; it has no gradient, and is
    moved by `BiasUpdate`.
    """

    def __init__(self, config: Any, rngs: nnx.Rngs):
        # No matrix: its gradient and state are float32, and nothing splits, decays or orthogonalises it.
        info = WeightInfo((None, "routed"), "bias", inputs=(0,))
        self.weight = drawn(rngs, info, (config.embed, config.experts), config.embed**-0.5)
        if config.bias_rate:
            still = WeightInfo(("routed",), "bias", trains=False)
            self.bias = Weight(jnp.zeros((config.experts,), jnp.float32), info=still)
        self.biased, self.losses = bool(config.bias_rate), (config.aux_loss, config.router_z_loss)
        self.rule = {
            **{"top_k": config.top_k, "score": config.score, "normalise": config.normalise},
            **{"scale": config.routed_scale, "groups": config.expert_groups},
            **{"top_groups": config.top_groups, "balanced": config.force_load_balancing},
        }

    @jax.named_scope(scopes.ROUTER)
    def __call__(self, x_ND: jax.Array, context: Context) -> tuple[Routing, Extras]:
        """Returns the routing, of tokens that are sharded as between blocks, and what is minimised and
        counted of it."""
        ops, valid_BT = context.ops, context.valid
        valid_N = ops.constrain(valid_BT.reshape(-1), "tokens")
        logits_NE = ops.constrain(router_matmul(x_ND, self.weight[...], ops.for_gpu), "tokens", None)
        bias_E = self.bias[...] if self.biased else None
        routing = routed(ops, logits_NE, valid_N, bias_E, **self.rule)
        aux, z = self.losses
        losses = {}
        if aux:
            losses["balance_loss"] = aux * balance_loss(routing, valid_BT)
        if z:
            losses["router_z_loss"] = z * z_loss(logits_NE, valid_BT)
        return routing, Extras(losses, {TOKENS: routing.counts_E})


def balance_loss(routing: Routing, valid_BT: jax.Array) -> jax.Array:
    """Returns how unequally experts are used, 1 where all are used alike: of each row, E × Σ over experts of
    the share of its assignments × the mean of its tokens' scores, each token's divided by their sum; then the
    mean over rows.

    By row, and of a row's valid tokens, it is the same for any number of micro-batches and on any mesh.
    Source: Fedus et al. 2021 (arXiv:2101.03961), by sequence as DeepSeek-V3 (arXiv:2412.19437).
    """
    experts = routing.scores_NE.shape[-1]
    scores_BTE = routing.scores_NE.reshape(*valid_BT.shape, experts)
    sums_BT = jnp.sum(scores_BTE, axis=-1)
    shares_BTE = scores_BTE / jnp.where(valid_BT, sums_BT, 1.0)[..., None]
    ids_BR = routing.ids_NK.reshape(len(valid_BT), -1)
    counts_BE = jnp.sum(ids_BR[..., None] == jnp.arange(experts)[None, None], axis=1, dtype=jnp.int32)
    used_BE = counts_BE.astype(jnp.float32)
    used_BE /= jnp.maximum(jnp.sum(used_BE, axis=-1, keepdims=True), 1.0)
    mean_BE = _mean_of_valid(shares_BTE, valid_BT)
    return experts * jnp.mean(jnp.sum(used_BE * mean_BE, axis=-1))


def z_loss(logits_NE: jax.Array, valid_BT: jax.Array) -> jax.Array:
    """Returns the mean over rows of their valid tokens' mean log(Σ exp(logits))², which keeps logits small.
    Source: Zoph et al. 2022 (arXiv:2202.08906)."""
    logits_NE = jnp.where(valid_BT.reshape(-1, 1), logits_NE, 0.0)
    squares_BT = jnp.square(jax.nn.logsumexp(logits_NE, axis=-1)).reshape(valid_BT.shape)
    return jnp.mean(_mean_of_valid(squares_BT[..., None], valid_BT))


def _mean_of_valid(values_BTE: jax.Array, valid_BT: jax.Array) -> jax.Array:
    """Returns the mean over each row's valid tokens, [B, E]; 0 of a row of padding."""
    total_BE = jnp.sum(jnp.where(valid_BT[..., None], values_BTE, 0.0), axis=1)
    count_B = jnp.sum(valid_BT, axis=1, dtype=jnp.int32)
    return total_BE / jnp.maximum(count_B, 1).astype(jnp.float32)[:, None]


@dataclasses.dataclass(frozen=True)
class BiasUpdate:
    """Balances experts without a loss: the bias of each that was given fewer tokens than the mean rises by
    `rate`, that of each that was given more falls (arXiv:2408.15664). A `Stage.advance`.

    path: where the router is in the layer's params.
    """

    rate: float
    path: tuple[str, ...]

    def __call__(self, params: Tree, counted: Mapping[str, jax.Array]) -> Tree:
        """Returns the layer's params with the bias moved. counted: `expert_tokens`, int32 [E]."""
        return _replaced(params, self.path, lambda bias_E: bias_E + self.rate * below_mean(counted[TOKENS]))


def below_mean(counts_E: jax.Array) -> jax.Array:
    """Returns 1 where a count is below the mean, -1 above, and 0 where it is equal, float32; exact, of
    integers."""
    total, experts = jnp.sum(counts_E), counts_E.size
    floor, ceiling = total // experts, -(-total // experts)
    return ((counts_E < ceiling).astype(jnp.int32) - (counts_E > floor).astype(jnp.int32)).astype(jnp.float32)


def _replaced(tree: Tree, path: tuple[str, ...], change: Any) -> Tree:
    if not path:
        return change(tree)
    return {**tree, path[0]: _replaced(tree[path[0]], path[1:], change)}


def load(counts_LE: jax.Array) -> dict[str, jax.Array]:
    """Returns what the record has of the tokens of each expert: these, `expert_tokens` [L, E]; and of each
    layer [L] `expert_load_max`, those of the busiest expert over the mean, 1 where all are alike, and
    `expert_entropy`, of the tokens' distribution over experts, as a share of log E: 1 where all are alike, 0
    where one expert has them all."""
    total_L1 = jnp.maximum(jnp.sum(counts_LE, axis=-1, keepdims=True), 1)
    share_LE = counts_LE.astype(jnp.float32) / total_L1.astype(jnp.float32)
    experts = counts_LE.shape[-1]
    entropy_L = -jnp.sum(jax.scipy.special.xlogy(share_LE, share_LE), axis=-1)
    return {
        TOKENS: counts_LE,
        "expert_load_max": experts * jnp.max(share_LE, axis=-1),
        "expert_entropy": entropy_L / jnp.log(jnp.float32(max(experts, 2))),
    }


METRICS = {TOKENS: Metric("layers", shown=load)}
