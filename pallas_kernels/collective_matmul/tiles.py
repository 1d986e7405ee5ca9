"""How the kernels for Hopper cut a matmul into tiles, and whether they are expected to pay.

Shapes, all of one shard: t shards on the mesh axis, M rows, K contracted, N columns.

What was measured decides, where it is at hand: `TABLE`, by scripts/bench/tune_collective_matmul.py. Elsewhere
`choose` takes the tiles with the fewest waves of thread blocks, and `predict` compares the kernel with the
plain form by bytes and operations.
"""

import dataclasses
import json
import math
from pathlib import Path

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.hopper_tiles import (
    CONSUMERS,
    PIECE,
    PRODUCT_FLOPS,
    RATES,
    SMEM_BYTES,
    SMS,
    STEP,
    RingTiles,
)

__all__ = ["CONSUMERS", "PIECE", "PRODUCT_FLOPS", "RATES", "SMEM_BYTES", "SMS", "STEP"]
__all__ += ["ORDERS", "TABLE", "TABLE_FILE", "Problem", "Tiles", "candidates", "choose", "predict"]
__all__ += ["reordered", "wave_bytes"]

TABLE_FILE = Path(__file__).with_name("tile_table.json")
TABLE: dict[str, dict[str, dict]] = json.loads(TABLE_FILE.read_text())
"""{device kind: {key of a Problem: {"tiles": the fields of a Tiles, "microseconds": of a call with the kernel
without a pause and in bursts (a single number: without a pause), "plain_microseconds": of the plain form in
the same run, "faster": whether the kernel is, and where they were read "joules" and "plain_joules": of a call
without a pause, on all GPUs}}}"""

ORDERS = tuple((minor, width) for minor in "MN" for width in (8, 16, 4, 32))  # to measure: of Tiles


@dataclasses.dataclass(frozen=True)
class Tiles(RingTiles):
    """As `RingTiles` has them; "M" takes the rows in order, as they arrive. What a cluster shares is columns.

    senders: thread blocks that write to peers, through 16 KB of shared memory each. The default was measured:
    many fewer are slow to send, and behind what more have under way the loads of all wait.
    """

    senders: int = 44

    def out_slots(self, sends: bool) -> int:
        """Returns how many pieces of each consumer can be on their way out."""
        return self.slots_beside(_outbox_bytes(sends), len(self.pieces))

    def smem_bytes(self, sends: bool) -> int:
        """Returns the shared memory of a thread block; `sends`: whether it has room to send from."""
        return self.bytes_beside(_outbox_bytes(sends), self.out_slots(sends))


def _outbox_bytes(sends: bool) -> int:
    return sends * 2 * (2 * PIECE**2 + 8)  # two pieces, and a barrier each


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call of a kernel. operation: "gather" or "scatter", and "_transposed" behind it if the weights are.

    rows: M, of a shard. contracted: K of the gathered matrix, or K of each pair that a scatter adds up.
    columns: N of each matrix of a gather, or the N of a scatter. gathers: columns of a matrix gathered beside
    a scatter, or 0.
    """

    operation: str
    shards: int
    rows: int
    contracted: tuple[int, ...]
    columns: tuple[int, ...]
    dtype: str
    gathers: int = 0

    @property
    def key(self) -> str:
        """What the table has it under."""
        contracted, columns = ("+".join(map(str, x)) for x in (self.contracted, self.columns))
        beside = f"+{self.gathers}" if self.gathers else ""
        return f"{self.operation}{beside}/{self.shards}/{self.rows}x{contracted}x{columns}/{self.dtype}"

    @classmethod
    def of_key(cls, key: str) -> "Problem":
        """Returns the problem of a key."""
        operation, shards, sizes, dtype = key.split("/")
        operation, _, gathers = operation.partition("+")
        rows, contracted, columns = (tuple(map(int, part.split("+"))) for part in sizes.split("x"))
        return cls(operation, int(shards), rows[0], contracted, columns, dtype, int(gathers or 0))

    @property
    def sends(self) -> bool:
        return self.shards > 1

    @property
    def flops(self) -> float:
        return 2.0 * self.shards * self.rows * sum(self.contracted) * sum(self.columns)

    @property
    def bytes_sent(self) -> float:
        """By one shard; as many arrive."""
        gathered = self.contracted[0] if self.operation.startswith("gather") else self.gathers
        scattered = 0 if self.operation.startswith("gather") else self.columns[0]
        return 2.0 * (self.shards - 1) * self.rows * (gathered + scattered)

    def tiles(self, tiles: Tiles) -> int:
        """Returns how many tiles one shard computes."""
        return self.shards * (self.rows // tiles.m) * sum(N // tiles.n for N in self.columns)

    def check(self, tiles: Tiles) -> None:
        """Raises Unsupported, naming what does not divide or fit."""
        wanted = [("rows of a shard", self.rows, tiles.m * tiles.cluster)]
        wanted += [("columns", N, tiles.n) for N in self.columns]
        wanted += [("what is contracted", K, STEP) for K in self.contracted]
        wanted += [("columns to gather", self.gathers, PIECE)]
        for what, size, by in wanted:
            if size % by:
                raise Unsupported(f"{what}, {size}, do not divide by {by}")
        tiles.check_sums()
        if tiles.senders < 1:
            raise Unsupported(f"{tiles.senders} senders: peers would wait for ever")
        if (found := tiles.smem_bytes(self.sends)) > SMEM_BYTES:
            raise Unsupported(f"tiles {tiles} take {found} bytes of shared memory, there are {SMEM_BYTES}")


def choose(problem: Problem, device_kind: str, sms: int) -> tuple[Tiles, bool | None]:
    """Returns the tiles, and whether they were measured to be faster than the plain form; None if unknown. An
    H100 takes those of an H200 where it has none.

    Raises:
      Unsupported: no tiles divide the shape.
    """
    if (entry := TABLE.get(device_kind, {}).get(problem.key)) is not None:
        tiles = Tiles(**entry["tiles"])
        problem.check(tiles)
        return tiles, entry["faster"]
    same_chip = device_kind.startswith("NVIDIA H100") and sms == SMS  # with other memory
    if same_chip and (entry := TABLE.get("NVIDIA H200", {}).get(problem.key)) is not None:
        return Tiles(**entry["tiles"]), None
    fitting = Tiles.fitting(problem.check)
    if not fitting:
        problem.check(Tiles(*min(RATES, key=math.prod)))  # raises: what does not divide by the smallest tiles
    return min(fitting, key=lambda tiles: _product_seconds(problem, tiles, sms)), None


LINK_BYTES = 400e9  # a second to or from one GPU through NVLink, of the 450e9 on the data sheet
NCCL_BYTES = 330e9
# A fused kernel is held back until all devices have reached it, and its first arrival takes a few more.
JOIN_SECONDS, PLAIN_SECONDS = 20e-6, 15e-6


def predict(problem: Problem, tiles: Tiles, sms: int) -> tuple[float, float]:
    """Returns the seconds that the kernel and the plain form, collective and then matmul, should take."""
    product = _product_seconds(problem, tiles, sms)
    hidden = problem.bytes_sent / LINK_BYTES
    best = problem.flops / PRODUCT_FLOPS
    apart = best + (problem.bytes_sent / NCCL_BYTES + PLAIN_SECONDS if problem.shards > 1 else 0)
    joined = JOIN_SECONDS if problem.shards > 1 else 0
    return max(product, hidden) + joined, apart


def _product_seconds(problem: Problem, tiles: Tiles, sms: int) -> float:
    """Thread blocks take a tile each at a time, so a matmul takes a whole number of waves."""
    waves = math.ceil(problem.tiles(tiles) / sms)
    of_wave = 2.0 * sms * tiles.m * tiles.n * sum(problem.contracted)
    return waves * of_wave / (PRODUCT_FLOPS * RATES.get((tiles.m, tiles.n), 1.0))


def candidates(problem: Problem, sms: int = SMS) -> list[Tiles]:
    """Returns the tiles to measure for a shape: large ones, if any fit, with as many stages as there is room
    for, alone and in clusters, each in the order in which those computed at one time read least."""
    fitting = Tiles.fitting(problem.check)
    sizes = [tiles for tiles in fitting if RATES[tiles.m, tiles.n] > 0.9] or fitting
    sizes += [dataclasses.replace(tiles, cluster=2) for tiles in sizes if problem.rows % (2 * tiles.m) == 0]
    return [reordered(problem, tiles, sms)[0] for tiles in sizes]


def reordered(problem: Problem, tiles: Tiles, sms: int = SMS) -> list[Tiles]:
    """Returns the same tiles in each of ORDERS, those first that read least: at the power cap a byte that is
    not read is energy to multiply with."""
    every = (dataclasses.replace(tiles, minor=minor, width=width) for minor, width in ORDERS)
    return sorted(every, key=lambda one: wave_bytes(problem, one, sms))


def wave_bytes(problem: Problem, tiles: Tiles, sms: int = SMS) -> float:
    """Returns the bytes of operands that the tiles computed at one time read, each once: what HBM, or the L2
    cache of what the wave before has read, gives for a wave of thread blocks."""
    tiles_M, tiles_N = problem.rows // tiles.m, sum(N // tiles.n for N in problem.columns)
    if tiles.minor == "M":
        along_m = min(tiles.width * tiles.cluster, tiles_M)
        along_n = min(sms / along_m, tiles_N)
    else:
        along_n = min(tiles.width, tiles_N)
        along_m = min(sms / along_n, tiles_M)
    return 2.0 * sum(problem.contracted) * (along_m * tiles.m + along_n * tiles.n)
