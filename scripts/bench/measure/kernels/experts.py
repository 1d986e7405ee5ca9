"""A whole layer of experts, forward and backward: router, sort, gather, products, combination.

The layer is that of the family `moe`, with its matrices in bfloat16 as a step has them: the gradients are
those of x, the router and both matrices. `qwen3_30b` is Qwen3-30B-A3B's, `wide` one of twice the width whose
experts are narrower; both at 32,768 tokens. Rates count the three products of each token's experts, and twice
that for the backward pass; not the router, and nothing that is computed again. Routing is that of random
tokens: near to even, not forced. `around` is what lies around the experts' products and SwiGLU, without
them, forward and backward: router, sort, rows there and back; its pass `router` is the router alone.
`float8` is the layer with experts multiplied in that (`precision.matmul=fp8_experts`). `mixtral` is
Mixtral's, at as many tokens.

`around` takes its turns behind the others'. In turn with them it made the one after it faster: the forward
pass 5.10 ms for 5.57.

Predicted on an H200, of one layer forward and backward:
  qwen3_30b (7.42 TFLOP): products at 615 to 645 TFLOP/s forward and for rows, 600 to 625 for matrices:
    11.9 ms. Memory, at 4.1 TB/s: gather 1.2 GB twice, SwiGLU 1.2 forward and 2.8 backward, combination 1.2
    twice, and router, sort and casts 0.5 GB: 2.3 ms. Launches and tables 0.2 ms. 14.4 ms: 515 TFLOP/s;
    forward alone 4.7 ms, 530.
  wide (9.90 TFLOP, narrower products by 5 %): 16.6 ms and 3.9 of memory: 20.7 ms, 480 TFLOP/s.
  mixtral (69.3 TFLOP): products 117 ms, memory 10: 127 ms; in float8 89 and 10: 99 ms, 1.28 times as fast.
  triton: products at 480: 15.5 ms of 7.42 TFLOP, and the rest as above: 18 ms, 412.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from measure.kernels.grouped_matmul import use_table
from measure.workload import Pace, Passes, Workload, on

from jaxthru.engine.model import Model
from jaxthru.models import family, moe
from jaxthru.models.ops import Ops
from jaxthru.models.stage import module_stage
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout
from pallas_kernels.routing import combine, dispatch, dispatch_weights, sort_assignments

__all__ = ["use_table"]


class Layer(NamedTuple):
    tokens: int
    embed: int
    width: int
    experts: int
    top_k: int

    @property
    def flops(self) -> float:
        """Of the forward pass."""
        return 6.0 * self.tokens * self.top_k * self.embed * self.width


SHAPES = {
    "qwen3_30b": Layer(32_768, 2048, 768, 128, 8),
    "wide": Layer(32_768, 4096, 512, 128, 8),
    "mixtral": Layer(32_768, 4096, 14_336, 8, 2),
    "cpu": Layer(64, 32, 16, 8, 2),
}
GROUPS = {"all": ("qwen3_30b", "wide"), "float8": ("mixtral",), "tiny": ("cpu",)}
SHAPE = "all"
PACE = Pace(warmup=3.0, timed=3.0, turn=0.3, calls=5)


def stage_of(shape: Layer, ops: Ops, module: type = moe.MixtureOfExperts):
    """Returns (params, x) -> what a module of the layer makes of it, and its `init`."""
    heads = {"heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 8}  # of the block, which has no part in this
    sizes = {"experts": shape.experts, "top_k": shape.top_k, "expert_mlp": shape.width}
    config = moe.Config(vocabulary=8, layers=1, embed=shape.embed, **heads, **sizes)
    stage = module_stage("layer", module, config)
    model = Model(family.chain(config), ops, "none", config.loop)
    rows = {name: jnp.ones((1, shape.tokens), jnp.int32) for name in ("segment_ids", "positions")}
    return lambda params, x: stage.apply(params, x, model.context(rows, 8))[0], stage.init


def params_of(shape: Layer, ops: Ops) -> dict:
    """Returns the layer's parameters, its matrices in ops.compute."""

    @jax.jit
    def made():
        params = stage_of(shape, ops)[1](jax.random.key(0))
        return params | {name: params[name].astype(ops.compute) for name in ("gate_up", "down")}

    return made()


def passes(shape: Layer, ops: Ops) -> Passes:
    """Returns the forward pass, and both: the output and the gradients of x and all parameters."""
    apply, _ = stage_of(shape, ops)

    def both(params, x, dy):
        y, pullback = jax.vjp(apply, params, x)
        return y, *pullback(dy)

    return {"forward": lambda params, x, dy: apply(params, x), "both": both}


def around(shape: Layer, ops: Ops) -> Passes:
    """Returns the router, forward and backward; and it with all else but the experts themselves."""
    routed, _ = stage_of(shape, ops, moe.Router)
    how = {"implementation": ops.routing_by}

    def router(params, x, dy):
        def weights(params, x):
            made = routed(params, x)
            return made.weights_NK, made

        given, pullback, made = jax.vjp(weights, params["router"], x, has_aux=True)
        return made, pullback(given)

    def everything(params, x, dy):
        def there(params, x):
            made = routed(params, x)
            order = sort_assignments(made.ids_NK, shape.experts, **how)
            return (dispatch(x, order, shape.top_k, **how), dispatch_weights(made.weights_NK, order)), order

        rows, pullback, order = jax.vjp(there, params["router"], x, has_aux=True)
        # The experts lie between, forward and backward.
        (rows, weights), dy = jax.lax.optimization_barrier((rows, dy))
        y, pullback_back = jax.vjp(lambda rows: combine(rows, order, shape.tokens, **how), rows)
        y, dy = jax.lax.optimization_barrier((y, dy))
        (d_rows,) = jax.lax.optimization_barrier(pullback_back(dy))
        return y, pullback((d_rows, weights))

    return {"router": router, "around": everything}


def workload(shape: Layer) -> Workload:
    dtype = on(gpu=jnp.bfloat16, cpu=jnp.float32)
    ops = Ops(Layout(make_mesh(MeshConfig(), jax.devices()[:1])), jnp.dtype(dtype))
    names = on(gpu=("mosaic_gpu", "triton"), cpu=("xla", "reference"))
    x, dy = (jax.random.normal(jax.random.key(seed), (shape.tokens, shape.embed), dtype) for seed in (1, 2))
    times = {"forward": 1, "both": 3}

    def rates(what: str, seconds: float, memory) -> dict:
        if what not in times:
            return {}
        return {"tflops": round(times[what] * shape.flops / seconds / 1e12, 4 if shape.tokens < 1000 else 1)}

    by = functools.partial(dataclasses.replace, ops)
    contenders = {name: passes(shape, by(grouped_matmul_by=name)) for name in names}
    contenders["around"] = around(shape, ops)
    if jax.default_backend() == "gpu":
        contenders["float8"] = passes(shape, by(grouped_matmul_by=names[0], float8_experts=True))
    return Workload(
        (params_of(shape, ops), x, dy),
        contenders,
        base=names[-1],
        unlike=("around",),
        lighter=("around",),
        rates=rates,
        about={"sizes": shape._asdict()},
    )
