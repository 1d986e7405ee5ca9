"""Objectives: what a training step minimises, each in a file of its own."""
