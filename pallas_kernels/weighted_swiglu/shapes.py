"""Named shapes of the experts' SwiGLU, [rows, width], which drive tests and benchmarks alike."""

# Small enough for a CPU.
CPU = {"even": (64, 32), "odd": (37, 19), "one_row": (1, 8), "wide": (3, 1100)}

# The benchmark's, after models: 16,384 tokens, each in as many rows as it has experts.
GPU = {
    "odd": (1031, 300),
    "mixtral": (32_768, 14_336),
    "olmoe": (131_072, 1024),
    "qwen3_30b": (131_072, 768),
}
