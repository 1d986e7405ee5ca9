"""The mixture of sources: pure arithmetic, without I/O, from weights to the packed rows of each step."""
