"""Readers of the files that a profile is made of: programs, buffers, traces, and facts of the model."""
