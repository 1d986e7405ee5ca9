"""A training step walks a chain of stages: its gradients, its update, and the executors that run it."""
