"""How the kernels for Hopper cut a grouped matmul into tiles.

What was measured decides, where it is at hand: `TABLE`, by scripts/bench/measure/experts_tiles.py. Of several
numbers of rows that were, that with the nearest mean of a group counts. Elsewhere `choose` takes the tiles
that should be fastest.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.hopper_tiles import PIECE, PRODUCT_FLOPS, RATES, SMEM_BYTES, SMS, STEP, RingTiles

TABLE_FILE = Path(__file__).with_name("tile_table.json")
TABLE: dict[str, dict[str, dict]] = json.loads(TABLE_FILE.read_text())
"""{device kind: {key of a Problem: {"tiles": the fields of a Tiles, "microseconds": of a call, "others":
microseconds of the other implementations in the same run, "faster": whether the kernel is}}}"""

LARGEST = 128 * 256  # of a thread block, whose consumers have registers for as many sums
EXACT = 64 * 128  # sums of a consumer that has them twice, those of a step and those of all


@dataclasses.dataclass(frozen=True)
class Tiles(RingTiles):
    """As `RingTiles` has them. A cluster shares rows of x in a product, columns of y in a sum.

    late: whether a tile is stored while the next one is multiplied. shares_w: whether the thread blocks of a
    product's cluster share columns of a group's matrix, and take its rows in turns of half a tile.
    """

    late: bool = False
    shares_w: bool = False

    @staticmethod
    def piece_columns(dtype) -> int:
        """Returns the columns of a piece that is stored at once, of the result's dtype."""
        return 2 * PIECE // dtype.itemsize

    def out_slots(self, piece_columns: int) -> int:
        """Returns how many pieces of each consumer can be on their way out."""
        return self.slots_beside(8, len(self.pieces_of(piece_columns)))

    def smem_bytes(self, piece_columns: int) -> int:
        """Returns the shared memory of a thread block, with one more barrier for a sum's consumers."""
        return self.bytes_beside(8, self.out_slots(piece_columns))


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call of a kernel. operation: "matmul", "matmul_transposed", "outer", "outer_float32", "outer_into",
    "float8" or "float8_exact".

    rows: R of all groups. columns: I of x. results: O of the product, or of y in a sum.
    """

    operation: str
    groups: int
    rows: int
    columns: int
    results: int

    @property
    def key(self) -> str:
        """What the table has it under."""
        return f"{self.operation}/{self.groups}/{self.rows}x{self.columns}x{self.results}"

    @classmethod
    def of_key(cls, key: str) -> "Problem":
        """Returns the problem of a key."""
        operation, groups, sizes = key.split("/")
        return cls(operation, int(groups), *map(int, sizes.split("x")))

    @property
    def sums(self) -> bool:
        return self.operation.startswith("outer")

    @property
    def float8(self) -> bool:
        return self.operation.startswith("float8")

    @property
    def of_step(self) -> int:
        """What a step of the ring contracts."""
        return 2 * STEP if self.float8 else STEP

    @property
    def piece_columns(self) -> int:
        return PIECE // 2 if self.operation in ("outer_float32", "outer_into") else PIECE

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.results

    def check(self, tiles: Tiles) -> None:
        """Raises Unsupported, naming what does not divide or fit."""
        of_m = tiles.m * tiles.cluster if self.sums else self.of_step
        wanted = [("rows", self.rows, 8), ("columns of x", self.columns, of_m)]
        of_n = tiles.n * (1 if self.sums or tiles.shares_w else tiles.cluster)
        wanted += [("columns of the result", self.results, of_n)]
        for what, size, by in wanted:
            if size % by:
                raise Unsupported(f"{what}, {size}, do not divide by {by}")
        if self.rows < (least := STEP if self.sums else tiles.m):
            raise Unsupported(f"{self.rows} rows are fewer than the {least} of a block")
        tiles.check_sums()
        full = self.operation == "float8_exact" or (self.float8 and tiles.cluster > 1)
        if tiles.late and (full or self.piece_columns != PIECE or tiles.m_of_consumer > PIECE):
            raise Unsupported(f"no registers for results of {self.operation} in {tiles} to be stored late")
        if self.operation == "float8_exact" and tiles.m_of_consumer * tiles.n > EXACT:
            raise Unsupported(f"no registers for sums of {tiles} apart from those of the tensor cores")
        if tiles.shares_w and (self.sums or tiles.cluster == 1):
            raise Unsupported(f"a product's clusters share columns of w, no {self.operation} in {tiles} does")
        if (found := tiles.smem_bytes(self.piece_columns)) > SMEM_BYTES:
            raise Unsupported(f"tiles {tiles} take {found} bytes of shared memory, there are {SMEM_BYTES}")


def choose(problem: Problem, device_kind: str, sms: int = SMS) -> tuple[Tiles, bool | None]:
    """Returns the tiles, and whether they were measured to be the fastest way; None if unknown.

    Raises:
      Unsupported: no tiles divide the shape.
    """
    if (entry := measured(problem, device_kind)) is not None:
        tiles = Tiles(**entry["tiles"])
        problem.check(tiles)
        return tiles, entry["faster"]
    fitting = Tiles.fitting(problem.check)
    if not fitting:
        problem.check(Tiles(*min(RATES, key=math.prod)))  # raises: what does not divide by the smallest tiles
    tiles = min(fitting, key=lambda tiles: predict(problem, tiles, sms))
    # Of all products and sums in 2 bytes that were measured, those stored late are the fastest.
    return next(_fitting(problem, tiles, [{"late": True}]), tiles), None


def measured(problem: Problem, device_kind: str) -> dict | None:
    """Returns the table's entry of a problem that differs in the rows of a group at most, or None."""
    entries = ((Problem.of_key(key), entry) for key, entry in TABLE.get(device_kind, {}).items())
    mean = problem.rows / problem.groups
    like = [
        (abs(math.log(other.rows / other.groups / mean)), entry)
        for other, entry in entries
        if (other.operation, other.columns, other.results)
        == (problem.operation, problem.columns, problem.results)
    ]
    return min(like, key=lambda pair: pair[0])[1] if like else None


def predict(problem: Problem, tiles: Tiles, sms: int = SMS) -> float:
    """Returns the seconds that a call should take, with groups of like sizes: a whole number of waves of
    tiles, each with a step's time to begin and to end."""
    mean, of_step = problem.rows / problem.groups, 2.0 * tiles.m * tiles.n * STEP
    if problem.sums:
        count = problem.groups * (problem.columns // tiles.m) * (problem.results // tiles.n)
        steps = mean / STEP + 0.5
    else:  # of a group's last tile, half the consumers have rows, and half of these a half
        waste = tiles.m_of_consumer / 2
        count = (problem.rows + problem.groups * min(waste, mean)) / tiles.m * (problem.results // tiles.n)
        steps = problem.columns / problem.of_step
    of_step *= problem.of_step / STEP
    rate = PRODUCT_FLOPS * RATES.get((tiles.m, tiles.n), 1.0) / sms
    return math.ceil(count / sms) * (steps + 1) * of_step / rate


def candidates(problem: Problem) -> list[Tiles]:
    """Returns the tiles to measure for a shape, none where none fit: the largest, else all that fit, with as
    many stages as there is room for; the first stored late, in pairs, and both. In float8 pairs share w too,
    which was slower in bfloat16, whose operands are twice as long on their way to be multiplied."""
    fitting = Tiles.fitting(problem.check)
    if not fitting:
        return []
    sizes = [tiles for tiles in fitting if tiles.m * tiles.n == LARGEST] or fitting
    pairs = [{"cluster": 2}, {"cluster": 2, "late": True}]
    shared = [{"shares_w": True} | pair for pair in pairs] if problem.float8 else []
    return sizes + list(_fitting(problem, sizes[0], [{"late": True}, *pairs, *shared]))


def _fitting(problem: Problem, tiles: Tiles, forms: list[dict]) -> Iterator[Tiles]:
    """Yields tiles in those of several forms in which they can take a problem."""
    for form in forms:
        with contextlib.suppress(Unsupported):
            formed = dataclasses.replace(tiles, **form)
            problem.check(formed)
            yield formed
