"""Named shapes of linear cross-entropy, which drive its tests and its benchmarks alike."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One call."""

    rows: int
    sequence: int
    embed: int
    vocabulary: int
    z_loss: float = 0.0


# Small enough for a CPU.
CPU = {
    "even": Shape(2, 64, 32, 256),
    "odd": Shape(3, 37, 24, 301),
    "z_loss": Shape(2, 50, 16, 130, z_loss=1e-2),
    "one_token": Shape(1, 1, 8, 40),
    "wide": Shape(1, 20, 16, 3001, z_loss=1e-4),
    "benchmark": Shape(2, 512, 256, 4096),
}

# What a GPU runs in bfloat16. "llama3_8b" is the benchmarks' shape.
GPU = {
    "small": Shape(2, 1024, 512, 8192),
    "odd": Shape(3, 701, 256, 32_001, z_loss=1e-4),
    "llama3_8b": Shape(2, 8192, 4096, 128_256),
    "llama3_2_1b": Shape(16, 2048, 2048, 128_256),
    "qwen3_0_6b": Shape(16, 2048, 1024, 151_936),
}
