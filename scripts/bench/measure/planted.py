"""`python -m jaxthru.train` with one thing wrong with it, on purpose; profiled_run.py starts it.

    python scripts/bench/measure/planted.py CAUSE NOTES [--seconds S] [--one-batch] [--turns N] -- ARGUMENTS

ARGUMENTS are those of jaxthru.train. CAUSE is one of `clean` (nothing), `loader` (sleeps before each batch),
`sync` (waits for each step, then works on the host), `float32` (one product of each layer), `gather` (all
weights and moments, before each step) and `zeros` (for weights, and so for nearly all operands). With
--one-batch batches are made as ever, but each step takes the first: documents differ in length, and so steps
in attention's work, by more than some causes cost. With --turns the run is traced N times more, see `Turns`.

NOTES is a JSON file: when each step was dispatched (ns since 1970), for how many seconds the device had
nothing to do before it because of the cause, by the host's clock, and what a gather takes by itself.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxthru import train
from jaxthru.build import compiled
from jaxthru.engine.inline import InlineStep
from jaxthru.models.layers import SwiGLU
from jaxthru.models.ops import matrix_of
from jaxthru.profile.collect import trace
from jaxthru.runtime import allocator

NOTES = {"dispatched": [], "idle": [], "isolated": None}
LATEST = {"metrics": None, "finished": None}
TICK = 0.0005  # how finely it is looked whether a step has finished


def note_steps(after: Callable = lambda results: None) -> None:
    """Notes each call of the step. after: what the planted host does once it is dispatched."""
    for kind in (compiled.CompiledStep, compiled.DispatchedStep):

        def called(self, state, batch, plain=kind.__call__):
            now = time.perf_counter()
            NOTES["dispatched"].append(time.time_ns())
            NOTES["idle"].append(now - LATEST["finished"] if LATEST["finished"] else 0.0)
            results = plain(self, state, batch)
            LATEST.update(metrics=results[1], finished=None)
            after(results)
            return results

        kind.__call__ = called


class Batches:
    """Batches that each take so long to come, whatever the device does, and may all be the first."""

    def __init__(self, batches, seconds: float, one: bool):
        self.batches, self.seconds, self.one, self.first = batches, seconds, one, None

    def __enter__(self):
        self.iterator = self.batches.__enter__()
        return self

    def __exit__(self, *raised):
        return self.batches.__exit__(*raised)

    def __next__(self):
        began = time.perf_counter()
        while time.perf_counter() - began < self.seconds:
            metrics = LATEST["metrics"]
            if metrics and LATEST["finished"] is None and metrics["loss"].is_ready():
                LATEST["finished"] = time.perf_counter()
            time.sleep(TICK)
        batch = next(self.iterator)
        if self.one:
            batch = self.first = self.first or batch
        return batch


def make_batches(seconds: float, one: bool) -> None:
    """Has the loop take its batches from `Batches`."""
    batches = train.Build.batches
    train.Build.batches = lambda *arguments: Batches(batches(*arguments), seconds, one)


def sync(seconds: float) -> None:
    def wait(results) -> None:
        jax.block_until_ready(results)
        LATEST["finished"] = time.perf_counter()
        time.sleep(seconds)

    note_steps(wait)


def float32(_: float) -> None:
    """The feed-forward layer's last product: its operand stays in float32, and its weight is not cast."""
    note_steps()

    def forward(self, x_ND, context):
        ops = context.ops
        gate_NM, up_NM = ops.column_parallel(x_ND, self.gate, self.up)
        gate_NM, up_NM = checkpoint_name(gate_NM, "gate"), checkpoint_name(up_NM, "up")
        y_NM = jax.nn.silu(gate_NM.astype(jnp.float32)) * up_NM.astype(jnp.float32)
        matrix_MD, axes = matrix_of(self.down)
        x_ND = y_NM @ ops.layout.constrain(matrix_MD, axes, without=("fsdp",))
        return ops.constrain(x_ND.astype(ops.compute), "tokens", None)

    SwiGLU.__call__ = forward


def usable(arrays: list[jax.Array], layout) -> jax.Array:
    """Says whether arrays are finite, having gathered each of them whole on every device."""
    whole = (layout.constrain(array, (None,) * array.ndim) for array in arrays)
    return jnp.isfinite(jnp.stack([jnp.max(jnp.abs(array)) for array in whole])).all()


def gather(_: float) -> None:
    """A look at all of the state before each step, which has to wait for it."""
    note_steps()
    leaves = lambda state: jax.tree.leaves((state["params"], state["opt_state"]["slots"]))  # noqa: E731

    def step(self, state, batch, plain=InlineStep.__call__):
        looked = usable(leaves(state), self.step.model.ops.layout).astype(jnp.int32)
        return plain(self, state, batch | {"tokens": batch["tokens"] * looked})

    def first_state(self, plain=train.Build.first_state):
        state = plain(self)
        alone = jax.jit(lambda arrays: usable(arrays, self.layout))
        jax.block_until_ready(alone(leaves(state)))
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            jax.block_until_ready(alone(leaves(state)))
            seconds.append(time.perf_counter() - began)
        NOTES["isolated"] = statistics.median(seconds)
        return state

    InlineStep.__call__, train.Build.first_state = step, first_state


def zeros(_: float) -> None:
    """Weights of zero stay zero, for so are their gradients; the program is the same to the byte."""
    note_steps()

    def first_state(self, plain=train.Build.first_state):
        state = plain(self)
        shardings = jax.tree.map(lambda array: array.sharding, state["params"])
        clear = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), out_shardings=shardings)
        return state | {"params": clear(state["params"])}

    train.Build.first_state = first_state


class Turns:
    """A run's profile, and after it more traces, of every other five steps, which nobody reads.

    A machine's speed may drift by more than tracing costs, for longer than a profile lasts. By the loop's
    clock of steps that were traced and of others, in turns, the cost can be told from that. So the traces are
    like the profile's own on a CPU; those steps are noted beside its passes.
    """

    STEPS = 5

    def __init__(self, profile: trace.Profile, last: int, count: int):
        """last: the run's last step. count: of turns."""
        self.profile, self.step, self.turns = profile, 0, {}
        self.begun = last + 1 - (2 * count + 1) * self.STEPS  # they begin and end with steps not traced
        self.folder = tempfile.TemporaryDirectory()

    def __getattr__(self, name: str):
        return getattr(self.profile, name)

    def begins(self, step: int) -> bool:
        self.step = step
        return self.profile.begins(step) or (step >= self.begun and (step - self.begun) % self.STEPS == 0)

    def begin(self) -> None:
        """Begins the profile's own trace, or begins or ends one of the others."""
        if self.step < self.begun:
            self.profile.begin()
        elif (self.step - self.begun) // self.STEPS % 2:
            self.turns[f"turn_{len(self.turns)}"] = {"first_step": self.step, "steps": self.STEPS}
            trace.start_trace(Path(self.folder.name), clock=False)
        elif self.turns:
            jax.profiler.stop_trace()

    def finish(self) -> None:
        path = self.profile.folder / "collected.json"
        collected = json.loads(path.read_text())
        collected["passes"] |= self.turns
        path.write_text(json.dumps(collected, indent=1) + "\n")
        self.folder.cleanup()
        self.profile.finish()


def take_turns(count: int) -> None:
    """Has the loop trace so many turns behind its profile."""
    opened = train.open_profile
    train.open_profile = lambda *arguments, **more: Turns(opened(*arguments, **more), arguments[5], count)


CAUSES = {
    "clean": lambda _: note_steps(),
    "loader": lambda _: note_steps(),  # and see `make_batches`
    "sync": sync,
    "float32": float32,
    "gather": gather,
    "zeros": zeros,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cause", choices=CAUSES)
    parser.add_argument("notes", type=Path)
    parser.add_argument("--seconds", type=float, default=0.1, help="that `loader` and `sync` sleep")
    parser.add_argument("--one-batch", action="store_true", help="each step takes the first batch")
    own, rest = sys.argv[1:], []
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    parser.add_argument("--turns", type=int, default=0, help="more traces, behind the profile")
    arguments = parser.parse_args(own)
    CAUSES[arguments.cause](arguments.seconds)
    make_batches(arguments.seconds if arguments.cause == "loader" else 0.0, arguments.one_batch)
    if arguments.turns:
        take_turns(arguments.turns)
    sys.argv = ["train", *rest]
    allocator.keep_freed()  # as `python -m jaxthru.train` does
    code = train.main()
    arguments.notes.write_text(json.dumps(NOTES))
    return code


if __name__ == "__main__":
    sys.exit(main())
