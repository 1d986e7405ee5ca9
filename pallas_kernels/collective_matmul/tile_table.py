"""Measured tiles of the kernels for Hopper; written by scripts/bench/tune_collective_matmul.py, not by hand.

{device kind: {key of a tiles.Problem: {"tiles": the fields of a tiles.Tiles, "microseconds": of the kernel,
"plain_microseconds": of the plain form in the same run, "faster": whether the kernel is}}}
"""

TABLE: dict[str, dict[str, dict]] = {}
