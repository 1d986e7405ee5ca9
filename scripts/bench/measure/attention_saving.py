"""Times attention alone on a configuration's packed batches, causal against packed; prints one JSON line.

Forward and backward, on the first batches.

    python scripts/bench/measure/attention_saving.py --config configs/llama3_8b_8layer.py

The difference, times the layers, is what packed rows should save in a step. Alone, attention runs at another
clock than within a step, so this is a prediction.
"""

import argparse
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import blocks
import harness
import jax
import jax.numpy as jnp
import timed_loop

from jaxthru import config as configuration
from jaxthru.data.loading.dataset import open_data
from jaxthru.runtime import xla
from pallas_kernels.attention import attention, find_segments

BATCHES, REPEATS = 16, 8


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns how long attention takes, causal and packed."""
    config = configuration.load(arguments.config, [*arguments.overrides, f"train.steps={BATCHES}"])
    xla.configure()
    data, shape, rows = open_data(config.data), config.model, config.train.rows
    batches = blocks.first_batches(config, BATCHES, data)
    packed = [find_segments(jnp.asarray(batch["segment_ids"]), data.segments) for batch in batches]
    causal = [find_segments(jnp.ones_like(packed[0].ids), 1)]
    dtype = jnp.dtype(config.precision.compute)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    q, k, v, dy = (
        jax.random.normal(jax.random.key(i), (rows, config.data.sequence, number, shape.head_dim), dtype)
        for i, number in enumerate(heads)
    )

    @jax.jit
    def gradients(q, k, v, dy, segments):
        y, backward = jax.vjp(lambda q, k, v: attention(q, k, v, segments), q, k, v)
        return y, backward(dy)

    def mean_seconds(choices) -> tuple[float, timed_loop.Timing]:
        endless = itertools.cycle(enumerate(choices))

        def dispatch():
            number, segments = next(endless)
            for _ in range(REPEATS):
                result = gradients(q, k, v, dy, segments)
            return number, result

        seconds = arguments.warmup_seconds / 2, arguments.timed_seconds / 2
        timing = timed_loop.timed(dispatch, lambda started: jax.block_until_ready(started)[0], *seconds)
        by_batch = {number: [] for number in range(len(choices))}
        for seconds, number in zip(timing.seconds, timing.values, strict=True):
            by_batch[number].append(seconds / REPEATS)
        medians = [statistics.median(seconds) for seconds in by_batch.values() if seconds]
        return statistics.fmean(medians), timing

    causal_seconds, _ = mean_seconds(causal)
    packed_seconds, timing = mean_seconds(packed)
    return {
        **timing.line(0),
        "causal_milliseconds": round(causal_seconds * 1e3, 3),
        "packed_milliseconds": round(packed_seconds * 1e3, 3),
        "settings": {"batches": BATCHES, "max_segments": data.segments},
    }


main = harness.program(__doc__, measure, seconds=(20.0, 40.0))


if __name__ == "__main__":
    sys.exit(main())
