"""The Llama-3 family: pre-norm decoder, grouped-query attention, SwiGLU, rotary positions.

Covers Llama 3.x (arXiv:2407.21783), Mistral (arXiv:2310.06825: `window`), Qwen2.5 (arXiv:2412.15115:
`qkv_bias`) and Qwen3 (arXiv:2505.09388: `qk_norm`).
"""

import dataclasses
import functools

import jax
from flax import nnx

from jaxthru.models import flops, scopes
from jaxthru.models.family import FamilyConfig
from jaxthru.models.layers import Attention, RMSNorm, SwiGLU, drawn
from jaxthru.models.llama_published import PUBLISHED as PUBLISHED
from jaxthru.models.rotary import RopeScaling, check_theta, rotary_angles
from jaxthru.models.stage import Chain, Context, Group, Stage, module_stage, repeated
from jaxthru.runtime.errors import require
from jaxthru.runtime.weights import WeightInfo


@dataclasses.dataclass(frozen=True)
class Config(FamilyConfig):
    """A decoder with grouped-query attention, SwiGLU and rotary positions.

    vocabulary: rows of the embedding table; the tokenizer may not have more tokens.
    layers: transformer blocks.
    embed: width of the vector of each token between the blocks.
    heads: query heads of attention. kv_heads: key and value heads; must divide `heads`, each is shared by as
        many query heads. head_dim: width of each head; an even number.
    mlp: inner width of each SwiGLU.
    max_sequence: bound on data.sequence.
    rope_theta: base of the wavelengths of rotary positions. rope_scaling: stretches these wavelengths; None
        leaves them alone, setting one of its keys turns it on.
    norm_epsilon: added to the mean square in every RMSNorm.
    tied_embeddings: the embedding table is the LM head too.
    qk_norm: RMSNorm of queries and keys in each head, as Qwen3 has it.
    qkv_bias: biases of queries, keys and values, as Qwen2.5 has them.
    window: each token sees no more than so many tokens of its document, the last of which is itself; None is
        all. window_from: the first layer, counted from 0, that has the window.
    """

    vocabulary: int = 8192
    layers: int = 4
    embed: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 768
    max_sequence: int = 8192
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    tied_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    window: int | None = None
    window_from: int = 0

    def __post_init__(self):
        for name in ("vocabulary", "layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "max_sequence"):
            value = getattr(self, name)
            require(value >= 1, f"model.{name} = {value}: must be at least 1")
        require(
            self.heads % self.kv_heads == 0,
            f"model.heads = {self.heads}: must be a multiple of model.kv_heads = {self.kv_heads}",
        )
        require(self.head_dim % 2 == 0, f"model.head_dim = {self.head_dim}: must be even (rotary pairs)")
        check_theta(self.rope_theta, self.rope_scaling)
        require(self.norm_epsilon > 0, f"model.norm_epsilon = {self.norm_epsilon}: must be above 0")
        require(self.window is None or self.window >= 1, f"model.window = {self.window}: must be at least 1")
        require(self.window_from >= 0, f"model.window_from = {self.window_from}: must be at least 0")

    @property
    def windowed_layers(self) -> int:
        """The layers that have the window."""
        return 0 if self.window is None else max(0, self.layers - self.window_from)


class Embedding(nnx.Module):
    """Token ids to vectors; also the LM head where the embeddings are tied."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        deviation = head_deviation(config) if config.tied_embeddings else EMBEDDING_DEVIATION
        info = WeightInfo(("vocab", "embed"), "table", inputs=(0,))
        self.table = drawn(rngs, info, (config.vocabulary, config.embed), deviation)

    def __call__(self, tokens_BT: jax.Array, context: Context) -> jax.Array:
        return context.ops.embed(self.table[...], tokens_BT)


class Block(nnx.Module):
    """One layer: attention and feed-forward, each behind a norm and added to the residual stream."""

    feed_forward = SwiGLU

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.embed, config.norm_epsilon)
        self.attention = self.make_attention(config, rngs)
        self.mlp_norm = RMSNorm(config.embed, config.norm_epsilon)
        self.mlp = self.feed_forward(config, rngs)

    def make_attention(self, config: Config, rngs: nnx.Rngs) -> Attention:
        return Attention(config, rngs, biases=config.qkv_bias, window=config.window)

    def attended(self, x_ND: jax.Array, context: Context) -> jax.Array:
        """Returns the residual stream behind attention."""
        with jax.named_scope(scopes.ATTENTION):
            x_ND, y_ND = self.attention_norm.branch(x_ND, context)
            return x_ND + self.attention(y_ND, context)

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        x_ND = self.attended(x_ND, context)
        with jax.named_scope(scopes.MLP):
            x_ND, y_ND = self.mlp_norm.branch(x_ND, context)
            return x_ND + self.mlp(y_ND, context)


class Head(nnx.Module):
    """The last norm, and the LM head [D, V] unless it is the embedding's."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.embed, config.norm_epsilon)
        if not config.tied_embeddings:
            info = WeightInfo(("embed", "vocab"), "table", inputs=(0,))
            self.matrix = drawn(rngs, info, (config.embed, config.vocabulary), head_deviation(config))

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        return self.norm(x_ND, context)


EMBEDDING_DEVIATION = 0.02


def head_deviation(config: Config) -> float:
    """Logits then start with a deviation of one half, so that the first loss is ln(vocabulary) + 1/8."""
    return 0.5 * config.embed**-0.5


def stages(config: Config) -> Chain:
    """Returns the chain of stages of a model of this shape."""
    return decoder(config, groups(config))


def decoder(config: Config, blocks: tuple[Group, ...]) -> Chain:
    """Returns the chain of stages of these blocks, between an embedding and a head."""
    return Chain(
        embedding=module_stage("embedding", Embedding, config),
        groups=blocks,
        head=module_stage("head", Head, config),
        output=("embedding", "table") if config.tied_embeddings else ("head", "matrix"),
        prepare=functools.partial(rotary_angles, config=config),
    )


def groups(config: Config) -> tuple[Group, ...]:
    """Returns the blocks: those without a window, then those with it."""

    def stage(name: str, shape: Config) -> Stage:
        return module_stage(name, Block, shape, kept=kept(config), matmul_flops=matmul_flops(config))

    windowed = config.windowed_layers
    whole = stage("block", dataclasses.replace(config, window=None, window_from=0))
    found = repeated((whole,), config.layers - windowed)
    return (*found, *repeated((stage("windowed_block", config),), windowed)) if windowed else found


def kept(config: Config) -> dict[str, int]:
    """Returns the numbers per token of a block's activations, see `Stage.kept`."""
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        **{"query": query, "key": key, "value": key, "attention": query},
        **{"attention_statistics": config.heads, "attention_out": config.embed},
        **{"gate": config.mlp, "up": config.mlp},
        "norm_inputs": (query + key) * config.qk_norm,
        # Of each matmul's input, where that is not kept already; in float8, of them all.
        "rest": 2 * config.embed + config.mlp,
        "float8": 2 * config.embed + query + config.mlp,
    }


def matmul_flops(config: Config) -> dict[str, int]:
    """Returns the FLOPs per token of a block's matmuls, see `Stage.matmul_flops`."""
    widths = kept(config)
    inputs = {"attention_out": widths["query"]}
    names = ("query", "key", "value", "attention_out", "gate", "up")
    return {name: 2 * inputs.get(name, config.embed) * widths[name] for name in names}


def matmul_parameters(config: Config) -> int:
    """Returns the parameters that each token is multiplied with; looking up an embedding is free."""
    attention = config.embed * config.head_dim * 2 * (config.heads + config.kv_heads)
    return config.layers * (attention + 3 * config.embed * config.mlp) + config.embed * config.vocabulary


def parameters(config: Config) -> int:
    """Returns the number of parameters."""
    norms = config.layers * (2 * config.embed + 2 * config.head_dim * config.qk_norm) + config.embed
    biases = config.layers * config.qkv_bias * config.head_dim * (config.heads + 2 * config.kv_heads)
    input_table = 0 if config.tied_embeddings else config.vocabulary * config.embed
    return matmul_parameters(config) + input_table + norms + biases


def train_flops(config: Config, tokens: float, attention_span: float) -> float:
    """Returns the floating-point operations that one update needs, see models/flops.py."""
    windowed = config.windowed_layers
    span = (config.layers - windowed) * attention_span
    if windowed:
        span += windowed * flops.span_within(config.window, tokens, attention_span)
    return flops.of_update(matmul_parameters(config), config.heads * config.head_dim, tokens, span)
