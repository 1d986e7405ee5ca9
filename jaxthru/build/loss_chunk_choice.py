"""Whether the LM head goes in large chunks of tokens where `train.loss_chunk` is `auto`: if a GPU has room.

Each chunk but the first reads and writes the whole float32 gradient of the head's matrix, so that large
chunks save time, at the price of 1 GiB and more at the fullest moment of a step. Timed on one H200, the head
and loss of Llama 3 8B at 16,384 tokens take 81.5 ms for 83.9, those of Qwen3-0.6B at 32,768 56.4 for 57.9
(docs/lab/kernels.md). Where memory is short, what a step keeps in that room saves more.
"""

import jax.numpy as jnp

from jaxthru.build.defaults import AUTO, replaced, searched
from jaxthru.config import RunConfig
from jaxthru.models import family

KEY = "train.loss_chunk"
SMALL = 1 << 30
"""Bytes of all logits from which on small chunks are several."""


def settled(config: RunConfig, capability: tuple[int, int] | None) -> RunConfig:
    """Returns a configuration that leaves `train.loss_chunk` open only where what fits is searched for
    anyway, on an NVIDIA GPU, and where a run need not give the same bits on a device of other memory.
    capability: of the devices; None of what is no NVIDIA GPU."""
    if config.train.loss_chunk != "auto":
        return config
    if searched(config) and capability is not None and not config.train.deterministic:
        return config
    return replaced(config, {KEY: AUTO[KEY]})


def gains(config: RunConfig, devices: int) -> bool:
    """Says whether large chunks are fewer than small ones, and not to be weighed against offload: a step of
    several programs is one for want of room."""
    tokens = config.train.rows_at_once * config.data.sequence // devices
    words = dict(family.chain(config.model).dims)["vocab"]
    whole = tokens * words * jnp.dtype(config.precision.compute).itemsize
    return whole > SMALL and not config.offload.layered
