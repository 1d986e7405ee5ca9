"""Kernels, one folder per operation, each with a plain reference and a choice of implementations."""
