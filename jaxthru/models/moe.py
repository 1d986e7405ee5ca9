"""Mixtures of experts: a decoder whose layers have many feed-forward networks, a few of them for each token.

Covers Mixtral (arXiv:2401.04088), OLMoE (arXiv:2409.02060: `qk_norm_together`), Qwen3-MoE (arXiv:2505.09388)
and, of DeepSeek-V3 (arXiv:2412.19437), all but its attention. No token is dropped, whatever the router does.

Shapes: N tokens, D embed, E experts, M width of an expert.
"""

import dataclasses
import itertools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxthru.models import flops, llama, router, scopes
from jaxthru.models.experts import experts
from jaxthru.models.layers import Attention, SwiGLU, Weight, drawn
from jaxthru.models.moe_published import PUBLISHED as PUBLISHED
from jaxthru.models.remat import EXPERT_HIDDEN, EXPERT_ROWS, ROUTING
from jaxthru.models.router import Router
from jaxthru.models.stage import Chain, Context, Extras, Group, Mixture, Stage, module_stage, repeated
from jaxthru.runtime.errors import require
from jaxthru.runtime.weights import WeightInfo


@dataclasses.dataclass(frozen=True)
class Config(llama.Config):
    """A decoder of llama's attention and, in each layer, a mixture of experts.

    mlp: inner width of the SwiGLU of dense layers, see dense_first.
    qk_norm_together: with qk_norm, a token's heads are normed as one, as OLMoE has it, not each by itself.
    experts: in each layer. top_k: that each token goes to. expert_mlp: inner width of each, a SwiGLU.
    shared_mlp: inner width of a SwiGLU that every token goes through beside its experts; 0 is none.
    shared_gate: its output is multiplied by a sigmoid of its input, one number a token.
    score: of the router's logits: `softmax` over all experts, `sigmoid` of each, or `softmax_of_chosen`, over
        those that were chosen, as Mixtral has it.
    normalise: a token's weights are divided by their sum. routed_scale: then multiplied by this.
    expert_groups: experts lie in so many groups. top_groups: a token's are of so many of them, whose two best
        have the largest sum.
    bias_rate: balances experts without a loss, by a bias in the choice that moves by so much a step; 0 is
        off. DeepSeek-V3 has 0.001.
    aux_loss: weight of a loss that balances experts within each row; 0 is off. Summed over layers.
    router_z_loss: weight of a loss that keeps the router's logits small; 0 is off. Summed over layers.
    dense_first: so many first layers have a SwiGLU of width `mlp` and no experts.
    force_load_balancing: for benchmarks: experts are chosen in turn, whatever the router says, so that all
        are given equally many tokens; its weights and their gradient are still those of the chosen ones.
    """

    TRAINING = ("aux_loss", "router_z_loss", "force_load_balancing")

    qk_norm_together: bool = False
    experts: int = 8
    top_k: int = 2
    expert_mlp: int = 256
    shared_mlp: int = 0
    shared_gate: bool = False
    score: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    normalise: bool = True
    routed_scale: float = 1.0
    expert_groups: int = 1
    top_groups: int = 1
    bias_rate: float = 0.0
    aux_loss: float = 0.0
    router_z_loss: float = 0.0
    dense_first: int = 0
    force_load_balancing: bool = False

    def __post_init__(self):
        super().__post_init__()
        for name in ("experts", "top_k", "expert_mlp", "expert_groups", "top_groups"):
            value = getattr(self, name)
            require(value >= 1, f"model.{name} = {value}: must be at least 1")
        for name in ("shared_mlp", "bias_rate", "aux_loss", "router_z_loss"):
            value = getattr(self, name)
            require(value >= 0, f"model.{name} = {value}: must be at least 0")
        require(self.routed_scale > 0, f"model.routed_scale = {self.routed_scale}: must be above 0")
        first = f"model.dense_first = {self.dense_first}"
        require(0 <= self.dense_first < self.layers, f"{first}: must be from 0 to {self.layers - 1}")
        total, groups = self.experts, self.expert_groups
        require(self.top_k <= total, f"model.top_k = {self.top_k}: must be at most model.experts = {total}")
        require(total % groups == 0, f"model.expert_groups = {groups}: must divide model.experts = {total}")
        said = f"model.top_groups = {self.top_groups}"
        require(self.top_groups <= groups, f"{said}: must be at most model.expert_groups = {groups}")
        limited = self.top_groups < groups
        require(
            not limited or total // groups >= 2,
            f"model.expert_groups = {groups}: a group is chosen by its two best experts and must have two, "
            f"which model.experts = {total} is too few for",
        )
        require(
            self.top_k <= self.top_groups * (total // groups),
            f"{said}: hold {self.top_groups * (total // groups)} experts, fewer than model.top_k = "
            f"{self.top_k}",
        )
        require(
            not self.shared_gate or self.shared_mlp > 0,
            "model.shared_gate = True: is the shared expert's; set model.shared_mlp",
        )
        require(
            not self.qk_norm_together or self.qk_norm,
            "model.qk_norm_together = True: says how model.qk_norm norms; set that too",
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        forced = "model.force_load_balancing = True: experts are chosen in turn; no routing is learned"
        return (forced,) if self.force_load_balancing else ()


class MixtureOfExperts(nnx.Module):
    """The feed-forward layer of each token: its experts', weighted by the router, and the shared one."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        d, e, m = config.embed, config.experts, config.expert_mlp
        self.router = Router(config, rngs)
        gate_up = WeightInfo(("experts", "embed", None, "mlp"), "matrix", inputs=(1,), stack=(0, 2))
        self.gate_up = drawn(rngs, gate_up, (e, d, 2, m), d**-0.5)
        down = WeightInfo(("experts", "mlp", "embed"), "matrix", inputs=(1,), stack=(0,))
        self.down = drawn(rngs, down, (e, m, d), (m * 2 * config.layers) ** -0.5)
        self.shares, self.gates = config.shared_mlp > 0, config.shared_gate
        if self.shares:
            self.shared = SwiGLU(dataclasses.replace(config, mlp=config.shared_mlp), rngs)
        if self.gates:
            self.shared_gate = drawn(rngs, WeightInfo((None,), "bias"), (d,), d**-0.5)

    def __call__(self, x_ND: jax.Array, context: Context) -> tuple[jax.Array, Extras]:
        routing, extras = self.router(x_ND, context)
        y_ND = experts(context.ops, x_ND, routing, self.gate_up, self.down)
        if self.shares:
            shared_ND = self.shared(x_ND, context)
            y_ND += gated(shared_ND, x_ND, self.shared_gate) if self.gates else shared_ND
        return y_ND, extras


def gated(y_ND: jax.Array, x_ND: jax.Array, weight: Weight) -> jax.Array:
    """Returns y times a sigmoid of x · the weight [D], in float32."""
    logits_N1 = jnp.sum(x_ND.astype(jnp.float32) * weight[...][None], axis=-1, keepdims=True)
    return (jax.nn.sigmoid(logits_N1) * y_ND.astype(jnp.float32)).astype(y_ND.dtype)


class DenseBlock(llama.Block):
    """One of the first layers, without experts."""

    def make_attention(self, config: Config, rngs: nnx.Rngs) -> Attention:
        how = {"window": config.window, "heads_together": config.qk_norm_together}
        return Attention(config, rngs, biases=config.qkv_bias, **how)


class ExpertBlock(DenseBlock):
    """One layer: attention and a mixture of experts, each behind a norm and added to the residual stream."""

    feed_forward = MixtureOfExperts

    def __call__(self, x_ND: jax.Array, context: Context) -> tuple[jax.Array, Extras]:
        x_ND = self.attended(x_ND, context)
        with jax.named_scope(scopes.MLP):
            x_ND, y_ND = self.mlp_norm.branch(x_ND, context)
            y_ND, extras = self.mlp(y_ND, context)
            return x_ND + y_ND, extras


def stages(config: Config) -> Chain:
    """Returns the chain of stages of a model of this shape."""
    return llama.decoder(config, groups(config))


def groups(config: Config) -> tuple[Group, ...]:
    """Returns the blocks: runs of layers that are alike, in experts or none and in a window or none."""
    windowed_from = config.layers - config.windowed_layers
    kinds = [(layer < config.dense_first, layer >= windowed_from) for layer in range(config.layers)]
    found = [repeated((_block(config, *kind),), len([*run])) for kind, run in itertools.groupby(kinds)]
    return tuple(itertools.chain(*found))


def _block(config: Config, dense: bool, windowed: bool) -> Stage:
    name = ("windowed_" if windowed else "") + ("dense_block" if dense else "expert_block")
    shape = config if windowed else dataclasses.replace(config, window=None, window_from=0)
    if dense:
        about = {"kept": llama.kept(config), "matmul_flops": llama.matmul_flops(config)}
        return module_stage(name, DenseBlock, shape, **about)
    return module_stage(
        name,
        ExpertBlock,
        shape,
        kept=kept(config),
        matmul_flops=matmul_flops(config),
        metrics=router.METRICS,
        mixture=Mixture(config.top_k, config.experts, _together(config)),
        scopes=(scopes.ROUTER, scopes.DISPATCH, scopes.EXPERTS, scopes.COMBINE),
        advance=router.BiasUpdate(config.bias_rate, ("mlp", "router", "bias")) if config.bias_rate else None,
    )


def _together(config: Config) -> int:
    """Returns the experts whose places by each other have a say in the choice: those of a group, or none."""
    if config.force_load_balancing:
        return config.experts
    return config.experts // config.expert_groups if config.top_groups < config.expert_groups else 1


def kept(config: Config) -> dict[str, int]:
    """Returns the numbers per token of a block of experts' activations, see `Stage.kept`."""
    shared, rows = config.shared_mlp, config.top_k  # of a token
    widths = llama.kept(dataclasses.replace(config, mlp=max(shared, 1)))
    if not shared:
        del widths["gate"], widths["up"]
    return {
        **widths,
        EXPERT_HIDDEN: 2 * rows * config.expert_mlp,
        EXPERT_ROWS: rows * (config.embed + config.expert_mlp),
        # Ids and weights, and where each row comes from and goes.
        ROUTING: 4 * rows,
        "rest": 2 * config.embed + shared,
        "float8": 2 * config.embed + config.heads * config.head_dim + shared,
    }


def matmul_flops(config: Config) -> dict[str, int]:
    """Returns the FLOPs per token of a block of experts' matmuls, see `Stage.matmul_flops`."""
    widths, dense = kept(config), llama.matmul_flops(config)
    dense |= {name: 2 * config.embed * config.shared_mlp for name in ("gate", "up")}
    found = {name: dense[name] for name in dense if name in widths}
    return found | {EXPERT_HIDDEN: 2 * config.embed * widths[EXPERT_HIDDEN]}


def feed_forward_parameters(config: Config, of_each_token: bool) -> int:
    """Returns the matmul parameters of all feed-forward layers and routers. of_each_token: those alone that
    one token is multiplied with."""
    each = 3 * config.embed * config.expert_mlp
    count = config.top_k if of_each_token else config.experts
    shared = 3 * config.embed * config.shared_mlp + config.embed * config.shared_gate
    routed = config.embed * config.experts + count * each + shared
    dense = 3 * config.embed * config.mlp
    return config.dense_first * dense + (config.layers - config.dense_first) * routed


def matmul_parameters(config: Config) -> int:
    """Returns the parameters that each token is multiplied with, of `top_k` experts: the active ones."""
    return _with_feed_forward(config, llama.matmul_parameters(config), of_each_token=True)


def parameters(config: Config) -> int:
    """Returns the number of parameters."""
    heads = config.heads + config.kv_heads
    norms = config.qk_norm_together * config.head_dim * (heads - 2)  # llama counts one of each for all heads
    biases = config.experts * (config.bias_rate > 0)
    total = llama.parameters(config) + config.layers * norms + (config.layers - config.dense_first) * biases
    return _with_feed_forward(config, total, of_each_token=False)


def _with_feed_forward(config: Config, of_dense: int, of_each_token: bool) -> int:
    """Returns a count of parameters as of a mixture, of one as if all layers were dense."""
    of_layers = 3 * config.layers * config.embed * config.mlp
    return of_dense - of_layers + feed_forward_parameters(config, of_each_token)


def train_flops(config: Config, tokens: float, attention_span: float) -> float:
    """Returns the floating-point operations that one update needs, of the active parameters alone, see
    models/flops.py."""
    of_dense = llama.train_flops(config, tokens, attention_span)
    more = matmul_parameters(config) - llama.matmul_parameters(config)
    return of_dense + flops.of_update(more, 0, tokens, 0)
