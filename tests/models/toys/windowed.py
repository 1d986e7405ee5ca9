"""A family of a user's own, for tests: layers A B A B A, where A sees a window.

A calls attention twice, of its window and of the whole document; B once, of the document.

Shapes: B rows, T tokens, N = B·T, D embed, H heads, K kv heads, C head_dim.
"""

import dataclasses
import functools

import jax
from flax import nnx

from jaxthru.models.family import FamilyConfig
from jaxthru.models.layers import RMSNorm, drawn, linear, rotary_angles, rotate
from jaxthru.models.stage import Chain, Context, module_stage, repeated
from jaxthru.runtime.weights import WeightInfo


@dataclasses.dataclass(frozen=True)
class Config(FamilyConfig):
    """The shape."""

    vocabulary: int = 256
    layers: int = 5
    embed: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    window: int = 24
    rope_theta: float = 1e4
    rope_scaling: None = None


class Block(nnx.Module):
    """Attention alone. window: of the first of two calls, None makes one."""

    def __init__(self, config: Config, rngs: nnx.Rngs, window: int | None):
        d, h, k, c = config.embed, config.heads, config.kv_heads, config.head_dim
        self.norm = RMSNorm(d, 1e-5)
        self.query = linear(rngs, ("embed", "heads", "head_dim"), (d, h, c), 2 * d**-0.5)
        self.key, self.value = (
            linear(rngs, ("embed", "kv_heads", "head_dim"), (d, k, c), 2 * d**-0.5) for _ in range(2)
        )
        self.out = linear(rngs, ("heads", "head_dim", "embed"), (h, c, d), (h * c) ** -0.5, inputs=2)
        self.window = window

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        length = context.positions.shape[1]
        projected = context.ops.column_parallel(self.norm(x_ND), self.query, self.key, self.value)
        q_BTHC, k_BTKC, v_BTKC = (y.reshape(-1, length, *y.shape[1:]) for y in projected)
        q_BTHC, k_BTKC = (rotate(each, context.prepared) for each in (q_BTHC, k_BTKC))
        o_BTHC = context.attend(q_BTHC, k_BTKC, v_BTKC)
        if self.window:
            o_BTHC = o_BTHC + 2 * context.attend(q_BTHC, k_BTKC, v_BTKC, window=self.window)
        return x_ND + context.ops.row_parallel(o_BTHC.reshape(-1, *o_BTHC.shape[2:]), self.out)


class Embedding(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        info = WeightInfo(("vocab", "embed"), "table", inputs=(0,))
        self.table = drawn(rngs, info, (config.vocabulary, config.embed), 0.5)

    def __call__(self, tokens_BT: jax.Array, context: Context) -> jax.Array:
        return context.ops.embed(self.table[...], tokens_BT)


class Head(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.embed, 1e-5)
        info = WeightInfo(("embed", "vocab"), "table", inputs=(0,))
        self.matrix = drawn(rngs, info, (config.embed, config.vocabulary), config.embed**-0.5)

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        return self.norm(x_ND)


LocalBlock = functools.partial(Block, window=Config.window)
WholeBlock = functools.partial(Block, window=None)


def stages(config: Config) -> Chain:
    """Returns the chain."""
    blocks = module_stage("local", LocalBlock, config), module_stage("whole", WholeBlock, config)
    return Chain(
        embedding=module_stage("embedding", Embedding, config),
        groups=repeated(blocks, config.layers),
        head=module_stage("head", Head, config),
        output=("head", "matrix"),
        prepare=functools.partial(rotary_angles, config=config),
    )


def train_flops(config: Config, tokens: float, attention_span: float) -> float:
    """No figure is asked for."""
    return 0.0
