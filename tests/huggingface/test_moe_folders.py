"""Folders of mixtures of experts: Mixtral, Qwen3-MoE and OLMoE, in either of their layouts, both ways."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from cases import slow_but_for

from jaxthru.huggingface import pretrained
from jaxthru.huggingface.config import model_config, read_config, written
from jaxthru.huggingface.mapping import mapped
from jaxthru.huggingface.weights import Weights
from jaxthru.huggingface.write import write_folder
from jaxthru.models import family, moe
from jaxthru.models.moe_published import fused_tensors
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout

SIZES = {
    **{"vocabulary": 32, "layers": 2, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 4},
    **{"experts": 4, "top_k": 2, "expert_mlp": 8},
}
SHAPES = {
    "mixtral": moe.Config(**SIZES, score="softmax_of_chosen", norm_epsilon=1e-5),
    "qwen3_moe": moe.Config(**SIZES, mlp=24, qk_norm=True, dense_first=1, norm_epsilon=1e-6),
    "olmoe": moe.Config(**SIZES, qk_norm=True, qk_norm_together=True, normalise=False, norm_epsilon=1e-5),
}
EXPERT = {
    "mixtral": ("model.layers.1.block_sparse_moe.experts.3.{}.weight", ("w1", "w3", "w2")),
    "qwen3_moe": ("model.layers.1.mlp.experts.3.{}.weight", ("gate_proj", "up_proj", "down_proj")),
    "olmoe": ("model.layers.1.mlp.experts.3.{}.weight", ("gate_proj", "up_proj", "down_proj")),
}


def params(shape: moe.Config) -> dict[tuple[str, ...], np.ndarray]:
    """Returns random weights, by their places."""
    draw = np.random.default_rng(3).standard_normal
    found = {}
    for tensor, _, size in family.published_weights(shape):
        if tensor.path not in found:
            found[tensor.path] = draw(size).astype(ml_dtypes.bfloat16)
    return found


def folder_of(kind: str, path, fused: bool = False):
    """Returns a folder as transformers writes one, made without the code under test's writer."""
    shape, whole = SHAPES[kind], params(SHAPES[kind])
    tensors = {}
    for tensor, info, size in family.published_weights(shape, fused_tensors if fused else None):
        weight = whole[tensor.path]
        if tensor.path[-1] == "gate_up" and fused:  # [E, D, 2, M] -> [E, 2·M, D]
            weight = np.concatenate([weight[:, :, side].swapaxes(1, 2) for side in (0, 1)], axis=1)
        elif tensor.path[-1] == "gate_up":
            (_, expert), (_, side) = tensor.part
            weight = weight[expert, :, side].T
        elif tensor.path[3:] == ("down",) and weight.ndim == 3:
            weight = weight.swapaxes(1, 2) if fused else weight[tensor.part[0][1]].T
        elif tensor.transposed:
            inputs = np.prod([size[dim] for dim in info.inputs])
            weight = weight.reshape(inputs, -1).T
        else:
            weight = weight.reshape(-1) if not info.inputs else weight
        tensors[tensor.name] = np.ascontiguousarray(weight)
    path.mkdir()
    safetensors.numpy.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(written(shape, "bfloat16", None)))
    return path


LAYOUTS = {"each": False, "fused": True}


@slow_but_for("qwen3_moe-each", "mixtral-fused", kind={kind: kind for kind in SHAPES}, fused=LAYOUTS)
def test_a_folder_is_read_expert_by_expert(kind, fused, tmp_path):
    folder = folder_of(kind, tmp_path / "folder", fused)
    names = safetensors.numpy.load_file(folder / "model.safetensors").keys()
    pattern, each = EXPERT[kind]
    assert fused != all(pattern.format(name) in names for name in each)
    assert fused == ("model.layers.1.mlp.experts.gate_up_proj" in names)
    shape, _ = read_config(folder)
    weights = Weights(folder, shape)
    assert weights.dtype == "bfloat16"
    for path, wanted in params(SHAPES[kind]).items():
        found = weights.array(path, jax.ShapeDtypeStruct(wanted.shape, jnp.float32))
        np.testing.assert_array_equal(found, wanted.astype(np.float32), err_msg=str(path))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"expert": 4, "fsdp": 2}, {"expert": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_each_device_is_handed_its_own_experts(mesh, tmp_path, monkeypatch):
    folder = folder_of("qwen3_moe", tmp_path / "folder")
    layout = Layout(make_mesh(MeshConfig(**mesh)))
    weights = Weights(folder, read_config(folder)[0])
    put, real = [], jax.device_put
    monkeypatch.setattr(
        jax, "device_put", lambda x, to=None, **how: put.append((x, to)) or real(x, to, **how)
    )
    for name in ("gate_up", "down"):
        path, info = ("layers", "1", "mlp", name), weights.tensors["layers", "1", "mlp", name].info
        wanted = params(SHAPES["qwen3_moe"])[path].astype(np.float32)
        home = layout.sharding(info.axes)
        found = weights.array(path, jax.ShapeDtypeStruct(wanted.shape, jnp.float32, sharding=home))
        assert found.sharding.is_equivalent_to(home, found.ndim)
        np.testing.assert_array_equal(found, wanted)
        handed = sum(x.size for x, _ in put if isinstance(x, np.ndarray))
        assert handed == sum(shard.data.size for shard in found.addressable_shards)
        put.clear()


@slow_but_for("mixtral-each", "qwen3_moe-fused", kind={kind: kind for kind in SHAPES}, fused=LAYOUTS)
def test_what_was_read_is_written_to_the_byte(kind, fused, tmp_path):
    source = folder_of(kind, tmp_path / "folder", fused)
    shape, raw = read_config(source)
    weights = Weights(source, shape)
    asked: list[tuple[str, ...]] = []

    def read(tensor):
        asked.append(tensor.path)
        about = weights.tensors[tensor.path]
        return weights.array(tensor.path, jax.ShapeDtypeStruct(about.shape, jnp.float32))

    target = tmp_path / "written"
    files = {"config.json": json.dumps(written(shape, "bfloat16", raw)).encode()}
    write_folder(target, shape, read, weights.dtype_of, files, like=weights.folder)
    one, other = (safetensors.numpy.load_file(path / "model.safetensors") for path in (source, target))
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype
        np.testing.assert_array_equal(array, other[name], err_msg=name)
    assert len(asked) == len({*asked}), "a weight in parts was read more than once"
    assert read_config(target)[0] == shape


@pytest.mark.parametrize("kind", SHAPES)
def test_config_json_there_and_back(kind):
    raw = written(SHAPES[kind], "bfloat16", None)
    assert raw["model_type"] == kind
    found = model_config(raw, "config.json")
    wanted = SHAPES[kind] if kind == "qwen3_moe" else dataclasses.replace(SHAPES[kind], mlp=found.mlp)
    assert found == wanted
    other = dict(raw)
    for name, alike in (("num_local_experts", "num_experts"), ("num_experts", "num_local_experts")):
        if name in raw:
            other[alike] = other.pop(name)
    assert model_config(other, "config.json") == found


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1: is not built"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0: is not built; must be null"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2: is not built; built: 1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]: is not built unless"),
        ("qwen3_moe", {"num_local_experts": 8}, "num_local_experts = 8 and num_experts = 4: contradict"),
        ("mixtral", {"num_experts_per_tok": 9}, "model.top_k = 9: must be at most model.experts = 4"),
    ],
)
def test_what_is_not_built_is_named(kind, change, message):
    with pytest.raises(InputError, match=f"config.json: .*{message}"):
        model_config(written(SHAPES[kind], "bfloat16", None) | change, "config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias_rate": 0.001}, "model.bias_rate = 0.001: no published model type has it"),
        ({"shared_mlp": 8}, "model.shared_mlp = 8: no published model type has it"),
        ({"score": "sigmoid"}, "model.score = 'sigmoid': published model types have a softmax"),
        ({"dense_first": 1}, "model.dense_first = 1: model type mixtral has experts in each layer"),
    ],
)
def test_what_is_not_published_is_named(change, message):
    with pytest.raises(InputError, match=message):
        written(dataclasses.replace(SHAPES["mixtral"], **change), "bfloat16", None)


def test_a_missing_expert_is_named(tmp_path):
    folder = folder_of("olmoe", tmp_path / "folder")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        InputError, match=r"lacks tensor 'model.layers.1.mlp.experts.2.up_proj.weight' \[8, 16\]"
    ):
        Weights(folder, read_config(folder)[0])


def test_the_table_is_that_of_the_folder():
    shape = SHAPES["mixtral"]
    fused = [tensor.name for tensor in fused_tensors(shape)]
    assert list(mapped(shape, fused)) == fused
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in mapped(shape)


def test_how_it_is_trained_is_no_part_of_a_published_shape(tmp_path):
    folder = folder_of("mixtral", tmp_path / "folder")
    asked = moe.Config(pretrained=str(folder), aux_loss=0.02, router_z_loss=0.001, loop="unroll")
    found = pretrained.taken(asked)
    assert (found.aux_loss, found.router_z_loss, found.loop) == (0.02, 0.001, "unroll")
    assert found.experts == SIZES["experts"] and found.score == "softmax_of_chosen"
    with pytest.raises(InputError, match=r"model.bias_rate = 0.001: .*config.json has 0.0"):
        pretrained.taken(dataclasses.replace(asked, bias_rate=0.001))
