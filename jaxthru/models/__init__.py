"""Model architectures, their parameters as plain trees, and their FLOP counts."""
