"""The schedule of a ring pass, as plain tables that all implementations share.

t ranks stand in a ring. In each of the t steps of a pass, each rank works on the rows of one shard, and
between two steps it passes something on to its neighbour:

    gather   the rows themselves. They start at the rank that owns them: it works on its own rows first.
    reduce   the sum, so far, of what ranks contribute to the rows. It starts at the rank next to the one that
             owns them and ends there: that one works on its own rows last. The rows of rank r are summed in
             the order r + shift, r + 2·shift, ..., r: the same in every run, another for each rank.

What rank r works on is always the shard (r + offset) mod t with an offset that is the same for all ranks, so
that a table of offsets is the whole schedule, for a rank that is a number and for one that is traced.

A pass in both directions sends one half of each shard's rows one way and the other half the other way.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Lane:
    """Some of the rows of every shard, and their way around the ring."""

    shift: int  # 1 or -1: what a rank passes on goes to the rank that is so far ahead
    start: int  # the first of a shard's rows
    rows: int
    gather: tuple[int, ...]  # for each step, the offset from a rank to the shard whose rows it holds
    reduce: tuple[int, ...]  # for each step, the offset to the shard to whose sum it adds

    def permutation(self) -> tuple[tuple[int, int], ...]:
        """Returns (from, to) for each rank, the same between any two steps."""
        t = len(self.gather)
        return tuple((rank, (rank + self.shift) % t) for rank in range(t))


def ring(t: int, rows: int, directions: int = 1) -> tuple[Lane, ...]:
    """Returns the lanes of a pass over t shards of so many rows each, in one direction or in both.

    A single row goes one way. On a switch, where any two devices have the whole of their links, one direction
    is as fast as both; on a torus both use twice the links.
    """
    if directions not in (1, 2):
        raise ValueError(f"a ring has 1 or 2 directions, not {directions}")
    half = rows // 2 if directions == 2 else 0
    parts = [(1, 0, rows - half), (-1, rows - half, half)]
    return tuple(
        Lane(
            shift,
            start,
            count,
            gather=tuple(-shift * step % t for step in range(t)),
            reduce=tuple(-shift * (step + 1) % t for step in range(t)),
        )
        for shift, start, count in parts
        if count
    )
