"""Does a configuration fit these devices? Asked before any data is prepared and any device works."""

import jax

from jaxthru.config import RunConfig
from jaxthru.runtime.mesh import make_mesh
from jaxthru.runtime.sharding import Layout, check_divisible
from jaxthru.training.step import check_groups


def fit(config: RunConfig, devices: list[jax.Device] | None = None) -> Layout:
    """Returns the layout of a configuration on these devices, by default all of them.

    Raises InputError, naming the key, where rows, heads or another size cannot be split as the mesh asks.
    """
    train, shape = config.train, config.model
    layout = Layout(make_mesh(config.mesh, devices))
    sizes = {
        "train.rows / train.microbatches": ("batch", train.rows // train.microbatches),
        "model.embed": ("embed", shape.embed),
        "model.heads": ("heads", shape.heads),
        "model.kv_heads": ("kv_heads", shape.kv_heads),
        "model.mlp": ("mlp", shape.mlp),
        "model.vocabulary": ("vocab", shape.vocabulary),
    }
    check_divisible(layout, sizes)
    check_groups(train, config.data.groups_of(train.rows), layout.size("batch"))
    return layout


def attention_by(config: RunConfig) -> str:
    """Returns which attention is to run. cuDNN's repeatable kernel takes memory that grows with rows ×
    segments × heads × sequence²; the Triton kernels repeat bit for bit as they are."""
    chosen = config.model.attention
    repeatable = config.train.deterministic and jax.default_backend() == "gpu"
    return "triton" if chosen == "auto" and repeatable else chosen
