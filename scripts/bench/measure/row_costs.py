"""What rows cost to train on: steps timed, coefficients fitted to them, other steps predicted."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable

import numpy as np

from jaxthru.train import Build

EQUAL = (1, 2, 4, 16, 64)
"""Documents in a row whose cost is measured."""


def equal_documents(batch: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    """Returns the batch with each row cut into so many documents of equal length."""
    rows, sequence = batch["tokens"].shape
    segment, position = np.divmod(np.arange(sequence, dtype=np.int32), sequence // number)
    last = position == sequence // number - 1
    found = {
        "targets": np.where(last, 0, np.roll(batch["tokens"], -1, axis=1)).astype(np.int32),
        "segment_ids": segment + 1,
        "positions": position,
        "loss_mask": (~last).astype(np.float32),
    }
    return batch | {name: np.array(np.broadcast_to(value, (rows, sequence))) for name, value in found.items()}


def spans(segment_ids: np.ndarray) -> np.ndarray:
    """Returns int64 [rows], Σ document length² of each row."""
    return np.array([np.sum(np.bincount(row)[1:].astype(np.int64) ** 2) for row in segment_ids])


def by_device(values: np.ndarray, groups: int, microbatches: int, devices: int) -> np.ndarray:
    """Returns [microbatches, devices], the sums of the rows' values where `training.step.Step.split` puts
    them. groups: canonical groups of rows."""
    blocks = math.gcd(groups, len(values) // microbatches)
    parts = np.moveaxis(values.reshape(blocks, microbatches, -1), 1, 0)
    return parts.reshape(microbatches, devices, -1).sum(axis=2)


@dataclasses.dataclass(frozen=True)
class Costs:
    """seconds: constant, of a step; linear, of a token; attention, of a token² of a document. residual: the
    largest relative error of a point that they were fitted to."""

    constant: float
    linear: float
    attention: float
    residual: float

    @classmethod
    def fit(cls, points: list[dict], sequence: int) -> "Costs":
        """Fits points of {"microbatches", "documents", "seconds"}; each counts by its relative error."""
        rows = [(1.0, point["microbatches"], point["microbatches"] / point["documents"]) for point in points]
        seconds = np.array([point["seconds"] for point in points])
        relative = np.array(rows) / seconds[:, None]
        found = np.linalg.lstsq(relative, np.ones(len(points)))[0]
        constant, linear, attention = found / (1, sequence, sequence**2)
        residual = np.abs(relative @ found - 1).max()
        return cls(*(float(value) for value in (constant, linear, attention, residual)))

    def predict(self, spans: np.ndarray, tokens: int) -> float:
        """Returns the seconds of a step. spans: [microbatches, devices], Σ length². tokens: of a device's
        rows in a micro-batch."""
        return self.constant + len(spans) * self.linear * tokens + self.attention * spans.max(axis=1).sum()


def measure(
    times: Callable, programs: dict[int, Build], batch: dict[str, np.ndarray], rounds: int
) -> list[dict]:
    """Returns the median seconds of steps of rows of equal documents: points for `Costs.fit`.

    times: runs (step, batch) pairs and returns the seconds of each. programs: {micro-batches: the step}.
    batch: whose tokens are used.
    """
    work = {}
    for (microbatches, built), number in itertools.product(programs.items(), EQUAL):
        rows = built.config.train.rows
        if number < built.data.segments and built.config.data.sequence % number == 0:
            part = equal_documents({name: array[:rows] for name, array in batch.items()}, number)
            work[microbatches, number] = built, built.place(part, rows)
    taken = [times(work.values()) for _ in range(rounds)]
    return [
        {"microbatches": microbatches, "documents": number, "seconds": statistics.median(seconds)}
        for (microbatches, number), seconds in zip(work, zip(*taken, strict=True), strict=True)
    ]
