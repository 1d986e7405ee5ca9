"""Are the steps of one commit as fast as those of another? Both in turns, in one process, on one state.

    git worktree add build/old OLD
    python scripts/bench/commits.py --old build/old --output FILE [--rows a,b,...] [--stop-after SECONDS]

Each commit compiles the step of its own configuration file; one state goes through both, A-B-A-B, so that
they see the same clocks and one warm-up serves both. What is timed is a turn from a synchronised start to a
synchronised end, over its steps. Batches are random tokens, packed or one document a row, the same for both.
The first step of each, from the same state, says whether they compute the same. Peaks: of a step that is one
program as XLA compiled it; of several, what the allocator had seen when the old commit's first step was done,
and then the new one's, so such rows want a process of their own. Ratios are of the new commit's tokens per
second to the old one's. The commit that compiles first also tunes for the other, so compile times are no
comparison of the two: see compile_time.py.
"""

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import comparison
import harness
import jax
import jax.numpy as jnp
import numpy as np
from gemm import REPEATS, operands, product
from gpu_clocks import Clocks, mean

from jaxthru.runtime import hardware, xla
from jaxthru.training.state import init_by_parts  # a scanned or sharded one takes a minute to compile

ROOT = Path(__file__).resolve().parents[2]
OWN = ("jaxthru", "pallas_kernels")


@dataclasses.dataclass(frozen=True)
class Row:
    """config: in either commit's configs/. settings: as `--set` takes them; keys that both commits have.
    documents: in a row. steps: of a turn. warmup: seconds of both commits, beside their first steps."""

    config: str
    settings: tuple[str, ...] = ()
    documents: int = 1
    steps: int = 10
    warmup: float = 20.0


EXACT = ("optim.clip_rule=exact", "offload.level=optimizer", "offload.fraction=0.65")
ROWS = {
    "8layer_packed": Row("llama3_8b_8layer", documents=12),
    "8layer_causal": Row("llama3_8b_8layer", warmup=8.0),
    "8layer_fp8": Row("llama3_8b_8layer", ("precision.matmul=fp8",), documents=12, warmup=8.0),
    "32layer": Row("llama3_8b_one_gpu", documents=12, steps=4, warmup=8.0),
    "8b_64k": Row("llama3_8b", documents=12, steps=3, warmup=0.0),
    "8b_64k_exact": Row("llama3_8b", EXACT, documents=12, steps=3, warmup=0.0),
}


class Tree:
    """A commit's packages, imported beside another's of the same names."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._modules: dict[str, ModuleType] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Makes this commit the one that imports within find."""
        if self.folder == ROOT:  # whose modules this script itself uses
            yield
            return
        others = _taken_out()
        sys.modules.update(self._modules)
        sys.path.insert(0, str(self.folder))
        try:
            yield
        finally:
            sys.path.remove(str(self.folder))
            self._modules = _taken_out()
            sys.modules.update(others)

    def build(self, row: Row) -> Any:
        """Returns the `Build` of a row, compiled."""
        with self():
            configuration = importlib.import_module("jaxthru.config")
            try:
                build = importlib.import_module("jaxthru.build.compiled").build_step
            except ModuleNotFoundError:  # before there was jaxthru/build
                build = importlib.import_module("jaxthru.train").build
            assert Path(build.__code__.co_filename).is_relative_to(self.folder), build.__code__.co_filename
            path = self.folder / "configs" / f"{row.config}.py"
            config = configuration.load(str(path), [*row.settings, "train.steps=1000000"])
            names = SimpleNamespace(
                vocabulary=config.model.vocabulary, segments=row.documents, names=("random",)
            )
            return build(config, names)


def _taken_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in OWN]
    return {name: sys.modules.pop(name) for name in names}


def batches(built: Any, documents: int) -> Iterator[dict]:
    """Yields batches of random tokens for ever, eight different ones. documents: in each row."""
    config, random = built.config, np.random.default_rng(0)
    rows, sequence = config.train.rows, config.data.sequence
    made = []
    for _ in range(8):
        tokens = random.integers(0, config.model.vocabulary, (rows, sequence + 1), np.int32)
        ends = np.sort(random.integers(1, sequence, (rows, documents - 1)), axis=1)
        at = np.arange(sequence)
        segment_ids = 1 + (at[None, :, None] >= ends[:, None, :]).sum(2).astype(np.int32)
        starts = np.maximum.accumulate(np.where(np.diff(segment_ids, axis=1, prepend=0) > 0, at, 0), axis=1)
        batch = {"tokens": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy(), "segment_ids": segment_ids}
        batch |= {"positions": (at - starts).astype(np.int32), "source": np.zeros_like(segment_ids)}
        batch["loss_mask"] = np.ones((rows, sequence), np.float32)
        made.append(built.place(batch, rows))
    yield from itertools.cycle(made)


def first_state(built: Any) -> Any:
    """Returns the first state of the new commit's step."""
    step = built.step
    state = init_by_parts(step.objective.model, step.optimizer, built.abstract, built.config.train.seed)
    # Of the counters several are one array, which a step cannot take over twice.
    return jax.tree.map(lambda leaf: leaf.copy() if leaf.ndim == 0 else leaf, state)


def like(state: Any, abstract: Any) -> Any:
    """Returns a state in the structure of another commit's, whose leaves are alike and in the same order."""
    leaves, (wanted, structure) = jax.tree.leaves(state), jax.tree.flatten(abstract)
    for leaf, other in zip(leaves, wanted, strict=True):
        same = (leaf.shape, leaf.dtype) == (other.shape, other.dtype)
        assert same and leaf.sharding.memory_kind == other.sharding.memory_kind, (leaf.aval, other)
    return structure.unflatten(leaves)


def turn(built: Any, state: Any, source: Iterator, steps: int) -> tuple[Any, float, dict]:
    """Returns the state after so many steps, the seconds that each took, and the last metrics.

    As in training, a step is dispatched before the last one's metrics are read.
    """
    state = like(state, built.abstract)
    jax.block_until_ready(state)
    began, previous = time.perf_counter(), None
    for _ in range(steps):
        state, metrics = built.compiled(state, next(source))
        if previous is not None:
            jax.device_get(previous)
        previous = metrics
    state = built.compiled.settled(state)
    jax.block_until_ready(state)
    return state, (time.perf_counter() - began) / steps, jax.device_get(previous)


def peak(built: Any) -> int | None:
    """Returns the bytes that a step of one program needs on the device, its arguments among them."""
    if not hasattr(built.compiled, "program"):
        return hardware.peak_bytes()
    memory = built.compiled.program.memory_analysis()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + made


def measure(row: Row, sides: dict[str, Tree], timed: float) -> dict[str, Any]:
    """Returns what is to be said of a row. timed: seconds of each commit."""
    built = {}
    for side, tree in sides.items():
        built[side] = tree.build(row)
        print(f"  {side}: compiled in {built[side].compile_seconds:.1f} s", file=sys.stderr, flush=True)
    source = batches(built["new"], row.documents)
    batch, first, peaks = next(source), {}, {}
    for side, of in built.items():
        with sides[side]():
            state, _, metrics = turn(of, first_state(built["new"]), itertools.repeat(batch), 1)
        first[side] = {name: float(metrics[name]) for name in ("loss", "grad_norm")}
        peaks[side] = peak(of)
        print(f"  {side}: first step {first[side]}", file=sys.stderr, flush=True)
        if side != list(built)[-1]:
            del state
    took, clocks = ({side: [] for side in built} for _ in range(2))
    began, warm = time.perf_counter(), False
    while any(row.steps * sum(took[side]) < timed or len(took[side]) < 2 for side in built):
        warm = warm or time.perf_counter() - began >= row.warmup
        for side, of in built.items():
            with sides[side](), Clocks() as seen:
                state, seconds, metrics = turn(of, state, source, row.steps)
            print(f"  {side}: {seconds:.4f} s a step", file=sys.stderr, flush=True)
            if warm:
                took[side].append(seconds)
                clocks[side].append(seen)
    tokens = int(np.prod(batch["tokens"].shape))
    found = {
        side: {
            "tokens_per_second": round(tokens / statistics.fmean(took[side]), 1),
            "step_seconds_mean": round(statistics.fmean(took[side]), 5),
            "turns": [round(seconds, 5) for seconds in took[side]],
            "steps_timed": row.steps * len(took[side]),
            "spread": comparison.halves_apart([[seconds] for seconds in took[side]], statistics.fmean),
            "sm_clock_mhz": mean(one.mhz for one in clocks[side]),
            "power_watts": mean(one.watts for one in clocks[side]),
            "compile_seconds": round(of.compile_seconds, 1),
            "peak_hbm_bytes": peaks[side],
            "first_step": first[side],
        }
        for side, of in built.items()
    }
    old, new = found.values()
    compared = comparison.ratio(new, old)
    return {
        **found,
        "ratio": round(compared["ratio"], 4),
        "claimed": compared["claimed"],
        "peak_ratio": round(new["peak_hbm_bytes"] / old["peak_hbm_bytes"], 5) if peaks["old"] else None,
        "tokens_per_step": tokens,
        "skipped_updates": int(metrics["skipped"]),
    }


def sustained(seconds: float) -> float:
    """Returns the TFLOP/s of a product of 8192 cubed in bfloat16, over and over."""
    a, b = operands(jnp.bfloat16, 8192)
    done, began = -1, 0.0
    while done < 0 or time.perf_counter() - began < seconds:
        for _ in range(REPEATS):
            last = product(a, b)
        jax.block_until_ready(last)
        done += 1
        began = began or time.perf_counter()
    return round(2 * 8192**3 * REPEATS * done / (time.perf_counter() - began) / 1e12, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--old", type=Path, required=True, metavar="FOLDER", help="the other commit's files")
    add("--old-commit", default="", help="its name, for the record")
    add("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    add("--set", action="append", default=[], dest="overrides", metavar="GROUP.KEY=VALUE")
    add("--timed-seconds", type=float, default=40.0, help="of each commit")
    add("--gemm-seconds", type=float, default=8.0)
    add("--stop-after", type=float, default=1e9, metavar="SECONDS", help="begin no row after so long")
    add("--output", type=Path, required=True)
    arguments = parser.parse_args()
    # An editable install would find in its own tree what another commit does not have.
    sys.meta_path = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
    sys.path.append(str(ROOT))
    sides = {"old": Tree(arguments.old.resolve()), "new": Tree(ROOT)}
    xla.configure()
    jax.config.update("jax_enable_compilation_cache", False)  # each compiles as at a first start
    line = {"benchmark": "commits", "old_commit": arguments.old_commit, "rows": {}}
    line |= {"gemm_bf16_tflops": sustained(arguments.gemm_seconds) if arguments.gemm_seconds else None}
    began = time.monotonic()
    for name in arguments.rows.split(","):
        if time.monotonic() - began > arguments.stop_after:
            print(f"{name}: left out, for want of time", file=sys.stderr, flush=True)
            continue
        print(name, file=sys.stderr, flush=True)
        row = dataclasses.replace(ROWS[name], settings=(*ROWS[name].settings, *arguments.overrides))
        try:
            line["rows"][name] = measure(row, sides, arguments.timed_seconds)
        except jax.errors.JaxRuntimeError as error:  # out of memory, say; the next may run
            line["rows"][name] = {"error": str(error).partition("\n")[0]}
        harness.write(line | harness.provenance(), arguments.output)
    harness.emit(line | harness.provenance(), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
