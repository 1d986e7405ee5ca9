"""Named shapes of grouped matmuls, which drive tests and benchmarks alike."""

from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """rows: of the arrays, which groups may leave some of. sizes: of each group, or None: drawn."""

    rows: int
    columns: int
    results: int
    groups: int
    sizes: tuple[int, ...] | None = None

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Returns [E] int32 sizes: those given, or those of rows that each take a group at random, of groups
        that differ in how often they are taken."""
        if self.sizes is not None:
            return np.asarray(self.sizes, np.int32)
        share = rng.dirichlet(np.full(self.groups, 8.0))
        return rng.multinomial(self.rows, share).astype(np.int32)


# Small enough for a CPU.
CPU = {
    "one_group": Shape(40, 24, 16, 1, (40,)),
    "one_row": Shape(1, 16, 8, 3, (0, 1, 0)),
    # Counts of one shape, which is compiled once.
    "drawn": Shape(200, 16, 24, 5),
    "empty_groups": Shape(200, 16, 24, 5, (0, 120, 0, 80, 0)),
    "none_has_rows": Shape(200, 16, 24, 5, (0, 0, 0, 0, 0)),
    "all_to_one": Shape(200, 16, 24, 5, (0, 0, 200, 0, 0)),
    "rows_left_over": Shape(200, 16, 24, 5, (9, 0, 31, 17, 80)),
    "off_the_tile": Shape(200, 16, 24, 5, (7, 8, 9, 33, 63)),
    "off_a_larger_tile": Shape(1164, 16, 8, 3, (127, 128, 129)),
    "odd": Shape(77, 19, 13, 5),
    "many": Shape(256, 16, 8, 64),
    "more": Shape(400, 8, 16, 128),
    "more_than_rows": Shape(300, 8, 8, 512),
}

# What a GPU runs in bfloat16. Those called after a model are the benchmark's: its experts' up and down maps
# at 16,384 tokens, of which each goes to top_k experts.
GPU = {
    "one_row": Shape(1, 256, 128, 3, (0, 1, 0)),
    "rows_left_over": Shape(900, 512, 256, 4, (100, 0, 300, 27)),
    "off_the_tile": Shape(1000, 512, 384, 6, (127, 128, 129, 255, 257, 63)),
    "many": Shape(4096, 256, 192, 512),
    "odd": Shape(777, 200, 136, 5),
    "qwen3_30b_up": Shape(131_072, 2048, 1536, 128),
    "qwen3_30b_down": Shape(131_072, 768, 2048, 128),
    "olmoe_up": Shape(131_072, 2048, 2048, 64),
    "olmoe_down": Shape(131_072, 1024, 2048, 64),
    "mixtral_up": Shape(32_768, 4096, 28_672, 8),
    "mixtral_down": Shape(32_768, 14_336, 4096, 8),
}
