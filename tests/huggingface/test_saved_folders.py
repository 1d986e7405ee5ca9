"""Folders as transformers saves them, in golden/folders: read, and the logits that it gives of them.

`python tests/golden/record_transformers.py --folders tests/golden/folders` wrote them; their weights are
random.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import bind

from jaxthru.engine.inline import hidden
from jaxthru.huggingface.config import read_config, written
from jaxthru.huggingface.weights import Weights
from jaxthru.models.ops import Ops
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout
from jaxthru.training.layout import assembled

FOLDERS = Path(__file__).resolve().parent.parent / "golden" / "folders"
DTYPES = {
    **{"qwen3": "float32", "qwen2": "float32", "mistral": "float32", "gemma3": "float32"},
    **{"mixtral": "float32", "qwen3_moe": "float32", "olmoe": "float32"},
    "smollm": "bfloat16",
}


SLOW = ("qwen3_moe", "olmoe")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in DTYPES]
)
def test_it_gives_the_logits_that_transformers_gives(name):
    config, _ = read_config(FOLDERS / name)
    layout = Layout(make_mesh(MeshConfig(), jax.devices()[:1]))
    model = bind(config, Ops(layout, jnp.dtype(jnp.float32)), "none")
    weights = Weights(FOLDERS / name, config)
    assert weights.dtype == DTYPES[name]
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    placed = lambda info, leaf: jax.ShapeDtypeStruct(  # noqa: E731
        leaf.shape, leaf.dtype, sharding=layout.sharding(info.axes)
    )
    params = assembled(jax.tree.map(placed, model.weights, shapes), weights.array)
    with np.load(FOLDERS / name / "golden.npz") as golden:
        tokens, positions, wanted = (golden[key] for key in ("tokens", "positions", "logits"))
    rows, sequence = tokens.shape
    batch = {
        "tokens": tokens.astype(np.int32),
        "segment_ids": np.ones((rows, sequence), np.int32),
        "positions": np.tile(np.arange(sequence, dtype=np.int32), (rows, 1)),
    }
    hidden_ND = jax.jit(lambda params: hidden(model, params, batch, 1))(params)
    matrix, axes = model.lm_head(params)
    matrix_DV = matrix if axes == ("embed", "vocab") else matrix.T
    logits = (np.asarray(hidden_ND) @ np.asarray(matrix_DV)).reshape(rows, sequence, -1)[:, positions]
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", DTYPES)
def test_its_config_is_written_back_as_it_was(name):
    config, raw = read_config(FOLDERS / name)
    found = json.loads(json.dumps(written(config, DTYPES[name], raw)))
    assert {key: found[key] for key in raw} == raw
