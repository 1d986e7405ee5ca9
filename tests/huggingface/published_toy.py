"""A small family with a table of its own: every kind of tensor, and folders of it."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors

from jaxthru.models.family import FamilyConfig
from jaxthru.models.published import Published, Tensor
from jaxthru.models.stage import Chain, Stage, repeated
from jaxthru.runtime.weights import WeightInfo

D, H, C, M, V = 8, 4, 2, 12, 16


@dataclasses.dataclass(frozen=True)
class Config(FamilyConfig):
    depth: int = 2
    tied: bool = False


BLOCK = {
    "query": ((D, H, C), WeightInfo(("embed", "heads", "head_dim"), "matrix", (0,))),
    "bias": ((H, C), WeightInfo(("heads", "head_dim"), "bias")),
    "out": ((H, C, D), WeightInfo(("heads", "head_dim", "embed"), "matrix", (0, 1))),
    "down": ((M, D), WeightInfo(("mlp", "embed"), "matrix", (0,))),
    "norm": ((D,), WeightInfo((None,), "norm")),
}
TABLE = {"table": ((V, D), WeightInfo(("vocab", "embed"), "table", (0,)))}
MATRIX = {"matrix": ((D, V), WeightInfo(("embed", "vocab"), "table", (0,)))}


def stage(name: str, weights: dict) -> Stage:
    def init(key):
        return {name: jnp.zeros(shape, jnp.float32) for name, (shape, _) in weights.items()}

    return Stage(name, apply=NotImplemented, init=init, weights={n: info for n, (_, info) in weights.items()})


EMBEDDING, BLOCKS = stage("embedding", TABLE), stage("block", BLOCK)
HEADS = {True: stage("head", {}), False: stage("head", MATRIX)}


def stages(config: Config) -> Chain:
    output = ("embedding", "table") if config.tied else ("head", "matrix")
    return Chain(EMBEDDING, repeated((BLOCKS,), config.depth), HEADS[config.tied], output)


def train_flops(config, tokens, attention_span) -> float:
    return 0.0


def tensors(config: Config):
    yield Tensor("model.embed.weight", ("embedding", "table"))
    for layer in range(config.depth):
        for name in BLOCK:
            path = ("layers", str(layer), name)
            yield Tensor(f"model.layers.{layer}.{name}.weight", path, name in ("query", "out", "down"))
    if not config.tied:
        yield Tensor("lm_head.weight", ("head", "matrix"), True)


PUBLISHED = Published(("toy",), dict, lambda config: {}, tensors)

SHAPES = {"query": (H * C, D), "bias": (H * C,), "out": (D, H * C), "down": (D, M), "norm": (D,)}


def arrays(config: Config, dtype=ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """Published tensors of random values; norms are float32 and biases float16 whatever the rest is."""
    draw = np.random.default_rng(0).standard_normal
    found = {"model.embed.weight": draw((V, D)).astype(dtype)}
    own = {"norm": np.float32, "bias": np.float16}
    for layer in range(config.depth):
        for name, shape in SHAPES.items():
            found[f"model.layers.{layer}.{name}.weight"] = draw(shape).astype(own.get(name, dtype))
    return found if config.tied else found | {"lm_head.weight": draw((V, D)).astype(dtype)}


def save(path: Path, found: dict[str, np.ndarray]) -> None:
    """Writes a file by the library."""
    specs = {
        name: safetensors.TensorSpec(
            dtype=array.dtype.name, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in found.items()
    }
    path.write_bytes(bytes(safetensors.serialize(specs, metadata={"format": "pt"})))


def folder_of(path: Path, found: dict[str, np.ndarray], shards: int = 1) -> Path:
    """Makes a folder of these tensors, in so many files."""
    path.mkdir()
    if shards == 1:
        save(path / "model.safetensors", found)
        return path
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(found.items())[shard::shards])
        weight_map |= dict.fromkeys(part, file)
        save(path / file, part)
    write_index(path, weight_map)
    return path


def write_index(path: Path, weight_map: dict) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def expected(config: Config, found: dict[str, np.ndarray]) -> dict[tuple[str, ...], np.ndarray]:
    """Returns the weights by their places, made by hand."""
    made = {("embedding", "table"): found["model.embed.weight"]}
    for layer in range(config.depth):
        own = {name: found[f"model.layers.{layer}.{name}.weight"] for name in BLOCK}
        turned = {
            "query": own["query"].T.reshape(D, H, C),
            "out": own["out"].T.reshape(H, C, D),
            "down": own["down"].T,
            "bias": own["bias"].reshape(H, C),
            "norm": own["norm"],
        }
        made |= {("layers", str(layer), name): array for name, array in turned.items()}
    return made if config.tied else made | {("head", "matrix"): found["lm_head.weight"].T}


def likes(weights, layout, dtype=None) -> dict[tuple[str, ...], jax.ShapeDtypeStruct]:
    """Returns what each weight is to be on a layout, of its own dtype unless one is given."""
    return {
        path: jax.ShapeDtypeStruct(
            about.shape, dtype or weights.dtypes[path], sharding=layout.sharding(about.info.axes)
        )
        for path, about in weights.tensors.items()
    }
