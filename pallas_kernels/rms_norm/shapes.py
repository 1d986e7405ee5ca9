"""Named shapes of the norm, which drive its tests and its benchmark alike."""

from typing import NamedTuple


class Heads(NamedTuple):
    """Queries or keys whose heads are normed and rotated."""

    rows: int
    sequence: int
    heads: int
    head_dim: int


# [tokens, D]; small enough for a CPU.
CPU = {"even": (64, 256), "odd": (37, 100), "one_row": (1, 64), "narrow": (70, 24), "wide": (3, 1100)}
CPU_HEADS = {
    "even": Heads(2, 16, 4, 64),
    "odd": Heads(1, 13, 3, 80),
    "one_token": Heads(1, 1, 1, 128),
    "narrow": Heads(2, 9, 5, 6),
}

# What a GPU runs in bfloat16. Those called after a model are the benchmark's: 32,768 tokens, and as many as a
# GPU trains at once of the larger two.
GPU = {
    "odd": (1031, 3000),
    "one_row": (1, 4096),
    "qwen3_0_6b": (32_768, 1024),
    "llama3_2_1b": (32_768, 2048),
    "qwen3_4b": (8192, 2560),
    "llama3_8b": (16_384, 4096),
    "widest": (2048, 8192),
}
GPU_HEADS = {
    "odd": Heads(3, 341, 7, 96),
    "narrow": Heads(2, 512, 3, 64),
    "wide": Heads(2, 512, 3, 256),
    "qwen3_0_6b_query": Heads(16, 2048, 16, 128),
    "qwen3_0_6b_key": Heads(16, 2048, 8, 128),
    "qwen3_4b_query": Heads(4, 2048, 32, 128),
}
