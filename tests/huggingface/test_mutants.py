"""What may be wrong in a table, a shape or a step is noticed: each is put in, and the comparison fails.

The comparisons are those of test_saved_folders.py, tests/models/test_transformers.py and of the step: logits
that transformers has recorded, and losses computed by hand.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import ROWS, batch
from published import FOLDERS, change_json, folder_of
from tiny import bind, make

from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.engine.inline import hidden
from jaxthru.huggingface.config import read_config
from jaxthru.huggingface.generation_config import read_generation_defaults
from jaxthru.huggingface.weights import Weights
from jaxthru.models import llama_published, published
from jaxthru.models.ops import Ops
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout
from jaxthru.training.layout import assembled

AGREE, CLEAR = 2e-5, 1e-2
"""How far apart logits are that agree, and at least those of a mutant."""


@functools.cache
def golden(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with np.load(FOLDERS / name / "golden.npz") as file:
        return file["tokens"].astype(np.int32), file["positions"], file["logits"]


@functools.cache
def program(config):
    """Returns the model of a shape and its jitted forward pass, which mutants of the weights share."""
    layout = Layout(make_mesh(MeshConfig(), jax.devices()[:1]))
    model = bind(dataclasses.replace(config, loop="unroll"), Ops(layout, jnp.dtype(jnp.float32)), "none")
    return model, jax.jit(functools.partial(forward, model))


def forward(model, params, tokens):
    rows, sequence = tokens.shape
    one = jnp.ones((rows, sequence), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(sequence, dtype=jnp.int32), (rows, sequence))
    hidden_ND = hidden(model, params, {"tokens": tokens, "segment_ids": one, "positions": positions}, 1)
    matrix, axes = model.lm_head(params)
    matrix_DV = matrix if axes == ("embed", "vocab") else matrix.T
    return (hidden_ND @ matrix_DV).reshape(rows, sequence, -1)


def read(name: str, config) -> dict:
    model, _ = program(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    placed = lambda info, leaf: leaf.update(sharding=model.ops.layout.sharding(info.axes))  # noqa: E731
    return assembled(jax.tree.map(placed, model.weights, shapes), Weights(FOLDERS / name, config).array)


def apart(name: str, config=None, change=lambda params: params) -> float:
    """Returns how far the logits of a folder are from those recorded. config: another shape than its own.
    change: of the parameters."""
    config = read_config(FOLDERS / name)[0] if config is None else config
    tokens, positions, wanted = golden(name)
    found = np.asarray(program(config)[1](change(read(name, config)), tokens))[:, positions]
    return float(np.abs(found - wanted).max())


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_without_a_mutant_they_agree(name):
    assert apart(name) < AGREE


def by_table(change):
    """Returns a mutant of the table that every family's layers use."""

    def mutated(layer, table):
        for tensor in original(layer, table):
            yield change(tensor, layer, table)

    original = published.layer_tensors
    return mutated


def swapped(one: str, other: str):
    def change(tensor, layer, table):
        for here, there in ((one, other), (other, one)):
            if tensor.name.endswith(f"{here}.weight"):
                name = tensor.name.replace(here, there)
                return dataclasses.replace(tensor, name=name)
        return tensor

    return change


@pytest.mark.parametrize(("one", "other"), [("k_proj", "v_proj"), ("gate_proj", "up_proj")])
def test_swapped_tensors_are_noticed(monkeypatch, one, other):
    """They have the same shape, and only what comes out says so."""
    monkeypatch.setattr(llama_published, "layer_tensors", by_table(swapped(one, other)))
    assert apart("qwen3") > CLEAR


def layerwise(change):
    """Returns a change of the weights of each layer."""

    def all_layers(params):
        groups = tuple(
            tuple(tuple(change(layer) for layer in block) for block in g) for g in params["layers"]
        )
        return params | {"layers": groups}

    return all_layers


def permuted(layer):
    """Rotary pairs side by side, as some files have them, in place of half a head apart."""
    attention = dict(layer["attention"])
    for name in ("query", "key"):
        matrix_DHC = attention[name]
        half = matrix_DHC.shape[-1] // 2
        attention[name] = jnp.stack([matrix_DHC[..., :half], matrix_DHC[..., half:]], -1).reshape(
            matrix_DHC.shape
        )
    return layer | {"attention": attention}


def turned_out(layer):
    """The output matrix of attention the other way round; it is [H·C, D], and a square in many models."""
    out_HCD = layer["attention"]["out"]
    flat = out_HCD.reshape(-1, out_HCD.shape[-1])
    square = flat[: flat.shape[1]].T
    turned = jnp.concatenate([square, flat[flat.shape[1] :]]).reshape(out_HCD.shape)
    return layer | {"attention": layer["attention"] | {"out": turned}}


def without_one(layer):
    """Gemma's norms without what the model adds to their scales."""
    norms = {name: {"scale": each["scale"] - 1} for name, each in layer.items() if name.endswith("norm")}
    assert norms
    return layer | norms


@pytest.mark.parametrize("change", [permuted, turned_out])
def test_matrices_the_other_way_round_are_noticed(change):
    assert apart("qwen3", change=layerwise(change)) > CLEAR


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_base_of_the_rotary_positions_that_is_the_default_is_noticed(name):
    config, _ = read_config(FOLDERS / name)
    assert config.rope_theta == 1e6
    assert apart(name, dataclasses.replace(config, rope_theta=1e4)) > CLEAR


def test_norms_without_their_one_are_noticed():
    assert apart("gemma3", change=layerwise(without_one)) > CLEAR


def test_a_tied_head_that_is_not_is_noticed():
    """It is refused: there is no such tensor."""
    config, _ = read_config(FOLDERS / "qwen3")
    with pytest.raises(Exception, match=r"lacks tensor 'lm_head\.weight'"):
        Weights(FOLDERS / "qwen3", dataclasses.replace(config, tied_embeddings=False))
    mistral, _ = read_config(FOLDERS / "mistral")
    with pytest.raises(Exception, match=r"'lm_head\.weight'.* is not the same"):
        Weights(FOLDERS / "mistral", dataclasses.replace(mistral, tied_embeddings=True))


def test_a_list_of_stop_tokens_that_is_cut_is_noticed(tmp_path):
    folder = folder_of(tmp_path, "smollm")
    change_json(folder / "generation_config.json", eos_token_id=[2, 7, 9])
    assert read_generation_defaults(folder).stop == (2, 7, 9)
    change_json(folder / "generation_config.json", eos_token_id=None)
    change_json(folder / "config.json", eos_token_id=[2, 5])
    assert read_generation_defaults(folder).stop == (2, 5)


def test_a_second_bos_token_is_noticed(tmp_path):
    """The tokenizer's own template puts one first; what encodes documents must not put another."""
    folder = folder_of(tmp_path, "smollm")
    assert json.loads((folder / "tokenizer.json").read_text())["post_processor"] is not None
    tokenizer = Tokenizer.of(folder)
    (document,) = tokenizer.encode(["a cat"])
    assert document.tolist() == [1, *tokenizer.encode_prompt("a cat")[1:], 2]
    assert document.tolist().count(1) == 1 and tokenizer.encode_prompt("<s>a cat").tolist().count(1) == 1


def minimised(microbatches: int, made: dict) -> float:
    """Returns the loss that a step reports of a batch."""
    step = make(microbatches=microbatches)
    placed = {name: jax.device_put(value) for name, value in made.items()}
    sums, _ = step.gradients(step.state["params"], placed)
    return float(sums["loss"])


@functools.cache
def by_hand() -> np.ndarray:
    """Returns the losses of a batch's tokens [B, T], in NumPy from the model's logits."""
    step, made = make(), batch(0)
    model, params = step.step.objective.model, step.state["params"]
    hidden_ND = jax.jit(lambda params: hidden(model, params, made, 8))(params)
    matrix, axes = model.lm_head(params)
    matrix_DV = np.asarray(matrix if axes == ("embed", "vocab") else matrix.T)
    logits = (np.asarray(hidden_ND) @ matrix_DV).astype(np.float64)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), made["targets"].ravel()]
    return losses.reshape(made["tokens"].shape)


def test_a_mask_that_is_shifted_by_one_is_noticed():
    made = batch(0)
    mean = lambda mask: (by_hand() * mask).sum() / mask.sum()  # noqa: E731
    right, shifted = mean(made["loss_mask"]), mean(np.roll(made["loss_mask"], 1, axis=1))
    found = minimised(1, made)
    assert found == pytest.approx(right, rel=1e-5) and abs(found - shifted) > 1e-3


def test_a_mean_of_each_micro_batch_is_noticed():
    """Rows have unequal numbers of answers, so the mean of means is another."""
    made, losses = batch(0), by_hand()
    mask = made["loss_mask"]
    right = (losses * mask).sum() / mask.sum()
    halves = [slice(0, ROWS // 2), slice(ROWS // 2, ROWS)]
    wrong = np.mean([(losses[half] * mask[half]).sum() / mask[half].sum() for half in halves])
    found = minimised(2, made)
    assert found == pytest.approx(right, rel=1e-5) and abs(wrong - right) > 1e-4
