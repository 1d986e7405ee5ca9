"""How a matmul kernel for Hopper cuts its result into tiles, and what shared memory these take."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, Self

import jax

from pallas_kernels.dispatch import Unsupported

CONSUMERS = 2  # warpgroups that multiply; each has half of a tile's rows
PIECE = 64  # rows of what is stored or sent at once, and its columns of 2 bytes: as wide as the swizzle is
STEP = 64  # contracted in one step of the ring
SMEM_BYTES = 227 * 1024  # of a thread block on Hopper
SMS = 132  # of an H100 or H200 with NVLink, where there is no GPU to ask
PRODUCT_FLOPS = 700e12  # of a large bf16 matmul on an H200 or H100, in a second

# The share of the best tile's rate that smaller ones reach; a guess, for shapes in no table.
RATES = {(128, 256): 1.0, (256, 128): 0.98, (128, 192): 0.95, (128, 128): 0.85, (128, 64): 0.55}


@functools.cache
def hopper_device() -> tuple[str, int]:
    """Returns the GPU's kind and its number of SMs, those of an H200 where there is none."""
    device = jax.local_devices()[0]
    return (device.device_kind, device.core_count) if device.platform == "gpu" else ("NVIDIA H200", SMS)


@dataclasses.dataclass(frozen=True)
class RingTiles:
    """Of the matmul, m rows by n columns for each thread block at a time.

    stages: slots of the ring of shared memory. minor, width: tiles are taken in bands of `width` along this
    dim, so that those computed at one time share operands in the L2 cache. "M" takes the rows in order.
    cluster: thread blocks, 1 or 2, that take tiles beside each other at the same time: each loads a part of
    what both need, and so reads less from the L2 cache.
    """

    m: int = 128
    n: int = 256
    stages: int = 4
    minor: Literal["M", "N"] = "M"
    width: int = 8
    cluster: Literal[1, 2] = 1

    @classmethod
    def fitting(cls, check: Callable[[Self], None]) -> list[Self]:
        """Returns the tiles of RATES that a kernel can run with. check: raises Unsupported for the others."""
        return [tiles for m, n in RATES if (tiles := cls.deepest(check, m, n)) is not None]

    @classmethod
    def deepest(cls, check: Callable[[Self], None], m: int, n: int) -> Self | None:
        """Returns tiles of m by n with as many stages as there is room for, up to 8; None if none fit."""
        for stages in range(8, 1, -1):
            tiles = cls(m, n, stages)
            with contextlib.suppress(Unsupported):
                check(tiles)
                return tiles
        return None

    @property
    def m_of_consumer(self) -> int:
        return self.m // CONSUMERS

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The (row, column) of each piece of a consumer's part, in the order in which they are stored."""
        return self.pieces_of(PIECE)

    def pieces_of(self, columns: int) -> list[tuple[int, int]]:
        """Returns the same for pieces of so many columns: as many as fill 128 bytes."""
        return [
            (r, c) for c in range(0, self.n, columns) for r in range(0, self.m_of_consumer, PIECE)
        ]  # fmt: skip

    def slots_beside(self, others: int, pieces: int) -> int:
        """Returns how many of a consumer's pieces can be on their way out: as many as there is room for
        beside the ring and `others` bytes, as long as they divide them all."""
        fitting = (n for n in range(pieces, 1, -1) if self.bytes_beside(others, n) <= SMEM_BYTES)
        return next((n for n in fitting if pieces % n == 0), 1)

    def bytes_beside(self, others: int, slots: int) -> int:
        """Returns the shared memory of the ring, so many slots of pieces on their way out, and `others`."""
        ring = self.stages * (self.m + self.n) * STEP
        return 2 * (ring + CONSUMERS * slots * PIECE**2) + 8 * 2 * self.stages + others

    def check_sums(self) -> None:
        """Raises Unsupported unless a tile is made of whole pieces, a warpgroup has registers for it, and a
        consumer can wait for a step while it holds the one before."""
        if (
            self.m % (CONSUMERS * PIECE)
            or self.n % PIECE
            or self.n > 256
            or self.m_of_consumer * self.n > 16_384
        ):
            raise Unsupported(f"no tiles of {self.m} x {self.n}: at most 16,384 float32 sums to a warpgroup")
        if self.stages < 2:
            raise Unsupported(f"{self.stages} slots of a ring: with fewer than 2 its consumers wait for ever")
        if self.cluster not in (1, 2):
            raise Unsupported(f"clusters of {self.cluster} thread blocks: 1 or 2 can be sure of SMs")
