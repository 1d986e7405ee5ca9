"""Logits and every gradient as transformers gives them: recorded by golden/record_transformers.py."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import bind

from jaxthru.engine.inline import hidden
from jaxthru.engine.objective import Objective
from jaxthru.models.llama import Config as ModelConfig
from jaxthru.models.llama import RopeScaling
from jaxthru.models.ops import Ops
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout
from pallas_kernels.testing import assert_close

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
# Both are float32, with sums in other orders: on one processor they were 2.8e-6 and 2e-6 apart at most.
LOGITS, GRADIENTS = 2e-5, 2e-5

# Unrolled, because that compiles in half the time here; test_llama.py says that scanned layers are the same.
MODELS = {
    "llama3": ModelConfig(
        vocabulary=64,
        layers=2,
        embed=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp=48,
        rope_theta=1e4,
        rope_scaling=RopeScaling(factor=8.0, original_sequence=128),
        norm_epsilon=1e-5,
        loop="unroll",
    ),
    "qwen3": ModelConfig(
        vocabulary=64,
        layers=3,
        embed=24,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp=40,
        rope_theta=1e6,
        norm_epsilon=1e-6,
        tied_embeddings=True,
        qk_norm=True,
        loop="unroll",
    ),
}


def parameters(arrays: dict[str, np.ndarray], config: ModelConfig) -> dict:
    """Returns arrays named as transformers does in the structure of unrolled `params`: linear maps [in, out]
    in the place of [out, in], heads as a dim of their own."""

    def layer(index: int) -> dict:
        of = lambda name: arrays[f"model.layers.{index}.{name}.weight"]  # noqa: E731
        heads = lambda name: of(f"self_attn.{name}_proj").T.reshape(config.embed, -1, config.head_dim)  # noqa: E731
        attention = {
            "query": heads("q"),
            "key": heads("k"),
            "value": heads("v"),
            "out": of("self_attn.o_proj").T.reshape(config.heads, config.head_dim, config.embed),
        }
        if config.qk_norm:
            attention["query_norm"] = {"scale": of("self_attn.q_norm")}
            attention["key_norm"] = {"scale": of("self_attn.k_norm")}
        return {
            "attention_norm": {"scale": of("input_layernorm")},
            "attention": attention,
            "mlp_norm": {"scale": of("post_attention_layernorm")},
            "mlp": {name: of(f"mlp.{name}_proj").T for name in ("gate", "up", "down")},
        }

    layers = tuple(layer(index) for index in range(config.layers))
    head = {"norm": {"scale": arrays["model.norm.weight"]}}
    if not config.tied_embeddings:
        head["matrix"] = arrays["lm_head.weight"].T
    return {
        "embedding": {"table": arrays["model.embed_tokens.weight"]},
        "layers": ((layers,),),
        "head": head,
    }


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name):
    config = MODELS[name]
    with np.load(GOLDEN / f"transformers_{name}.npz") as file:
        golden = dict(file)
    weights, gradients = (
        parameters(
            {key.partition("/")[2]: golden[key].astype(np.float32) for key in golden if key.startswith(kind)},
            config,
        )
        for kind in ("weight/", "gradient/")
    )
    layout = Layout(make_mesh(MeshConfig(), jax.devices()[:1]))
    model = bind(config, Ops(layout, jnp.dtype(jnp.float32)), "none")
    z_loss = json.loads(str(golden["about"]))["model"]["z_loss"]
    objective = Objective(model, z_loss=z_loss, max_segments=1, sources=1)
    rows, sequence = golden["tokens"].shape
    mask = golden["loss_mask"].astype(np.float32)
    batch = {
        "tokens": golden["tokens"].astype(np.int32),
        "targets": golden["targets"].astype(np.int32),
        "segment_ids": np.ones((rows, sequence), np.int32),
        "positions": np.tile(np.arange(sequence, dtype=np.int32), (rows, 1)),
        "loss_mask": mask,
        "source": np.zeros((rows, sequence), np.int32),
    }

    def loss(params):
        hidden_ND = hidden(model, params, batch, 1)
        return objective(params, hidden_ND, batch, 1 / mask.sum())[0], hidden_ND

    (minimised, hidden_ND), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
    matrix, axes = model.output_matrix(weights)
    matrix_DV = matrix if axes == ("embed", "vocab") else matrix.T
    logits = (np.asarray(hidden_ND) @ matrix_DV).reshape(rows, sequence, -1)[:, golden["positions"]]
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=LOGITS)
    assert float(minimised) == pytest.approx(float(golden["minimised"]), rel=1e-6)
    assert_close(found, gradients, GRADIENTS)
