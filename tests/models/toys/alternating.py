"""A family of a user's own, for tests: layers A B A B A B A, in keys that are no other family's.

A has attention and MLP in parallel on one norm, a penalty on the MLP's activity as an auxiliary loss, and
counts the hidden units that are active. B has attention without positions, over whole documents, with a
learned scale of each head.

Shapes: B rows, T tokens, N = B·T, D width, H ways, C way_size, M hidden.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxthru.models import flops, scopes
from jaxthru.models.family import FamilyConfig
from jaxthru.models.layers import RMSNorm, Weight, drawn, rotate
from jaxthru.models.stage import Chain, Context, Extras, Metric, module_stage, repeated
from jaxthru.runtime.weights import WeightInfo

PARALLEL, SCALED = "parallel", "scaled_attention"
"""The family's own scopes, one of each kind of block."""


@dataclasses.dataclass(frozen=True)
class Config(FamilyConfig):
    """The shape: of 54 million parameters, 217 MB in float32.

    penalty: weight of the auxiliary loss. frozen: the table of tokens, and B's values and scales, stay as
    they were drawn.
    """

    words: int = 12_288
    depth: int = 7
    width: int = 768
    ways: int = 12
    way_size: int = 64
    hidden: int = 3072
    penalty: float = 1e-2
    frozen: bool = False


class Attention(nnx.Module):
    """Attention of as many keys as queries. scaled: each head's output has a learned scale, and there are no
    positions."""

    def __init__(self, config: Config, rngs: nnx.Rngs, scaled: bool):
        d, h, c = config.width, config.ways, config.way_size
        info = WeightInfo(("embed", "heads", "head_dim"), "matrix", inputs=(0,))
        still = dataclasses.replace(info, trains=not (scaled and config.frozen))
        self.query, self.key = (drawn(rngs, info, (d, h, c), d**-0.5) for _ in range(2))
        self.value = drawn(rngs, still, (d, h, c), d**-0.5)
        out = WeightInfo(("heads", "head_dim", "embed"), "matrix", inputs=(0, 1))
        self.out = drawn(rngs, out, (h, c, d), (h * c * 2 * config.depth) ** -0.5)
        if scaled:
            info = WeightInfo(("heads",), "bias", trains=not config.frozen)
            self.scale = Weight(jnp.ones((h,), jnp.float32), info=info)
        self.scaled = scaled

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        length = context.positions.shape[1]
        projected = context.ops.column_parallel(x_ND, self.query, self.key, self.value)
        q_BTHC, k_BTHC, v_BTHC = (y.reshape(-1, length, *y.shape[1:]) for y in projected)
        if not self.scaled:
            q_BTHC, k_BTHC = (rotate(each, context.prepared) for each in (q_BTHC, k_BTHC))
        names = "query", "key", "value"
        o_BTHC = context.attend(*map(checkpoint_name, (q_BTHC, k_BTHC, v_BTHC), names))
        if self.scaled:
            o_BTHC *= self.scale[...].astype(o_BTHC.dtype)[None, None, :, None]
        y_ND = context.ops.row_parallel(o_BTHC.reshape(-1, *o_BTHC.shape[2:]), self.out)
        return checkpoint_name(y_ND, "attention_out")


class A(nnx.Module):
    """A layer whose attention and MLP read one norm and are added to the residual stream together."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        d, m = config.width, config.hidden
        self.norm, self.attention = RMSNorm(d, 1e-5), Attention(config, rngs, scaled=False)
        self.up = drawn(rngs, WeightInfo(("embed", "mlp"), "matrix", inputs=(0,)), (d, m), d**-0.5)
        down = WeightInfo(("mlp", "embed"), "matrix", inputs=(0,))
        self.down = drawn(rngs, down, (m, d), (m * 2 * config.depth) ** -0.5)
        self.penalty = config.penalty

    @jax.named_scope(PARALLEL)
    def __call__(self, x_ND: jax.Array, context: Context) -> tuple[jax.Array, Extras]:
        normed_ND = self.norm(x_ND)
        with jax.named_scope(scopes.ATTENTION):
            attended_ND = self.attention(normed_ND, context)
        (up_NM,) = context.ops.column_parallel(normed_ND, self.up)
        hidden_NM = jax.nn.relu(checkpoint_name(up_NM, "up"))
        y_ND = x_ND + attended_ND + context.ops.row_parallel(hidden_NM, self.down)
        hidden_NM = hidden_NM.astype(jnp.float32)
        activity = self.penalty * jnp.mean(jnp.square(hidden_NM))
        return y_ND, Extras({"activity_loss": activity}, {"active": jnp.sum(jnp.sign(hidden_NM))})


class B(nnx.Module):
    """A layer of attention alone."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.norm, self.attention = RMSNorm(config.width, 1e-5), Attention(config, rngs, scaled=True)

    @jax.named_scope(SCALED)
    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        return x_ND + self.attention(self.norm(x_ND), context)


class Embedding(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        info = WeightInfo(("vocab", "embed"), "table", inputs=(0,), trains=not config.frozen)
        self.table = drawn(rngs, info, (config.words, config.width), 0.02)

    def __call__(self, tokens_BT: jax.Array, context: Context) -> jax.Array:
        return context.ops.embed(self.table[...], tokens_BT)


class Head(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.width, 1e-5)
        info = WeightInfo(("embed", "vocab"), "table", inputs=(0,))
        self.matrix = drawn(rngs, info, (config.width, config.words), 0.5 * config.width**-0.5)

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        return self.norm(x_ND)


def stages(config: Config) -> Chain:
    """Returns the chain of stages of a model of this shape."""

    def prepare(positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        pairs = jnp.arange(0, config.way_size, 2, dtype=jnp.float32)
        frequency = 1.0 / 1e4 ** (pairs / config.way_size)
        angle = positions_BT.astype(jnp.float32)[..., None] * frequency[None, None, :]
        return jnp.cos(angle), jnp.sin(angle)

    d, attended = config.width, config.ways * config.way_size
    kept = dict.fromkeys(("query", "key", "value", "attention"), attended) | {"attention_out": d}
    matmul_flops = dict.fromkeys(("query", "key", "value", "attention_out"), 2 * d * attended)
    of_a = {
        "kept": kept | {"up": config.hidden, "rest": 2 * d + config.hidden},
        "matmul_flops": matmul_flops | {"up": 2 * d * config.hidden},
        "metrics": {"active": Metric("sum")},
        "scopes": (PARALLEL,),
    }
    a = module_stage("a", A, config, **of_a)
    b = module_stage("b", B, config, kept=kept | {"rest": 2 * d}, matmul_flops=matmul_flops, scopes=(SCALED,))
    return Chain(
        embedding=module_stage("embedding", Embedding, config),
        groups=repeated((a, b), config.depth),
        head=module_stage("head", Head, config),
        output=("head", "matrix"),
        prepare=prepare,
    )


def train_flops(config: Config, tokens: float, attention_span: float) -> float:
    """Returns the floating-point operations that one update needs, see models/flops.py."""
    attended = config.ways * config.way_size
    layers = config.depth * 4 * config.width * attended
    layers += -(-config.depth // 2) * 2 * config.width * config.hidden  # A's
    width = config.depth * attended
    return flops.of_update(layers + config.width * config.words, width, tokens, attention_span)
