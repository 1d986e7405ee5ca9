"""The mixture schedule of a run: which mixture holds from which step on, and its weights step by step."""

import math
from collections.abc import Iterator

import numpy as np

from jaxthru.data.mixture.configuration import Mixture

Schedule = tuple[tuple[int, Mixture], ...]
"""Append-only: (completed updates after which it holds, the mixture)."""

STAIRS = 1024
"""A linear change is taken in at most so many stairs, each of constant weights."""


def stairs(
    mixture: Mixture, start: int, tokens_per_step: int
) -> Iterator[tuple[int, int | None, dict[str, float]]]:
    """Yields (first step, step after the last or None, weights): the steps from `start` on, in pieces of
    constant weights. A stair of a linear change has the mean weights of its steps."""
    scale = tokens_per_step if mixture.unit == "tokens" else 1
    knots = sorted({math.ceil(at / scale) for at in mixture.points()})
    edges = [0]
    for knot in knots:
        first, steps = edges[-1], knot - edges[-1]
        ends = (mixture.weights(step, tokens_per_step) for step in (first, knot))
        constant = mixture.interpolate == "staged" or next(ends) == next(ends)
        pieces = 1 if constant else min(steps, STAIRS)
        edges += [first + steps * piece // pieces for piece in range(1, pieces + 1)] if steps else []
    linear = mixture.interpolate == "linear"
    pieces = [
        (max(first, start), last, (first + last - 1) / 2 if linear and last is not None else float(first))
        for first, last in zip(edges, [*edges[1:], None], strict=True)
        if last is None or last > start
    ]
    weights = mixture.weights_over(np.array([middle for *_, middle in pieces]), tokens_per_step)
    for number, (first, last, _) in enumerate(pieces):
        yield first, last, {name: float(weight[number]) for name, weight in weights.items()}
