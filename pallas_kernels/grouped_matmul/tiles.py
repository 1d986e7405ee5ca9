"""Rows of groups cut into tiles that belong to one group each: what a kernel's programs take in turn.

The last tile of a group may have fewer rows. How many tiles there are is known only on the device; there is
room for the most there can be, and those behind the last are of group E, which none has.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """Tiles in the order of their rows, int32.

    group_P: of each tile. first_P: its first row. end_P: the row behind its group's last. begins_P: its
    group's first row. behind_E: the tile behind each group's last.
    """

    group_P: jax.Array
    first_P: jax.Array
    end_P: jax.Array
    begins_P: jax.Array
    behind_E: jax.Array

    @property
    def count(self) -> jax.Array:
        """How many tiles there are."""
        return self.behind_E[-1]


def most(rows: int, groups: int, of_tile: int, aligned: int = 1) -> int:
    """Returns how many tiles there can be: all groups' last ones but for a row empty."""
    return min((rows + groups * (of_tile + aligned - 2)) // of_tile, rows)


def tiles_of(sizes_E: jax.Array, rows: int, of_tile: int, aligned: int = 1) -> Tiles:
    """Returns the tiles of `of_tile` rows. sizes_E: [E] int32, at most `rows` in all. aligned: divides each
    tile's first row, so that a group's first tile may begin in the group before it."""
    # Three reductions under comparisons, a kernel each: XLA makes two of a running sum, a loop of a search.
    E = len(sizes_E)
    running_EE = jnp.tri(E, dtype=bool)
    end_E = jnp.sum(jnp.where(running_EE, sizes_E[None, :], 0), axis=1, dtype=jnp.int32)
    before_E = (end_E - sizes_E) % aligned  # rows of the group before it that a group's first tile has
    tiles_E = jnp.where(sizes_E > 0, (before_E + sizes_E + (of_tile - 1)) // of_tile, 0)
    behind_E = jnp.sum(jnp.where(running_EE, tiles_E[None, :], 0), axis=1, dtype=jnp.int32)
    tile_P = jnp.arange(most(rows, E, of_tile, aligned), dtype=jnp.int32)
    past_PE = tile_P[:, None] >= behind_E[None, :]
    group_P = jnp.sum(past_PE, axis=1, dtype=jnp.int32)
    begins_P = jnp.max(jnp.where(past_PE, end_E[None, :], 0), axis=1)
    end_P = jnp.min(jnp.where(past_PE, jnp.iinfo(jnp.int32).max, end_E[None, :]), axis=1)
    # Tiles that are not full move those behind them ahead: the last group that a tile is past, the furthest.
    ahead_E = end_E - end_E % aligned - behind_E * of_tile
    first_PE = (tile_P * of_tile)[:, None] + jnp.where(past_PE, ahead_E[None, :], 0)
    return Tiles(group_P, jnp.min(first_PE, axis=1), end_P, begins_P, behind_E)
