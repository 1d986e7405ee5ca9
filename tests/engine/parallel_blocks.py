"""A family of its own, for tests: layers A B A B A B A.

A has attention and MLP side by side, an auxiliary loss and a count; B has attention alone, with a learned
scale of each head.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxthru.models.family import FamilyConfig
from jaxthru.models.layers import RMSNorm, SwiGLU, Weight, drawn, linear, rotary_angles, rotate
from jaxthru.models.stage import Chain, Context, Extras, Metric, module_stage, repeated
from jaxthru.runtime.weights import WeightInfo


@dataclasses.dataclass(frozen=True)
class Config(FamilyConfig):
    """The shape."""

    vocabulary: int = 512
    layers: int = 7
    embed: int = 64
    heads: int = 4
    head_dim: int = 16
    mlp: int = 128
    rope_theta: float = 1e4
    rope_scaling: None = None


class Attention(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs, scaled: bool):
        d, h, c = config.embed, config.heads, config.head_dim
        into = functools.partial(linear, rngs, ("embed", "heads", "head_dim"), (d, h, c), d**-0.5)
        self.query, self.key, self.value = into(), into(), into()
        self.out = linear(rngs, ("heads", "head_dim", "embed"), (h, c, d), (h * c) ** -0.5, inputs=2)
        if scaled:
            self.scale = Weight(jnp.ones((h,), jnp.float32), info=WeightInfo(("heads",), "bias"))
        self.scaled = scaled

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        length = context.positions.shape[1]
        projected = context.ops.column_parallel(x_ND, self.query, self.key, self.value)
        q_BTHC, k_BTHC, v_BTHC = (y.reshape(-1, length, *y.shape[1:]) for y in projected)
        q_BTHC, k_BTHC = (rotate(each, context.prepared) for each in (q_BTHC, k_BTHC))
        o_BTHC = checkpoint_name(context.attend(q_BTHC, k_BTHC, v_BTHC), "attention")
        if self.scaled:
            o_BTHC = o_BTHC * self.scale[...].astype(o_BTHC.dtype)[None, None, :, None]
        return context.ops.row_parallel(o_BTHC.reshape(-1, *o_BTHC.shape[2:]), self.out)


class BlockA(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.embed, 1e-5)
        self.attention, self.mlp = Attention(config, rngs, scaled=False), SwiGLU(config, rngs)

    def __call__(self, x_ND: jax.Array, context: Context) -> tuple[jax.Array, Extras]:
        normed_ND = self.norm(x_ND)
        with jax.named_scope("side_by_side"):
            y_ND = x_ND + self.attention(normed_ND, context) + self.mlp(normed_ND, context)
        y32_ND = y_ND.astype(jnp.float32)
        size = 1e-2 * jnp.mean(jnp.square(y32_ND))
        return y_ND, Extras({"size_loss": size}, {"positive": jnp.sum((y32_ND > 0).astype(jnp.float32))})


class BlockB(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.norm, self.attention = RMSNorm(config.embed, 1e-5), Attention(config, rngs, scaled=True)

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        return x_ND + self.attention(self.norm(x_ND), context)


class Embedding(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        info = WeightInfo(("vocab", "embed"), "table", inputs=(0,))
        self.table = drawn(rngs, info, (config.vocabulary, config.embed), 0.02)

    def __call__(self, tokens_BT: jax.Array, context: Context) -> jax.Array:
        return context.ops.embed(self.table[...], tokens_BT)


class Head(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.embed, 1e-5)
        info = WeightInfo(("embed", "vocab"), "table", inputs=(0,))
        self.matrix = drawn(rngs, info, (config.embed, config.vocabulary), 0.05)

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        return self.norm(x_ND)


def stages(config: Config) -> Chain:
    a = module_stage("a", BlockA, config, metrics={"positive": Metric("sum")}, scopes=("side_by_side",))
    b = module_stage("b", BlockB, config)
    return Chain(
        module_stage("embedding", Embedding, config),
        repeated((a, b), config.layers),
        module_stage("head", Head, config),
        ("head", "matrix"),
        functools.partial(rotary_angles, config=config),
    )
