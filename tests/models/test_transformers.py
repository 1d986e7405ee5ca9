"""Logits and every gradient as transformers gives them: recorded by golden/record_transformers.py."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import bind

from jaxthru.engine.inline import hidden
from jaxthru.engine.objectives.cross_entropy import CrossEntropy
from jaxthru.huggingface.config import model_config
from jaxthru.models import family
from jaxthru.models.family import FamilyConfig
from jaxthru.models.llama import Config as ModelConfig
from jaxthru.models.llama import RopeScaling
from jaxthru.models.ops import Ops
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout
from pallas_kernels.testing import assert_close

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
# Both are float32, with sums in other orders: on one processor they were 2.8e-6 and 2e-6 apart at most.
LOGITS, GRADIENTS = 2e-5, 2e-5
FAR = {"llama_4096": 1e-4}
"""Of late positions: a wavelength that is rounded otherwise turns them by 2e-4 rad at position 4,096."""

# Unrolled, because that compiles in half the time here; test_llama.py says that scanned layers are the same.
SHAPES = {
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


TYPES = {
    "Llama": "llama",
    "Mistral": "mistral",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Gemma3Text": "gemma3_text",
}
NAMES = (
    *("llama3", "qwen3", "qwen2", "mistral", "llama_yarn", "llama_linear", "gemma3", "smollm"),
    "llama_4096",
)


def shape_of(about: dict) -> FamilyConfig:
    """Returns the shape of a recorded model, of the keys that transformers was given."""
    settings = about["model"]
    raw = {"model_type": TYPES[settings["family"]], **about["common"], **settings["config"]}
    config = model_config(raw, "about")
    return type(config)(**{**vars(config), "loop": "unroll"})


def parameters(arrays: dict[str, np.ndarray], config: FamilyConfig) -> dict:
    """Returns arrays named as transformers does in the structure of unrolled `params`: linear layers [in,
    out] in the place of [out, in], heads as a dim of their own."""
    chain, rest = family.chain(config), dict(arrays)
    tensors = {tensor.path: tensor for tensor in family.published(config).tensors(config)}

    def part(stage, *place: str) -> dict:
        def leaf(path, shape):
            tensor = tensors[(*place, *(key.key for key in path))]
            array = rest.pop(tensor.name)
            return (array.T if tensor.transposed else array).reshape(shape.shape)

        return jax.tree_util.tree_map_with_path(leaf, stage.shapes)

    layers, groups = iter(range(len(chain.layers))), []
    for group in chain.groups:
        rounds = [
            [part(stage, "layers", str(next(layers))) for stage in group.blocks]
            for _ in range(group.repetitions)
        ]
        groups.append(tuple(zip(*rounds, strict=True)))
    found = {
        "embedding": part(chain.embedding, "embedding"),
        "layers": tuple(groups),
        "head": part(chain.head, "head"),
    }
    assert not rest
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_read_from_transformers_keys(name):
    with np.load(GOLDEN / f"transformers_{name}.npz") as file:
        found = shape_of(json.loads(str(file["about"])))
    assert vars(found) == vars(SHAPES[name]) | {"max_sequence": found.max_sequence}


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients(name):
    with np.load(GOLDEN / f"transformers_{name}.npz") as file:
        golden = dict(file)
    about = json.loads(str(golden["about"]))
    config, z_loss = shape_of(about), about["model"]["z_loss"]
    named = lambda kind: {  # noqa: E731
        key.removeprefix(kind): golden[key].astype(np.float32) for key in golden if key.startswith(kind)
    }
    weights = parameters(named("weight/"), config)
    layout = Layout(make_mesh(MeshConfig(), jax.devices()[:1]))
    model = bind(config, Ops(layout, jnp.dtype(jnp.float32)), "none")
    rows, sequence = golden["tokens"].shape
    batch = {
        "tokens": golden["tokens"].astype(np.int32),
        "segment_ids": np.ones((rows, sequence), np.int32),
        "positions": np.tile(np.arange(sequence, dtype=np.int32), (rows, 1)),
    }
    if z_loss is None:
        hidden_ND = jax.jit(lambda params: hidden(model, params, batch, 1))(weights)
    else:
        batch |= {
            "targets": golden["targets"].astype(np.int32),
            "loss_mask": golden["loss_mask"].astype(np.float32),
            "source": np.zeros((rows, sequence), np.int32),
        }
        objective = CrossEntropy(model=model, z_loss=z_loss, max_segments=1, sources=1)

        def loss(params):
            hidden_ND = hidden(model, params, batch, 1)
            return objective(params, hidden_ND, batch, 1 / batch["loss_mask"].sum())[0], hidden_ND

        (minimised, hidden_ND), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
        assert float(minimised) == pytest.approx(float(golden["minimised"]), rel=1e-6)
        assert_close(found, parameters(named("gradient/"), config), GRADIENTS)
    matrix, axes = model.lm_head(weights)
    matrix_DV = matrix if axes == ("embed", "vocab") else matrix.T
    logits = (np.asarray(hidden_ND) @ matrix_DV).reshape(rows, sequence, -1)[:, golden["positions"]]
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=FAR.get(name, LOGITS))
