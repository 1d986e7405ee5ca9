"""Where the documents of packed rows begin and how long they are: found once a step, shared by all layers.

Shapes: B rows, T tokens of a row, M the most segments that a row may have.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Segments(NamedTuple):
    """The segments of packed rows. Every field's first dim is the batch, so all shard alike.

    A segment is a maximal run of equal `segment_ids`. The padding tail (id 0) is one more segment, so that
    attention is defined, and finite, at every position.
    """

    ids: jax.Array  # [B, T] int32: each token's segment, from 0 in each row (not the batch's ids)
    starts: jax.Array  # [B, M] int32: each segment's first position, -1 where unused
    lengths: jax.Array  # [B, M] int32: each segment's number of tokens, -1 where unused
    overflow: jax.Array  # [B] bool: the row has more than M segments; its attention is then not to be trusted


def find_segments(segment_ids_BT: jax.Array, max_segments: int) -> Segments:
    """Finds the segments of each row; jit-able, and without any exchange between rows.

    Args:
      segment_ids_BT: [B, T] int32, equal within a document; 0 is padding.
      max_segments: M, static; the padding tail counts as one. With 1, each row must be one run.

    Returns:
      Segments. Rows with more than M are flagged in `overflow`, never silently cut: make the loss NaN.
    """
    begins_BT = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    ids_BT = jnp.cumsum(jnp.pad(begins_BT, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
    # Comparing and summing fuses into one pass and, unlike a scatter, has one order of summation everywhere.
    numbers_M = jnp.arange(max_segments, dtype=jnp.int32)
    ids_BT1 = ids_BT[:, :, None]
    starts_BM = jnp.sum(ids_BT1 < numbers_M[None, None, :], axis=1, dtype=jnp.int32)
    lengths_BM = jnp.sum(ids_BT1 == numbers_M[None, None, :], axis=1, dtype=jnp.int32)
    used_BM = lengths_BM > 0
    return Segments(
        ids=ids_BT,
        starts=jnp.where(used_BM, starts_BM, -1),
        lengths=jnp.where(used_BM, lengths_BM, -1),
        overflow=ids_BT[:, -1] >= max_segments,
    )
