"""Named shapes of 8-bit moments, which drive tests and benchmarks alike."""

# Small enough for a CPU.
CPU = {
    "one_block": (1, 256),
    "one_a_row": (8, 256),
    "blocks": (4, 3, 512),
    "narrow": (5, 64),
    "head_dim": (32, 4, 16),
    "odd": (7, 37),  # no divisor to make blocks of: the last dim is one
    "short": (3, 8),
}

# Matrices of configs/llama3_8b.py: query, feed-forward up, LM head.
GPU = {
    "query": (4096, 32, 128),
    "up": (4096, 14_336),
    "output": (4096, 128_256),
}
