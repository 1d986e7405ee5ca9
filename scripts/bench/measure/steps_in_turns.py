"""Times steps under several settings, or of two commits, in turns in one process, and prints one JSON line.

    python scripts/bench/measure/steps_in_turns.py --config configs/llama3_8b_8layer.py \\
        --set mesh.fsdp=1 --set mesh.tensor=2 --contender none=kernels.collective_matmul=none \\
        --contender ring=kernels.collective_matmul=ring [--output FILE]
    python scripts/bench/measure/steps_in_turns.py --config configs/llama3_8b_8layer.py --documents 12 \\
        --old build/old --contender step@old --contender step

A contender is NAME[@old|@alone][=GROUP.KEY=VALUE,...]: with @old its code and its configuration are those of
another commit's tree, with @alone each device makes a step of its own, all at the same time. They take turns,
A-B-C-C-B-A, so that they see the same clocks and one warm-up is enough for all: what a GPU can do depends on
what it has just done. Contenders whose states are alike hand on one state. A turn goes from a synchronised
start to a synchronised end, over its steps, and turns follow each other without a pause. Batches are the
run's first ones, or with --documents random tokens, so many documents a row; devices alone have their shares.

The first step of each, from the same state, says whether they compute the same. Peaks: of a step that is one
program as XLA compiled it; of several, what the allocator had seen by then. Ratios are of tokens per second,
to the first contender; of NAME also to NAME@old. Watts are of a GPU, and joules of all of them, by
NVML's counter of energy. Of a mixture of experts `expert_load_max` is the mean over layers and turns. What
compiles first also tunes for the others. A contender that cannot run here is left out, with the reason. With
--stop-after it has printed by then: there are as many turns as there is time for, two at least.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import hashlib
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import blocks
import collective_matmul_check as checks
import comparison
import harness
import jax
import numpy as np
import turns
from commit_trees import Tree, without_editable
from gpu_clocks import mean

from jaxthru.runtime import hardware, xla
from jaxthru.runtime.errors import InputError, require

BEGAN = time.monotonic()
FIRST = ("loss", "grad_norm")
BATCHES = 8
COMPILES, RUNS = 240.0, 180.0  # seconds that a contender may take to compile, and for its first steps


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A contender that was asked for. side: empty, `old` or `alone`."""

    name: str
    side: str
    settings: list[str]

    @classmethod
    def of(cls, text: str) -> "Wanted":
        """Returns what NAME@SIDE=GROUP.KEY=VALUE,GROUP.KEY=VALUE asks for."""
        name, _, settings = text.partition("=")
        side = name.partition("@")[2]
        if side not in ("", "old", "alone"):
            raise argparse.ArgumentTypeError(f"{name}: behind @ comes old or alone")
        return cls(name, side, settings.split(",") if settings else [])


def random_batches(config: Any, documents: int) -> Iterator[dict]:
    """Yields different batches of random tokens. documents: in each row."""
    random, sequence, rows = np.random.default_rng(0), config.data.sequence, config.train.rows
    for _ in range(BATCHES):
        tokens = random.integers(0, config.model.vocabulary, (rows, sequence + 1), np.int32)
        ends = np.sort(random.integers(1, sequence, (rows, documents - 1)), axis=1)
        at = np.arange(sequence)
        segment_ids = 1 + (at[None, :, None] >= ends[:, None, :]).sum(2).astype(np.int32)
        starts = np.maximum.accumulate(np.where(np.diff(segment_ids, axis=1, prepend=0) > 0, at, 0), axis=1)
        batch = {"tokens": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy(), "segment_ids": segment_ids}
        batch |= {"positions": (at - starts).astype(np.int32), "source": np.zeros_like(segment_ids)}
        batch["loss_mask"] = np.ones((rows, sequence), np.float32)
        yield batch


class Contender:
    """A step, or the steps of devices that each work alone, and their batches.

    builds: its `Build`, or one for each device. documents: of random tokens in a row, 0 for real ones.
    """

    def __init__(self, tree: Tree, builds: list, documents: int):
        self.tree, self.builds, self.taken = tree, builds, 0
        config = builds[0].config
        rows = config.train.rows
        whole = dataclasses.replace(config, train=dataclasses.replace(config.train, rows=rows * len(builds)))
        made = random_batches(whole, documents) if documents else blocks.first_batches(whole, BATCHES)
        self.placed, self.tokens = [], []
        for batch in made:
            parts = (
                {key: value[at : at + rows] for key, value in batch.items()}
                for at in range(0, rows * len(builds), rows)
            )
            self.placed.append([of.place(part, rows) for of, part in zip(builds, parts, strict=True)])
            self.tokens.append(int((batch["segment_ids"] > 0).sum()))

    @property
    def layout(self) -> tuple:
        """What is equal of contenders that can take over each other's state: shapes and dtypes, and what each
        device has of them, for the meshes of two commits may have other axes."""
        leaves = jax.tree.leaves([of.abstract for of in self.builds])
        return tuple((leaf.shape, leaf.dtype, *parts(leaf)) for leaf in leaves), len(self.builds)

    def first_states(self) -> list:
        # Of the counters several are one array, which a step cannot take over twice.
        alone = lambda leaf: leaf.copy() if leaf.ndim == 0 else leaf  # noqa: E731
        with self.tree():
            return [jax.tree.map(alone, of.first_state()) for of in self.builds]

    def turn(self, states: list, steps: int) -> tuple[list, float, int, list]:
        """Returns the states after so many steps, the seconds that each took, the tokens of all, and the last
        metrics. As in training, a step is dispatched before the last one's metrics are read."""
        with self.tree():
            states = [like(state, of.abstract) for state, of in zip(states, self.builds, strict=True)]
            jax.block_until_ready(states)
            began, previous, tokens = time.perf_counter(), None, 0
            for _ in range(steps):
                at, metrics, self.taken = self.taken % BATCHES, [], self.taken + 1
                for number, of in enumerate(self.builds):
                    states[number], told = of.compiled(states[number], self.placed[at][number])
                    metrics.append(told)
                tokens += self.tokens[at]
                if previous is not None:
                    jax.device_get(previous)
                previous = metrics
            states = [of.compiled.settled(state) for state, of in zip(states, self.builds, strict=True)]
            jax.block_until_ready(states)
            return states, (time.perf_counter() - began) / steps, tokens, jax.device_get(previous)

    def program(self) -> str | None:
        """Returns a digest of the program that XLA has made, without what says where it comes from."""
        if not hasattr(self.builds[0].compiled, "program"):
            return None
        text = re.sub(r", metadata=\{[^}]*\}", "", self.builds[0].compiled.program.as_text())
        return hashlib.sha256(text.partition("FileNames")[0].encode()).hexdigest()[:16]


def parts(leaf: Any) -> tuple:
    """Returns the kind of memory of an array, and which part of it each device has."""
    placed = leaf.sharding.devices_indices_map(leaf.shape)
    return leaf.sharding.memory_kind, tuple((device.id, str(part)) for device, part in placed.items())


def like(state: Any, abstract: Any) -> Any:
    """Returns a state in the structure of another commit's, whose leaves are alike and in the same order."""
    leaves, (wanted, structure) = jax.tree.leaves(state), jax.tree.flatten(abstract)
    return structure.unflatten([_placed_as(*pair) for pair in zip(leaves, wanted, strict=True)])


def _placed_as(leaf: jax.Array, other: Any) -> jax.Array:
    """Returns the same array, as a commit has it whose mesh may have other axes; nothing is copied."""
    if leaf.sharding == other.sharding and (leaf.shape, leaf.dtype) == (other.shape, other.dtype):
        return leaf
    assert (leaf.shape, leaf.dtype, *parts(leaf)) == (other.shape, other.dtype, *parts(other)), leaf.aval
    own = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, other.sharding, own)


def peak(built: Any) -> int | None:
    """Returns the bytes that a step of one program needs on the device, its arguments among them."""
    if not hasattr(built.compiled, "program"):
        return hardware.peak_bytes()
    memory = built.compiled.program.memory_analysis()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + made


def build_all(arguments: argparse.Namespace) -> tuple[dict[str, Contender], dict[str, str]]:
    """Returns {name: contender}, and why others cannot run. One compiles after the other, for XLA tunes by
    timing: together are only those of devices that each work alone."""
    new, made, missing = Tree(harness.ROOT), {}, {}
    old = Tree(arguments.old.resolve()) if arguments.old else None
    for wanted in arguments.contender:
        tree = old if wanted.side == "old" else new
        devices = [[device] for device in jax.local_devices()] if wanted.side == "alone" else [None]
        print(f"{wanted.name}: compiles", file=sys.stderr, flush=True)
        with checks.ends_within(COMPILES, f"{wanted.name} compiles"), tree():
            settings = [*arguments.overrides, *wanted.settings]
            build = functools.partial(tree.build, Path(arguments.config), settings, arguments.documents)
            try:
                with concurrent.futures.ThreadPoolExecutor(len(devices)) as pool:
                    builds = list(pool.map(build, devices))
            except InputError as refusal:
                missing[wanted.name] = str(refusal)
                continue
        made[wanted.name] = Contender(tree, builds, arguments.documents)
        print(f"{wanted.name}: compiled in {builds[0].compile_seconds:.0f} s", file=sys.stderr, flush=True)
    return made, missing


def measure(made: dict[str, Contender], arguments: argparse.Namespace) -> dict[str, dict]:
    """Returns each contender's result."""
    states, first, peaks, usual, steps = {}, {}, {}, {}, {}
    for name, of in made.items():
        states.pop(of.layout, None)  # each begins with a first step from the same state
        own = (one for one in made.values() if one.tree.folder == harness.ROOT and one.layout == of.layout)
        maker = next(own, of)
        with checks.ends_within(RUNS, f"{name}, the first step"):
            state, _, _, metrics = of.turn(maker.first_states(), 1)
            states[of.layout], usual[name], *_ = of.turn(state, 1)
        told = [{key: float(each[key]) for key in FIRST if key in each} for each in metrics]
        first[name], peaks[name] = told if len(told) > 1 else told[0], peak(of.builds[0])
        steps[name] = arguments.steps or max(2, math.ceil(arguments.turn_seconds / usual[name]))
        print(f"{name}: first step {first[name]}", file=sys.stderr, flush=True)

    def run(name: str) -> tuple[list[float], float, list]:
        of, count = made[name], steps[name]
        with checks.ends_within(60 + 3 * count * usual[name], name):
            states[of.layout], seconds, tokens, last = of.turn(states[of.layout], count)
        return [seconds] * count, tokens, last

    gpus = len({d for of in made.values() for b in of.builds for d in b.layout.mesh.devices.flat})
    runs = {name: functools.partial(run, name) for name in made}
    how = arguments.warmup_seconds, arguments.timed_seconds, gpus
    ends = BEGAN + arguments.stop_after
    taken = turns.steps_in_turns(runs, *how, backwards=len(made) > 2, ends=ends)
    rows = {name: turns.rated(own) for name, own in taken.items()}
    for name, row in rows.items():
        power = mean(turn.energy_watts for turn in taken[name])
        row |= {
            "turns": [round(turn.seconds[0], 5) for turn in taken[name]],
            "energy_watts": power,
            "joules_per_token": round(power * gpus / row["tokens_per_second"], 5) if power else None,
            "compile_seconds": round(made[name].builds[0].compile_seconds, 1),
            "peak_hbm_bytes": peaks[name],
            "program": made[name].program(),
            "first_step": first[name],
            "skipped_updates": sum(int(each["skipped"]) for each in taken[name][-1].last),
            **busiest_experts(taken[name]),
            **compared(row, next(iter(rows.values()))),
        }
        if before := rows.get(f"{name}@old"):
            row["over_old"] = compared(row, before)
    return rows


def busiest_experts(taken: list[turns.Turn]) -> dict[str, float]:
    """Returns how busy a mixture's busiest experts were, over the mean of all; nothing of other models."""
    loads = [each["expert_load_max"] for turn in taken for each in turn.last if "expert_load_max" in each]
    return {"expert_load_max": round(float(np.mean(loads)), 3)} if loads else {}


def compared(row: dict, other: dict) -> dict:
    """Returns the ratio of tokens per second, and whether it is claimed."""
    of = comparison.ratio(row, other)
    return of | {"ratio": round(of["ratio"], 4), "needed": round(of["needed"], 5)}


def in_turns(arguments: argparse.Namespace) -> dict:
    """Returns the record of all contenders. Raises InputError where the first one cannot run."""
    wanted = {each.name: each for each in arguments.contender}
    sides = {each.side for each in wanted.values()}
    needed = "--contender NAME@old: needs --old, the other commit's files, and --documents, random tokens"
    require("old" not in sides or (arguments.old and arguments.documents), needed)
    sys.meta_path = without_editable(sys.meta_path)
    sys.path.append(str(harness.ROOT))
    xla.configure(writes_to_peers=True)  # some may; CUDA starts once for all
    made, missing = build_all(arguments)
    first = next(iter(wanted))
    if first in missing:
        raise InputError(f"--contender {first}: all ratios are to it, and it cannot run: {missing[first]}")
    rows = measure(made, arguments)
    return {
        "old_commit": arguments.old_commit,
        "contenders": {name: {"set": wanted[name].settings} | row for name, row in rows.items()},
        "missing": missing,
        "peak_hbm_bytes": hardware.peak_bytes(),
    }


main = harness.program(
    __doc__,
    in_turns,
    harness.option("--contender", action="append", required=True, type=Wanted.of, metavar="NAME=SETTINGS"),
    harness.option(
        "--documents", type=int, default=0, help="of random tokens in a row, in place of real ones"
    ),
    harness.option("--old", type=Path, metavar="FOLDER", help="the other commit's files"),
    harness.option("--old-commit", default="", help="its name, for the record"),
    harness.option("--turn-seconds", type=float, default=4.0),
    harness.option("--stop-after", type=float, default=math.inf, metavar="SECONDS", help="of its start"),
    harness.option("--steps", type=int, default=0, help="of a turn, in place of its seconds"),
    seconds=(20.0, 40.0),
)

if __name__ == "__main__":
    sys.exit(main())
