"""Are the steps of one commit as fast as those of another? Both in turns, in one process, on one state.

    git worktree add build/old OLD
    python scripts/bench/measure/commits.py --old build/old --output FILE [--rows a,b+c,...]

Each commit compiles the step of its own configuration file; one state goes through both, A-B-A-B, so that
they see the same clocks and one warm-up serves both. Rows joined by + take turns with each other too, in one
process: each round takes all of them, every other round backwards, for what a GPU can do depends on what it
has just done. What is timed is a turn from a synchronised start to a synchronised end, over its steps, and
turns follow each other without a pause. Batches are random tokens, packed or one document a row, the same for
all of one size; GPUs that each work alone have their shares of the same rows.
The first step of each, from the same state, says whether they compute the same. Peaks: of a step that is one
program as XLA compiled it; of several, what the allocator had seen when the old commit's first step was done,
and then the new one's, so such rows want a process of their own. Ratios are of the new commit's tokens per
second to the old one's, and of joined rows also to the first of them, new beside new. Watts are of a GPU, and
joules of all of them, by NVML's counter of energy. The commit that compiles first also tunes for the other,
so compile times are no comparison of the two: see compile_time.py.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import itertools
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import comparison
import harness
import jax
import jax.numpy as jnp
import numpy as np
import turns
from gemm import REPEATS, operands, product
from gpu_clocks import mean

from jaxthru.runtime import hardware, xla
from jaxthru.training.state import sharded_init

ROOT = Path(__file__).resolve().parents[3]
OWN = ("jaxthru", "pallas_kernels")


@dataclasses.dataclass(frozen=True)
class Row:
    """config: in either commit's configs/. settings: as `--set` takes them; keys that both commits have, or
    that are `RENAMED`. documents: in a row. steps: of a turn. warmup: seconds of all that take turns, beside
    their first steps. alone: so many devices make a step of their own each, at the same time. sides: the
    commits that are to run it."""

    config: str
    settings: tuple[str, ...] = ()
    documents: int = 1
    steps: int = 10
    warmup: float = 20.0
    alone: int = 0
    sides: tuple[str, ...] = ("old", "new")


RENAMED = {"kernels.collective_matmul": "mesh.collective_matmul"}  # until there was a group `kernels`
EXACT = ("optim.clip_rule=exact", "offload.level=optimizer", "offload.fraction=0.65")
PROJECTIONS = ("remat.policy=projections", "model.loop=unroll")
GATE = ("remat.policy=gate", "model.loop=unroll")
FSDP, TENSOR = (*PROJECTIONS, "mesh.fsdp=2", "train.rows=4"), (*PROJECTIONS, "mesh.fsdp=1", "mesh.tensor=2")
KEPT = "remat.keep_parameters=true"
ROWS = {
    "8layer_packed": Row("llama3_8b_8layer", PROJECTIONS, documents=12),
    "8layer_causal": Row("llama3_8b_8layer", PROJECTIONS, warmup=8.0),
    "8layer_fp8": Row("llama3_8b_8layer", (*PROJECTIONS, "precision.matmul=fp8"), documents=12, warmup=8.0),
    "32layer": Row("llama3_8b_one_gpu", GATE, documents=12, steps=4, warmup=8.0),
    "8b_64k": Row("llama3_8b", documents=12, steps=3, warmup=0.0),
    "8b_64k_exact": Row("llama3_8b", EXACT, documents=12, steps=3, warmup=0.0),
}
# On two GPUs, to be joined: the first of each is what the others are held against.
alone = Row("llama3_8b_8layer", (*PROJECTIONS, "mesh.fsdp=1"), documents=12, steps=5, warmup=10.0)
alone = dataclasses.replace(alone, alone=2, sides=("new",))
fsdp = dataclasses.replace(alone, settings=FSDP, alone=0)
both = dataclasses.replace(fsdp, sides=("old", "new"))
tensor = dataclasses.replace(both, settings=TENSOR, steps=9)
ON_TWO = {
    "alone": alone,
    "alone_kept": dataclasses.replace(alone, settings=(*alone.settings, KEPT)),
    "fsdp": fsdp,
    "fsdp_kept": dataclasses.replace(both, settings=(*FSDP, KEPT)),
    "fsdp_copies": dataclasses.replace(both, settings=(*FSDP, KEPT, "mesh.transfers=copies")),
    "tensor": dataclasses.replace(tensor, settings=(*TENSOR, "kernels.collective_matmul=none")),
    "tensor_fused": dataclasses.replace(tensor, settings=(*TENSOR, "kernels.collective_matmul=fused")),
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

    def build(self, row: Row, devices: list[jax.Device] | None = None) -> Any:
        """Returns the `Build` of a row, compiled, for all devices or these; to be called where this commit is
        the one that imports find."""
        configuration = importlib.import_module("jaxthru.config")
        try:
            build = importlib.import_module("jaxthru.build.compiled").build_step
        except ModuleNotFoundError:  # before there was jaxthru/build
            build = importlib.import_module("jaxthru.train").build
        assert Path(build.__code__.co_filename).is_relative_to(self.folder), build.__code__.co_filename
        path, settings = str(self.folder / "configs" / f"{row.config}.py"), row.settings
        config = configuration.load(path)
        for name, before in RENAMED.items():
            group, _, field = before.partition(".")
            if hasattr(getattr(config, group), field):
                settings = [text.replace(f"{name}=", f"{before}=") for text in settings]
        config = configuration.load(path, [*settings, "train.steps=1000000"])
        lengths = np.full(row.documents, config.data.sequence / row.documents)
        mixture = SimpleNamespace(count="tokens", weights=lambda *at: {"random": 1.0})
        data = SimpleNamespace(
            vocabulary=config.model.vocabulary,
            segments=row.documents,
            names=("random",),
            mixture=mixture,
            mixing=mixture,  # as commits before jaxthru/data/mixture call it
            train=[(None, SimpleNamespace(length=lengths))],
        )
        return build(config, data, devices)


class Contender:
    """A row's step of one commit, or the steps of devices that each work alone, and their batches.

    builds: its `Build`, or one for each device.
    """

    def __init__(self, tree: Tree, row: Row, builds: list):
        self.tree, self.row, self.builds = tree, row, builds
        self.rows = sum(of.config.train.rows for of in self.builds)
        self.tokens = self.rows * self.builds[0].config.data.sequence
        placed = [[] for _ in self.builds]
        for batch in batches(self.builds[0].config, self.rows, row.documents):
            at = 0
            for of, its in zip(self.builds, placed, strict=True):
                own = {name: value[at : at + of.config.train.rows] for name, value in batch.items()}
                its.append(of.place(own, of.config.train.rows))
                at += of.config.train.rows
        self.source = [itertools.cycle(its) for its in placed]

    @property
    def layout(self) -> tuple:
        """What is equal of contenders that can take over each other's state."""
        leaves = jax.tree.leaves([of.abstract for of in self.builds])
        return tuple((leaf.shape, leaf.dtype, str(leaf.sharding)) for leaf in leaves), len(self.builds)

    def first_states(self) -> list:
        return [first_state(of) for of in self.builds]

    def turn(self, states: list, steps: int) -> tuple[list, float, list]:
        """Returns the states after so many steps, the seconds that each took, and the last metrics.

        As in training, a step is dispatched before the last one's metrics are read.
        """
        with self.tree():
            states = [like(state, of.abstract) for state, of in zip(states, self.builds, strict=True)]
            jax.block_until_ready(states)
            began, previous = time.perf_counter(), None
            for _ in range(steps):
                metrics = []
                for number, of in enumerate(self.builds):
                    states[number], told = of.compiled(states[number], next(self.source[number]))
                    metrics.append(told)
                if previous is not None:
                    jax.device_get(previous)
                previous = metrics
            states = [of.compiled.settled(state) for state, of in zip(states, self.builds, strict=True)]
            jax.block_until_ready(states)
            return states, (time.perf_counter() - began) / steps, jax.device_get(previous)

    def program(self) -> str | None:
        """Returns a digest of the program that XLA has made, without what says where it comes from."""
        if not hasattr(self.builds[0].compiled, "program"):
            return None
        text = re.sub(r", metadata=\{[^}]*\}", "", self.builds[0].compiled.program.as_text())
        return hashlib.sha256(text.partition("FileNames")[0].encode()).hexdigest()[:16]


def _taken_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in OWN]
    return {name: sys.modules.pop(name) for name in names}


def batches(config: Any, rows: int, documents: int) -> Iterator[dict]:
    """Yields eight different batches of random tokens. documents: in each row."""
    random, sequence = np.random.default_rng(0), config.data.sequence
    for _ in range(8):
        tokens = random.integers(0, config.model.vocabulary, (rows, sequence + 1), np.int32)
        ends = np.sort(random.integers(1, sequence, (rows, documents - 1)), axis=1)
        at = np.arange(sequence)
        segment_ids = 1 + (at[None, :, None] >= ends[:, None, :]).sum(2).astype(np.int32)
        starts = np.maximum.accumulate(np.where(np.diff(segment_ids, axis=1, prepend=0) > 0, at, 0), axis=1)
        batch = {"tokens": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy(), "segment_ids": segment_ids}
        batch |= {"positions": (at - starts).astype(np.int32), "source": np.zeros_like(segment_ids)}
        batch["loss_mask"] = np.ones((rows, sequence), np.float32)
        yield batch


def first_state(built: Any) -> Any:
    """Returns the first state of a step of the new commit."""
    step = built.step
    state = sharded_init(step.objective.model, step.optimizer, built.abstract, built.config.train.seed)
    # Of the counters several are one array, which a step cannot take over twice.
    return jax.tree.map(lambda leaf: leaf.copy() if leaf.ndim == 0 else leaf, state)


def like(state: Any, abstract: Any) -> Any:
    """Returns a state in the structure of another commit's, whose leaves are alike and in the same order."""
    leaves, (wanted, structure) = jax.tree.leaves(state), jax.tree.flatten(abstract)
    for leaf, other in zip(leaves, wanted, strict=True):
        same = (leaf.shape, leaf.dtype) == (other.shape, other.dtype)
        assert same and leaf.sharding.memory_kind == other.sharding.memory_kind, (leaf.aval, other)
    return structure.unflatten(leaves)


def peak(built: Any) -> int | None:
    """Returns the bytes that a step of one program needs on the device, its arguments among them."""
    if not hasattr(built.compiled, "program"):
        return hardware.peak_bytes()
    memory = built.compiled.program.memory_analysis()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + made


def build_all(rows: dict[str, Row], sides: dict[str, Tree]) -> dict[tuple[str, str], Contender]:
    """Returns {(row, side): contender}. One compiles after the other, for XLA tunes by timing: together are
    only those of devices that each work alone."""
    made = {}
    for (name, row), side in itertools.product(rows.items(), sides):
        if side not in row.sides:
            continue
        devices = [[device] for device in jax.local_devices()[: row.alone]] or [None]
        with sides[side](), concurrent.futures.ThreadPoolExecutor(len(devices)) as pool:
            builds = list(pool.map(lambda on, row=row, tree=sides[side]: tree.build(row, on), devices))
        made[name, side] = Contender(sides[side], row, builds)
        print(f"  {name}, {side}: compiled in {builds[0].compile_seconds:.1f} s", file=sys.stderr, flush=True)
    return made


def measure(rows: dict[str, Row], sides: dict[str, Tree], timed: float) -> dict[str, dict]:
    """Returns what is to be said of rows that take turns. timed: seconds of each of their commits."""
    made = build_all(rows, sides)
    states, first, peaks = {}, {}, {}
    for key, of in made.items():
        layout = of.layout
        states.pop(layout, None)  # each begins with a first step from the same state
        maker = next(one for (_, side), one in made.items() if side == "new" and one.layout == layout)
        states[layout], _, metrics = of.turn(maker.first_states(), 1)
        first[key] = [{name: float(each[name]) for name in ("loss", "grad_norm")} for each in metrics]
        peaks[key] = peak(of.builds[0])
        print(f"  {', '.join(key)}: first step {first[key]}", file=sys.stderr, flush=True)
    gpus = len({d for of in made.values() for b in of.builds for d in b.layout.mesh.devices.flat})

    def run(key: tuple[str, str]) -> tuple[list[float], float, list]:
        of = made[key]
        states[of.layout], seconds, last = of.turn(states[of.layout], of.row.steps)
        return [seconds] * of.row.steps, of.tokens * of.row.steps, last

    runs = {key: functools.partial(run, key) for key in made}
    warmup = max(row.warmup for row in rows.values())
    taken = turns.steps_in_turns(runs, warmup, timed, gpus, backwards=len(rows) > 1)
    found: dict[str, dict] = {name: {} for name in rows}
    for (name, side), of in made.items():
        own = taken[name, side]
        rated, power = turns.rated(own), mean(turn.energy_watts for turn in own)
        seconds = rated["step_seconds_mean"]
        kept = ("tokens_per_second", "steps_timed", "spread", "sm_clock_mhz", "power_watts")
        found[name][side] = {key: rated[key] for key in kept} | {
            "step_seconds_mean": round(seconds, 5),
            "turns": [round(turn.seconds[0], 5) for turn in own],
            "energy_watts": power,
            "joules_per_token": round(power * gpus * seconds / of.tokens, 5) if power else None,
            "compile_seconds": round(of.builds[0].compile_seconds, 1),
            "peak_hbm_bytes": peaks[name, side],
            "program": of.program(),
            "first_step": first[name, side] if of.row.alone else first[name, side][0],
        }
    base = next(iter(found))
    for name, row in rows.items():
        line, of = found[name], made[name, "new"]
        if "old" in line:
            old, new = line["old"], line["new"]
            compared = comparison.ratio(new, old)
            line |= {"ratio": round(compared["ratio"], 4), "claimed": compared["claimed"]}
            line["needed"] = round(compared["needed"], 5)
            known = new["peak_hbm_bytes"] and old["peak_hbm_bytes"]
            line["peak_ratio"] = round(new["peak_hbm_bytes"] / old["peak_hbm_bytes"], 5) if known else None
        if name != base:
            compared = comparison.ratio(line["new"], found[base]["new"])
            line[f"over_{base}"] = {field: compared[field] for field in ("ratio", "needed", "claimed")}
        line |= {"set": list(row.settings), "tokens_per_step": of.tokens}
        line["skipped_updates"] = sum(int(each["skipped"]) for each in taken[name, "new"][-1].last)
    return found


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
    every = ROWS | ON_TWO
    add("--rows", default=",".join(ROWS), help=f"of {', '.join(every)}")
    add("--set", action="append", default=[], dest="overrides", metavar="GROUP.KEY=VALUE")
    add("--timed-seconds", type=float, default=40.0, help="of each commit")
    add("--warmup-seconds", type=float, help="of a row, in place of its own")
    add("--keep-compiled", action="store_true", help="take from the compilation cache what is there")
    add("--gemm-seconds", type=float, default=8.0)
    add("--stop-after", type=float, default=1e9, metavar="SECONDS", help="begin no row after so long")
    add("--output", type=Path, required=True)
    arguments = parser.parse_args()
    # An editable install would find in its own tree what another commit does not have.
    sys.meta_path = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
    sys.path.append(str(ROOT))
    sides = {"old": Tree(arguments.old.resolve()), "new": Tree(ROOT)}
    # Some may; CUDA starts once for all.
    xla.configure(writes_to_peers="fused" in arguments.rows)
    # Without the cache each compiles as at a first start.
    jax.config.update("jax_enable_compilation_cache", arguments.keep_compiled)
    line = {"benchmark": "commits", "old_commit": arguments.old_commit, "rows": {}}
    line |= {"gemm_bf16_tflops": sustained(arguments.gemm_seconds) if arguments.gemm_seconds else None}
    began = time.monotonic()
    for names in arguments.rows.split(","):
        if time.monotonic() - began > arguments.stop_after:
            print(f"{names}: left out, for want of time", file=sys.stderr, flush=True)
            continue
        print(names, file=sys.stderr, flush=True)
        more = {} if arguments.warmup_seconds is None else {"warmup": arguments.warmup_seconds}
        rows = {
            name: dataclasses.replace(
                every[name], settings=(*every[name].settings, *arguments.overrides), **more
            )
            for name in names.split("+")
        }
        try:
            line["rows"] |= measure(rows, sides, arguments.timed_seconds)
        except jax.errors.JaxRuntimeError as error:  # out of memory, say; the next may run
            line["rows"][names] = {"error": str(error).partition("\n")[0]}
        harness.write(line | harness.provenance(), arguments.output)
    harness.emit(line | harness.provenance(), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
