"""How the Triton kernels cut a grouped matmul into tiles.

What was measured decides, where it is at hand: `TABLE`, by scripts/bench/tune_grouped_matmul.py. Of several
numbers of rows that were, that with the nearest mean of a group counts, within a factor of four. Elsewhere
`choose` takes the largest tiles that registers and shared memory of such a GPU hold; none is measured.
"""

import dataclasses
import itertools
import json
import math
from pathlib import Path

TABLE_FILE = Path(__file__).with_name("triton_table.json")
TABLE: dict[str, dict[str, dict]] = json.loads(TABLE_FILE.read_text())
"""{device kind: {key of a Problem: {"tile": the fields of a Tile, "microseconds": of a call without a pause
and in bursts, "plain_microseconds": of XLA's dense product of as many FLOPs in the same run}}}"""

NEAR = 4.0
"""How many times more or fewer rows a group may have than where a tile was measured."""

SMALLEST = 16  # of each dim of a matrix unit's product, in Triton


@dataclasses.dataclass(frozen=True)
class Tile:
    """m × n of the result for each program, k contracted at a time.

    warps: of a program. stages: blocks loaded at once. band: tiles of rows that are taken together, column by
    column, so that programs which run at one time share operands in the L2 cache; of no use to the outer
    product.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    band: int = 8

    def shared_bytes(self, itemsize: int) -> int:
        """Returns the shared memory that the operands take."""
        return self.stages * (self.m + self.n) * self.k * itemsize


HOPPER = Tile(128, 256, 64, 8, 3)
"""From 9.0 up to 12.0: 227 KiB of shared memory, and matrix units that two warpgroups keep busy."""
AMPERE = Tile(128, 128, 32, 4, 4)
"""Other GPUs of NVIDIA's: 64 KiB of the 99 that the least of them has."""
AMPERE_OUTER = Tile(128, 128, 32, 8, 4)
"""The last rows of a group are a product of their own, whose addresses take registers too."""
AMD = Tile(128, 128, 32, 4, 2)
"""Warps of 64 threads, and 64 KiB."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call. operation: "matmul", "transposed" (the matrices are) or "outer".

    rows, groups: R and E. columns: I, of the rows. results: O.
    """

    operation: str
    rows: int
    groups: int
    columns: int
    results: int
    dtype: str

    @property
    def mean(self) -> int:
        """Rows of a group, as a power of two: with it the best tiles change, and not with a few rows."""
        return 1 << round(math.log2(max(self.rows / self.groups, 1)))

    @property
    def key(self) -> str:
        """What the table has it under."""
        return self.key_of(self.mean)

    def key_of(self, mean: int) -> str:
        """Returns the key of the same with so many rows in a group."""
        return f"{self.operation}/{mean}x{self.columns}x{self.results}/{self.dtype}"

    @property
    def flops(self) -> float:
        """Of all rows, if each has a group."""
        return 2.0 * self.rows * self.columns * self.results

    @property
    def sides(self) -> tuple[int, int, int]:
        """What a tile's m, n and k are of."""
        if self.operation == "outer":
            return self.columns, self.results, self.mean
        return self.mean, self.results, self.columns


def choose(problem: Problem, device_kind: str | None, capability: tuple[int, int] | None) -> Tile:
    """Returns the tile of a problem. capability: NVIDIA's compute capability, or None of another maker."""
    if (entry := measured(problem, device_kind)) is not None:
        return Tile(**entry["tile"])
    if capability is None:
        return _cut(AMD, problem)
    if (9, 0) <= capability < (12, 0):
        return _cut(HOPPER, problem)
    return _cut(AMPERE_OUTER if problem.operation == "outer" else AMPERE, problem)


def measured(problem: Problem, device_kind: str | None) -> dict | None:
    """Returns the table's entry of a problem, or of the nearest with other rows of a group; None without."""
    entries = TABLE.get(device_kind or "", {})
    for factor in (1.0, 2.0, 0.5, NEAR, 1 / NEAR):
        if (entry := entries.get(problem.key_of(int(problem.mean * factor)))) is not None:
            return entry
    return None


def _cut(tile: Tile, problem: Problem) -> Tile:
    """Returns a tile no larger than what there is of each dim, and in float32 as many bytes."""
    m, n, k = (max(SMALLEST, 1 << (side - 1).bit_length()) for side in problem.sides)
    if problem.dtype == "float32":
        tile = dataclasses.replace(tile, n=min(tile.n, 128), k=tile.k // 2)
    return dataclasses.replace(tile, m=min(tile.m, m), n=min(tile.n, n), k=min(tile.k, k))


def candidates(problem: Problem, shared_bytes: int) -> list[Tile]:
    """Returns the tiles to measure. shared_bytes: that a program may have."""
    itemsize = 4 if problem.dtype == "float32" else 2
    sizes = ((128, 256, 8), (256, 128, 8), (128, 128, 8), (128, 128, 4), (64, 256, 4))
    every = itertools.product(sizes, ((64, 3), (64, 4), (32, 4), (32, 5), (128, 2)))
    tiles = (Tile(m, n, k, warps, stages) for (m, n, warps), (k, stages) in every)
    return [tile for tile in tiles if tile.shared_bytes(itemsize) <= shared_bytes]


def in_other_bands(problem: Problem, tile: Tile) -> list[Tile]:
    """Returns the tile in the other orders that are to be measured."""
    bands = () if problem.operation == "outer" else (1, 4, 16)
    return [dataclasses.replace(tile, band=band) for band in bands]
