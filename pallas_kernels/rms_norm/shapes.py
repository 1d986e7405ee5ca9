"""Named shapes of rms_norm, [rows, D], which drive its tests and its benchmark alike."""

# Small enough for a CPU.
CPU = {"even": (64, 256), "odd": (37, 100), "one_row": (1, 64)}

# "llama3_8b" is the benchmark's: 16,384 tokens.
GPU = {"odd": (1031, 3000), "one_row": (1, 4096), "llama3_8b": (16_384, 4096)}
