"""Named shapes of routing, which drive tests and benchmarks alike."""

from typing import NamedTuple


class Shape(NamedTuple):
    """padding: the share of tokens that are invalid."""

    tokens: int
    experts: int
    top_k: int
    width: int
    padding: float = 0.2


# Small enough for a CPU.
CPU = {
    "one_expert": Shape(20, 1, 1, 8),
    "one_token": Shape(1, 8, 2, 16, 0.0),
    "all_of_few": Shape(30, 8, 8, 8),
    "three": Shape(41, 3, 2, 24),
    "many": Shape(64, 64, 8, 8),
    "more": Shape(37, 128, 8, 16),
    "most": Shape(50, 512, 8, 8, 0.0),
    "padding_alone": Shape(9, 4, 2, 8, 1.0),
}

# The benchmark's, after models: 16,384 tokens.
GPU = {
    "odd": Shape(1031, 60, 4, 200),
    "most": Shape(1000, 512, 8, 256),
    "three_quarters": Shape(257, 16, 4, 2880),
    "in_parts": Shape(257, 16, 4, 5120),
    "mixtral": Shape(16_384, 8, 2, 4096, 0.0),
    "olmoe": Shape(16_384, 64, 8, 2048, 0.0),
    "qwen3_30b": Shape(16_384, 128, 8, 2048, 0.0),
}
