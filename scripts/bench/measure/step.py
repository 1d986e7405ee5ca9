"""Times the training step of a configuration on packed rows of real documents and prints one JSON line.

    python scripts/bench/measure/step.py --config configs/llama3_8b_8layer.py [--set a.b=v ...]

At least 20 s of warm-up under load and 40 s timed: tokens_per_second is all tokens over all seconds, beside
the median step, the slowest and each one's seconds. Clipping, loss mask and the check for finite values are
part of the step. The SM clock and the power are means over the timed steps. With --causal-rows the step takes
the rows of a file, each as one document, and so has plain causal attention; with --packed-rows the batches of
a file, so that a peer can take the same. With --resident the step is timed only if all of it and of the state
fit the device, by arithmetic and then as compiled; the line says so if not.
"""

import argparse
import copy
import itertools
import logging
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import jax
import numpy as np
import timed_loop

from jaxthru import config as configuration
from jaxthru.build import choices, early_choices
from jaxthru.build.checks import validate
from jaxthru.build.compiled import Build, build_step
from jaxthru.build.defaults import AUTO, get
from jaxthru.build.step import needed_flops
from jaxthru.data.loading.dataset import Data, open_data
from jaxthru.data.loading.state import DataState
from jaxthru.engine.step import Batch
from jaxthru.runtime import hardware, xla
from jaxthru.runtime.errors import InputError, require


def packed_batches(built: Build) -> Iterator[Batch]:
    """Yields the batches of a run from its first step on."""
    with built.batches(DataState(0, ((0, built.data.mixture),), built.data.keys)) as batches:
        yield from batches


def causal_batches(built: Build, rows: np.ndarray) -> Iterator[Batch]:
    """Yields batches of `rows`, each row one document."""
    segment_ids = np.ones(rows.shape[1:], np.int32)
    positions = np.tile(np.arange(rows.shape[2], dtype=np.int32), (rows.shape[1], 1))
    for tokens, targets, mask in harness.causal_batches(rows):
        batch = {"tokens": tokens, "targets": targets, "loss_mask": mask, "segment_ids": segment_ids}
        yield built.place(batch | {"positions": positions, "source": np.zeros_like(tokens)}, len(tokens))


def kept_batches(built: Build, batches: dict[str, np.ndarray]) -> Iterator[Batch]:
    """Yields the batches of a file that `blocks.write_batches` wrote, over and over."""
    for number in itertools.cycle(range(len(batches["tokens"]))):
        batch = {name: values[number] for name, values in batches.items()}
        yield built.place(batch, len(batch["tokens"]))


def card_bytes() -> int | None:
    """Returns the memory of the card as nvidia-smi tells it, of which XLA's allocator is given less; None
    without one."""
    told = harness.ask("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    return int(told.splitlines()[0]) * 2**20 if told else None


class Placements(logging.Handler):
    """What is logged of experts that change places."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logging.getLogger("jaxthru").setLevel(logging.INFO)
        logging.getLogger("jaxthru").addHandler(self)

    def emit(self, record):
        if "experts placed anew" in (said := record.getMessage()):
            self.lines.append(said)


def measure(built: Build, batches: Iterator[Batch], arguments: argparse.Namespace, cycle: int = 1) -> dict:
    """Returns what the steps took and did. cycle: after how many the batches come again."""
    state, placement, step = built.first_state(), built.expert_placement(), 0
    placements = Placements()

    def dispatch():
        nonlocal state, step
        state, metrics = built.compiled(state, next(batches))
        step += 1
        if placement.due(step):  # as a run does
            state = placement(built.compiled.settled(state), metrics)
        return metrics

    timing = timed_loop.timed(
        dispatch,
        jax.device_get,
        arguments.warmup_seconds,
        arguments.timed_seconds,
        arguments.steps,
        built.layout.mesh.size,
        cycle,
    )
    needed, values = needed_flops(built.config), timing.values
    tokens = statistics.fmean(int(step["tokens"]) for step in values)
    span = statistics.fmean(float(step["attention_span"]) for step in values)
    line = timing.line(tokens)
    seconds = statistics.fmean(timing.seconds)
    rate = needed(tokens, span) / seconds
    causal = needed(tokens, tokens * built.config.data.sequence) / seconds
    peak = hardware.peak_flops(list(built.layout.mesh.devices.flat))
    line |= {
        "model_tflops": float(f"{rate / 1e12:.4g}"),
        "mfu": round(rate / peak, 4) if peak else None,
        "mfu_if_full_causal": round(causal / peak, 4) if peak else None,
        "attention_span_per_token": round(span / tokens, 1),
        "loss": [float(values[0]["loss"]), float(values[-1]["loss"])],
        "losses": [float(step["loss"]) for step in (*timing.before, *values)],  # from the first step on
        "skipped_updates": int(values[-1]["skipped"]),
        "peak_hbm_bytes": hardware.peak_bytes(),
        "card_bytes": card_bytes(),
    }
    if placements.lines:
        line["expert_placements"] = placements.lines
    if arguments.steps:
        line["losses"] = [float(step["loss"]) for step in values]
    return line


def run(arguments: argparse.Namespace) -> dict:
    """Returns the result. Raises InputError as a run of this configuration would."""
    few = "--steps {} {}: of one timed step there is no spread"
    require(not arguments.steps or arguments.steps[1] > 1, few.format(*arguments.steps or (0, 0)))
    config = configuration.load(arguments.config, ["train.steps=1000000", *arguments.overrides])
    xla.configure(config.kernels.writes_to_peers)
    # Without the cache, compile_seconds is that of a first start.
    jax.config.update("jax_enable_compilation_cache", arguments.keep_compiled)
    data = open_data(config.data)
    if arguments.causal_rows:
        data = copy.copy(data)
        data.segments = 1
    built, why = resident_step(config, data) if arguments.resident else (build_step(config, data), "")
    if built is None:
        return {"fits": False, "reason": why}
    cycle = 1  # causal rows cost the same
    if arguments.causal_rows:
        batches = causal_batches(built, np.load(arguments.causal_rows))
    elif arguments.packed_rows:
        with np.load(arguments.packed_rows) as file:
            kept = {name: file[name] for name in file.files}
        batches, cycle = kept_batches(built, kept), len(kept["tokens"])
    else:
        batches = packed_batches(built)
    about = {"compile_seconds": round(built.compile_seconds, 2), "chosen": chosen(built)}
    return measure(built, batches, arguments, cycle) | about


def chosen(built: Build) -> dict:
    """Returns what became of the settings that may be `auto`."""
    return {
        key: get(built.config, key)
        for key in (*AUTO, *choices.KEPT_WITH["offload.level"], "kernels.attention")
    }


def resident_step(config: configuration.RunConfig, data: Data) -> tuple[Build | None, str]:
    """Returns the step of a configuration that leaves the offload open; None, and why, where jaxthru says
    that it does not fit the device without."""
    config = choices.resolve(config)
    try:
        if choices.open_keys(config):
            layout = validate(config)
            settled, _ = early_choices.of_run(config, layout)
            first = next(choices.proposed(settled, layout, choices.room_here(config), data.segments))
            if first.config.offload.layered:
                return None, "by arithmetic it fits with offload alone"
        built = build_step(config, data)
    except InputError as refusal:
        return None, str(refusal)
    if built.config.offload.layered:
        return None, "as compiled it fits with offload alone"
    return built, ""


main = harness.program(
    __doc__,
    run,
    harness.option("--steps", type=int, nargs=2, metavar=("WARMUP", "TIMED"), help="in place of seconds"),
    harness.option("--causal-rows", type=Path, metavar="FILE", help="an .npy of rows, each one document"),
    harness.option("--packed-rows", type=Path, metavar="FILE", help="an .npz of packed batches"),
    harness.option("--resident", action="store_true", help="only if it fits without offload"),
    harness.option("--keep-compiled", action="store_true", help="start from a compiled step if kept"),
    seconds=(20.0, 40.0),
)


if __name__ == "__main__":
    sys.exit(main())
