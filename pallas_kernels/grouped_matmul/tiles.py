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
    group's first row. count: how many tiles there are.
    """

    group_P: jax.Array
    first_P: jax.Array
    end_P: jax.Array
    begins_P: jax.Array
    count: jax.Array


def most(rows: int, groups: int, of_tile: int, aligned: int = 1) -> int:
    """Returns how many tiles there can be: all groups' last ones but for a row empty."""
    return min((rows + groups * (of_tile + aligned - 2)) // of_tile, rows)


def tiles_of(sizes_E: jax.Array, rows: int, of_tile: int, aligned: int = 1) -> Tiles:
    """Returns the tiles of `of_tile` rows. sizes_E: [E] int32, at most `rows` in all. aligned: divides each
    tile's first row, so that a group's first tile may begin in the group before it."""
    E = len(sizes_E)
    end_E = jnp.cumsum(sizes_E)
    before_E = (end_E - sizes_E) % aligned  # rows of the group before it that a group's first tile has
    tiles_E = jnp.where(sizes_E > 0, (before_E + sizes_E + (of_tile - 1)) // of_tile, 0)
    behind_E = jnp.cumsum(tiles_E)
    tile_P = jnp.arange(most(rows, E, of_tile, aligned), dtype=jnp.int32)
    # Comparisons, which fuse; a search is a loop.
    group_P = jnp.sum(tile_P[:, None] >= behind_E[None, :], axis=1, dtype=jnp.int32)
    at_P = jnp.minimum(group_P, E - 1)
    of = lambda of_E: of_E.at[at_P].get(mode="promise_in_bounds")  # noqa: E731
    begins_P, end_P = of(end_E - sizes_E), of(end_E)
    first_P = begins_P - of(before_E) + (tile_P - of(behind_E - tiles_E)) * of_tile
    return Tiles(group_P, first_P, end_P, begins_P, behind_E[-1])
