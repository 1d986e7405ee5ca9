"""A call of an operation and the ways to compute it: compiled, compared by their results, timed in turns."""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import statistics
import unittest.mock
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import turns

from jaxthru.runtime import xla

Passes = dict[str, Callable]
"""{"forward", "both": a function of the arguments}; what is last gives all results that are compared."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """contenders: {name: its passes}. base: whose results the others' should be, but for those `unlike` it,
    which compute something else. lighter: those that draw less power, and take turns behind all others: for
    a turn a GPU at its power cap is up to 9% faster after one of them. rates: (pass, seconds, what
    `memory_analysis` says) -> more for the record. about: what the record says of the arguments.

    updates: whether a contender updates its first argument in place; each then has a copy of its own.
    tiles: {name: other constants of `tuned`}, whose passes `tuned_passes` are compiled with them.
    """

    arguments: tuple
    contenders: dict[str, Passes]
    base: str
    rates: Callable[[str, float, Any], dict] = lambda *_: {}
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    unlike: tuple[str, ...] = ()
    lighter: tuple[str, ...] = ()
    updates: bool = False
    tiles: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    tuned: ModuleType | None = None
    tuned_passes: Passes = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds of warm-up, of each contender's time and of a turn; calls to one wait, several where one is
    shorter than the host's way there and back."""

    warmup: float
    timed: float
    turn: float
    calls: int


def on(gpu: tuple[str, ...], cpu: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the implementations of JAX's default backend."""
    return gpu if jax.default_backend() == "gpu" else cpu


@jax.jit
def apart(found: Any, expected: Any) -> jax.Array:
    """Returns the largest ‖found - expected‖ / ‖expected‖ of two trees' leaves."""

    def one(found, expected):
        found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
        return jnp.linalg.norm((found - expected).ravel()) / jnp.linalg.norm(expected.ravel())

    return jnp.stack(
        [one(*pair) for pair in zip(*map(jax.tree.leaves, (found, expected)), strict=True)]
    ).max()


def programs(work: Workload, tiles: bool) -> tuple[dict[tuple[str, str], Any], dict[str, str]]:
    """Returns {(contender, pass): compiled} as in a step, and why others cannot run. tiles: whether those
    contend too."""
    lowered, failed = {}, {}

    def lower(name: str, passes: Passes) -> None:
        try:
            for what, function in passes.items():
                jitted = jax.jit(function, donate_argnums=(0,) if work.updates else ())
                lowered[name, what] = jitted.lower(*work.arguments)
        except Exception as error:  # one that refuses must not cost the others' results
            failed[name] = repr(error)[:500]

    for name, passes in work.contenders.items():
        lower(name, passes)
    for name, constants in work.tiles.items() if tiles else ():
        with contextlib.ExitStack() as stack:
            for key, value in constants.items():
                stack.enter_context(unittest.mock.patch.object(work.tuned, key, value))
            jax.clear_caches()
            lower(name, work.tuned_passes)
    options = xla.compiler_options(jax.default_backend(), devices=1, deterministic=False)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        pending = {key: threads.submit(each.compile, options) for key, each in lowered.items()}
    failed |= {key[0]: repr(each.exception())[:500] for key, each in pending.items() if each.exception()}
    return {key: each.result() for key, each in pending.items() if key[0] not in failed}, failed


def updating(program: Any, state: Any) -> Callable:
    """Returns the program as a function of all arguments, whose first it keeps and updates in place."""
    state = jax.tree.map(jnp.copy, state)

    def run(_, *rest):
        nonlocal state
        state = program(state, *rest)
        return state

    return run


def measured(work: Workload, pace: Pace, options: argparse.Namespace) -> tuple[dict[str, dict], dict]:
    """Returns what a record says of each contender, and of the clocks. options: of `turns.parser`, tiles."""
    compiled, failed = programs(work, options.tiles)
    if not compiled:
        raise RuntimeError(f"none of the contenders can run: {failed}")
    runs = dict(compiled)
    if work.updates:
        runs = {key: updating(run, work.arguments[0]) for key, run in compiled.items()}
    last = {name: (name, what) for name, what in runs}
    expected = runs[last[work.base]](*work.arguments) if work.base in last else None
    differ = {name: None for name in last if name not in work.unlike}
    for name in differ if expected is not None else ():  # one after another: results may be large
        found = expected if name == work.base else runs[last[name]](*work.arguments)
        differ[name] = float(f"{apart(found, expected):.2g}")
    del expected
    compare = functools.partial(turns.compare, turn_seconds=pace.turn, calls=pace.calls)
    heavy, light = {}, {}
    for key, run in runs.items():
        (light if key[0] in work.lighter else heavy)[key] = run
    done = [compare(group, work.arguments, options) for group in (heavy, light) if group]
    times, clocks = {key: each for some, _ in done for key, each in some.items()}, done[0][1]
    told = {name: {f"apart_from_{work.base}": differ[name]} if name in differ else {} for name in last}
    for (name, what), program in compiled.items():
        seconds, memory = times[name, what], program.memory_analysis()
        line = turns.told(seconds, memory, pace.calls)
        line |= work.rates(what, statistics.median(seconds), memory)
        told[name] |= {what: line} if len(work.contenders[work.base]) > 1 else line
    return told | {name: {"failed": reason} for name, reason in failed.items()}, clocks
