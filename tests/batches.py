"""Batches made up of nothing but their index: `from batches import batch`."""

import numpy as np

VOCABULARY, ROWS, SEQUENCE, SOURCES = 512, 8, 64, 2


def batch(index: int) -> dict[str, np.ndarray]:
    """Rows of two documents and padding, with unequal loss masks, and targets that can be learnt."""
    draw = np.random.default_rng(index)
    tokens = draw.integers(0, VOCABULARY, (ROWS, SEQUENCE)).astype(np.int32)
    borders = draw.integers(8, SEQUENCE - 16, (ROWS, 1))
    ends = draw.integers(SEQUENCE - 12, SEQUENCE + 1, (ROWS, 1))
    place = np.arange(SEQUENCE)[None]
    segment_ids = np.where(place < ends, 1 + (place >= borders), 0).astype(np.int32)
    positions = np.where(place >= ends, place - ends, np.where(place >= borders, place - borders, place))
    answered = (segment_ids > 0) & (draw.random((ROWS, SEQUENCE)) < np.linspace(0.3, 1, ROWS)[:, None])
    return {
        "tokens": tokens,
        "targets": np.where(answered, (tokens * 7 + 1) % VOCABULARY, 0).astype(np.int32),
        "segment_ids": segment_ids,
        "positions": positions.astype(np.int32),
        "loss_mask": answered.astype(np.float32),
        "source": np.broadcast_to(np.arange(ROWS, dtype=np.int32)[:, None] % SOURCES, tokens.shape).copy(),
    }
