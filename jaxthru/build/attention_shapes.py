"""Each kind of attention that a model's blocks ask for, by shapes alone."""

import jax.numpy as jnp

from jaxthru.config import RunConfig
from jaxthru.engine.model import AttentionShape, Model
from jaxthru.models import family
from jaxthru.models.ops import Ops
from jaxthru.runtime.sharding import Layout
from pallas_kernels import dispatch
from pallas_kernels.rms_norm import PARTITIONED


def shapes_of(config: RunConfig, layout: Layout) -> tuple[int, list[AttentionShape]]:
    """Returns the rows of a micro-batch that a device has, and each kind of attention of the model, of all
    heads."""
    rows = config.train.rows_at_once
    ops = Ops(layout, jnp.dtype(config.precision.compute), rms_norm_by=PARTITIONED)
    model = Model(family.chain(config.model), ops, "none", "unroll")
    with dispatch.assumed("cpu"):  # which alters no shape, and no backend has to start
        shapes = model.attention_shapes(rows, config.data.sequence)
    return rows // layout.size("batch"), shapes
