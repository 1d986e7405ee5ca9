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
    first: jax.Array  # [B, T] int32: the first position of each token's segment
    last: jax.Array  # [B, T] int32: its last position
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
    begins_BT = jnp.pad(begins_BT, ((0, 0), (1, 0)))
    ends_BT = jnp.pad(begins_BT[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    ids_BT = jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32)
    T = ids_BT.shape[1]
    positions_1T = jnp.arange(T, dtype=jnp.int32)[None, :]
    # Comparing and summing fuses into one pass and, unlike a scatter, has one order of summation everywhere.
    numbers_M = jnp.arange(max_segments, dtype=jnp.int32)
    ids_BT1 = ids_BT[:, :, None]
    starts_BM = jnp.sum(ids_BT1 < numbers_M[None, None, :], axis=1, dtype=jnp.int32)
    lengths_BM = jnp.sum(ids_BT1 == numbers_M[None, None, :], axis=1, dtype=jnp.int32)
    used_BM = lengths_BM > 0
    return Segments(
        ids=ids_BT,
        first=jax.lax.cummax(jnp.where(begins_BT, positions_1T, 0), axis=1),
        last=jax.lax.cummin(jnp.where(ends_BT, positions_1T, T), axis=1, reverse=True),
        starts=jnp.where(used_BM, starts_BM, -1),
        lengths=jnp.where(used_BM, lengths_BM, -1),
        overflow=ids_BT[:, -1] >= max_segments,
    )
