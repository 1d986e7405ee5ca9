"""The Gemma-3 family, text alone (arXiv:2503.19786): layers with a window, and some that see all.

Against llama: norms of each branch's output too, stored as 1 + weight; embeddings scaled by √D; a tanh GELU;
local layers with a window and short wavelengths of rotary positions, global ones without and with long ones.
Shapes: B rows, T tokens, N = B·T, D embed, C head_dim, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxthru.models import flops, rotary, scopes
from jaxthru.models.family import FamilyConfig
from jaxthru.models.gemma_published import PUBLISHED as PUBLISHED
from jaxthru.models.layers import Attention, RMSNorm, SwiGLU, drawn
from jaxthru.models.rotary import RopeScaling, check_theta
from jaxthru.models.stage import Chain, Context, module_stage, repeated
from jaxthru.runtime.errors import require
from jaxthru.runtime.weights import WeightInfo


@dataclasses.dataclass(frozen=True)
class Config(FamilyConfig):
    """A decoder of local and global layers.

    vocabulary: rows of the embedding table; the tokenizer may not have more tokens.
    layers: transformer blocks.
    embed: width of the vector of each token between the blocks.
    heads: query heads of attention. kv_heads: key and value heads; must divide `heads`, each is shared by as
        many query heads. head_dim: width of each head; an even number.
    mlp: inner width of each gated feed-forward layer.
    max_sequence: bound on data.sequence.
    window: a token of a local layer sees no more than so many tokens of its document, the last of which is
        itself.
    global_every: each so-many-th layer is global, the others are local; 1 makes all global.
    rope_theta: base of the wavelengths of rotary positions in global layers. rope_local_theta: in local ones.
    rope_factor: stretches the wavelengths of global layers.
    norm_epsilon: added to the mean square in every RMSNorm.
    tied_embeddings: the embedding table is the LM head too.
    query_scalar: scores are divided by its square root; None is head_dim.
    """

    vocabulary: int = 8192
    layers: int = 6
    embed: int = 256
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    mlp: int = 1024
    max_sequence: int = 8192
    window: int = 512
    global_every: int = 6
    rope_theta: float = 1_000_000.0
    rope_local_theta: float = 10_000.0
    rope_factor: float = 1.0
    norm_epsilon: float = 1e-6
    tied_embeddings: bool = True
    query_scalar: float | None = None

    qk_norm = True  # no key: always

    def __post_init__(self):
        names = "vocabulary", "layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "max_sequence"
        for name in (*names, "window", "global_every", "rope_factor"):
            value = getattr(self, name)
            require(value >= 1, f"model.{name} = {value}: must be at least 1")
        require(
            self.heads % self.kv_heads == 0,
            f"model.heads = {self.heads}: must be a multiple of model.kv_heads = {self.kv_heads}",
        )
        require(self.head_dim % 2 == 0, f"model.head_dim = {self.head_dim}: must be even (rotary pairs)")
        check_theta(self.rope_theta, None)
        check_theta(self.rope_local_theta, None, "model.rope_local_theta")
        require(self.norm_epsilon > 0, f"model.norm_epsilon = {self.norm_epsilon}: must be above 0")
        scalar = self.query_scalar
        require(scalar is None or scalar > 0, f"model.query_scalar = {scalar}: must be above 0")

    @property
    def global_layers(self) -> int:
        """The layers that see all of a document."""
        return self.layers // self.global_every


class Embedding(nnx.Module):
    """Token ids to vectors, scaled by √D; also the LM head where the embeddings are tied."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        info = WeightInfo(("vocab", "embed"), "table", inputs=(0,))
        self.table = drawn(rngs, info, (config.vocabulary, config.embed), table_deviation(config))
        self.scale = config.embed**0.5

    def __call__(self, tokens_BT: jax.Array, context: Context) -> jax.Array:
        x_ND = context.ops.embed(self.table[...], tokens_BT)
        return x_ND * jnp.asarray(self.scale, x_ND.dtype)  # rounded, as the published weights were trained


def tanh_gelu(x: jax.Array) -> jax.Array:
    """Returns the GELU by its approximation with a tanh."""
    return jax.nn.gelu(x, approximate=True)


class Block(nnx.Module):
    """One layer: attention and feed-forward, each between two norms and added to the residual stream."""

    local: bool

    def __init__(self, config: Config, rngs: nnx.Rngs):
        norm = functools.partial(RMSNorm, config.embed, config.norm_epsilon, 1.0)
        window = config.window if self.local else None
        self.attention_norm, self.attention_out_norm = norm(), norm()
        self.attention = Attention(config, rngs, window=window, norm_offset=1.0)
        self.mlp_norm, self.mlp_out_norm = norm(), norm()
        self.mlp = SwiGLU(config, rngs, tanh_gelu)
        # Attention divides scores by √head_dim; the rest scales queries as they are rotated, in float32.
        self.scale = (config.head_dim / (config.query_scalar or config.head_dim)) ** 0.5

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        of_key = context.prepared["local" if self.local else "global"]
        of_query = of_key if self.scale == 1 else tuple(each * self.scale for each in of_key)
        with jax.named_scope(scopes.ATTENTION):
            x_ND, y_ND = self.attention_norm.branch(x_ND, context)
            y_ND = self.attention(y_ND, context, (of_query, of_key))
            x_ND = x_ND + self.attention_out_norm(y_ND, context)
        with jax.named_scope(scopes.MLP):
            x_ND, y_ND = self.mlp_norm.branch(x_ND, context)
            y_ND = checkpoint_name(self.mlp(y_ND, context), "mlp_out")
            return x_ND + self.mlp_out_norm(y_ND, context)


class LocalBlock(Block):
    local = True


class GlobalBlock(Block):
    local = False


class Head(nnx.Module):
    """The last norm, and the LM head [D, V] unless it is the embedding's."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.embed, config.norm_epsilon, 1.0)
        if not config.tied_embeddings:
            info = WeightInfo(("embed", "vocab"), "table", inputs=(0,))
            self.matrix = drawn(rngs, info, (config.embed, config.vocabulary), table_deviation(config))

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        return self.norm(x_ND, context)


def table_deviation(config: Config) -> float:
    """Logits then start with a deviation of one half, as llama's do, and so do scaled embeddings."""
    return 0.5 * config.embed**-0.5


def stages(config: Config) -> Chain:
    """Returns the chain of stages of a model of this shape."""
    about = {"kept": kept(config), "matmul_flops": matmul_flops(config)}
    local = module_stage("local_block", LocalBlock, config, **about)
    whole = module_stage("global_block", GlobalBlock, config, **about)
    return Chain(
        embedding=module_stage("embedding", Embedding, config),
        groups=repeated((local,) * (config.global_every - 1) + (whole,), config.layers),
        head=module_stage("head", Head, config),
        output=("embedding", "table") if config.tied_embeddings else ("head", "matrix"),
        prepare=functools.partial(rotary_angles, config=config),
    )


def rotary_angles(positions_BT: jax.Array, config: Config) -> dict[str, rotary.Rotary]:
    """Returns cosines and sines [B, T, C/2], float32, of local and of global layers."""
    scaling = None if config.rope_factor == 1 else RopeScaling(config.rope_factor, kind="linear")
    return {
        "local": rotary.angles(positions_BT, config.head_dim, config.rope_local_theta),
        "global": rotary.angles(positions_BT, config.head_dim, config.rope_theta, scaling),
    }


def kept(config: Config) -> dict[str, int]:
    """Returns the numbers per token of a block's activations, see `Stage.kept`."""
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        **{"query": query, "key": key, "value": key, "attention": query},
        **{"attention_statistics": config.heads, "attention_out": config.embed},
        **{"gate": config.mlp, "up": config.mlp, "mlp_out": config.embed},
        # The stream between the branches: what goes into a branch's second norm has a name above.
        "norm_inputs": query + key + config.embed,
        "activated": config.mlp,  # XLA does not make the tanh again
        # Of each matmul's input, where that is not kept already; in float8, of them all.
        "rest": 2 * config.embed + config.mlp,
        "float8": 2 * config.embed + query + config.mlp,
    }


def matmul_flops(config: Config) -> dict[str, int]:
    """Returns the FLOPs per token of a block's matmuls, see `Stage.matmul_flops`."""
    widths = kept(config)
    inputs = {"attention_out": widths["query"], "mlp_out": config.mlp}
    names = ("query", "key", "value", "attention_out", "gate", "up", "mlp_out")
    return {name: 2 * inputs.get(name, config.embed) * widths[name] for name in names}


def matmul_parameters(config: Config) -> int:
    """Returns the parameters that each token is multiplied with; looking up an embedding is free."""
    attention = config.embed * config.head_dim * 2 * (config.heads + config.kv_heads)
    return config.layers * (attention + 3 * config.embed * config.mlp) + config.embed * config.vocabulary


def parameters(config: Config) -> int:
    """Returns the number of parameters."""
    norms = config.layers * (4 * config.embed + 2 * config.head_dim) + config.embed
    input_table = 0 if config.tied_embeddings else config.vocabulary * config.embed
    return matmul_parameters(config) + input_table + norms


def train_flops(config: Config, tokens: float, attention_span: float) -> float:
    """Returns the floating-point operations that one update needs, see models/flops.py."""
    whole = config.global_layers
    within = flops.span_within(config.window, tokens, attention_span)
    span = whole * attention_span + (config.layers - whole) * within
    return flops.of_update(matmul_parameters(config), config.heads * config.head_dim, tokens, span)
