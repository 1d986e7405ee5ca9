"""Collects a profile: traces of a few steps, host activity, HLO, buffers and clocks.

<step>/attribution/<process>/  on a GPU, trace of steps without CUDA graphs, which hide names
<step>/production/<process>/   trace of as many steps as they are trained, and the clocks meanwhile
<step>/step.hlo.txt            optimised HLO of what runs
<step>/attribution.hlo.txt     the same of the pass without CUDA graphs
<step>/dump/                   XLA's buffer assignment
<step>/collected.json          what was taken
"""

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import jax

from jaxthru.profile.collect import clocks
from jaxthru.profile.read.facts import Facts
from jaxthru.runtime import aot, distributed, hardware, nvml, xla
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import require

CUPTI = "libcupti.so.13", "libcupti.so.12"
FLUSH_MS = 600_000
"""How often CUPTI collects what ran before the trace ends. By itself it did so 12 times a second, and waited
with the driver locked for copies under way: on an H200 a quarter of an offloaded step."""

COMPILING = 120.0
"""Seconds that a run waits for its step to be compiled again, for the names of its kernels."""

NOTHING = contextlib.nullcontext()
log = logging.getLogger("jaxthru")


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """at: the first step to profile; 0 is off. steps: steps to profile, on a GPU after as many others
    that give kernels their names."""

    at: int = 0
    steps: int = 3

    def __post_init__(self):
        require(self.at >= 0, f"profile.at = {self.at}: must be at least 0")
        require(self.steps >= 1, f"profile.steps = {self.steps}: must be at least 1")


@dataclasses.dataclass
class Pass:
    """One trace. Beside its steps it takes the one that follows, with which the last of them ends."""

    name: str
    first_step: int
    steps: int
    program: Callable

    @property
    def last_step(self) -> int:
        return self.first_step + self.steps


def _passes(config: ProfileConfig, program: Callable, start: int, last: int) -> list[Pass]:
    """Returns what is traced of a run that goes from one step to another.

    The pass that samples the clock comes last: in later traces CUPTI dates most kernels wrong, and XLA leaves
    those out (JAX 0.11.2, CUDA 13, driver 580).
    """
    production = Pass("production", config.at, config.steps, program)
    if jax.default_backend() != "gpu":
        return [production]
    second = dataclasses.replace(production, first_step=production.last_step + 1)
    if (needed := second.last_step - 1) <= last:
        return [dataclasses.replace(production, name="attribution"), second]
    if start < config.at <= last and distributed.is_primary():
        log.warning("profile.at = %d: kernels are not named, as that takes until step %d", config.at, needed)
    return [production]


@dataclasses.dataclass(eq=False)
class Profile:
    """Profiles the steps of a run as it comes by them. Without passes it does nothing.

    program: the compiled step, or one that is traced in its place. recompile: compiles it with these options
    of XLA. passes: in order. publish: makes a report of what a folder holds. say: shows what the run waits
    for.
    """

    folder: Path
    program: Callable
    recompile: Callable[[dict], Callable]
    passes: list[Pass]
    publish: Callable[[Path], None]
    model: Facts
    say: Callable[[str], None]
    _running: Pass | None = None
    _open: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    _samples: clocks.Samples | None = None
    _latest: int = 0
    _pinned: int | None = None
    _peak: int | None = None

    def __post_init__(self):
        self.compiled, self._coming = self.program, list(self.passes)

    def begins(self, step: int) -> bool:
        """Says whether a trace begins with this step, the next to be dispatched. No other may then be under
        way on the device."""
        self._latest = step
        return bool(self._coming) and step == self._coming[0].first_step

    def begin(self) -> None:
        """Begins the trace, before its first step is dispatched; one that still runs is complete."""
        self.close()
        if self._pinned is None:
            # Before anything is compiled, and timed on the device, for the profile's sake.
            self._pinned, self._peak = pinned_bytes(), hardware.peak_bytes() if self._latest > 1 else None
            self._compile()
        if not self.begins(self._latest):  # there is no program whose kernels could be named
            return
        self._running = self._coming.pop(0)
        self.program = self._running.program
        folder = self.folder / self._running.name / str(jax.process_index())
        folder.mkdir(parents=True, exist_ok=True)
        own = nvml.names(device.local_hardware_id for device in jax.local_devices())
        self._samples = self._open.enter_context(clocks.sampled(own))
        start_trace(folder, clock=self._running is self.passes[-1])

    def _compile(self) -> None:
        """Compiles the step again, for the names of its kernels and for XLA's account of its buffers: within
        COMPILING seconds, or the ledger has to do without them."""
        self.say("compiling the profiled step")
        self.folder.mkdir(parents=True, exist_ok=True)
        extra = xla.without_graphs(jax.default_backend())
        if distributed.is_primary():
            extra |= aot.dump_options(self.folder / "dump")
        # With what the cache knows of autotuning, so that kernels are the same; but a program that is
        # found compiled writes no dump.
        until = time.monotonic() + COMPILING
        again = self._compiled(extra, until)
        if again and not distributed.from_first(lambda: bool(aot.read_dump(self.folder / "dump"))):
            again_by = {"xla_dump_hlo_as_proto": False}  # JAX keeps what it has compiled by its options, too
            again = self._compiled(extra | again_by, until, xla.nothing_kept())
        if again is None:
            del self._coming[:-1], self.passes[:-1]
            if distributed.is_primary():
                log.warning("not compiled again after %.0f s: kernels are not named", COMPILING)
        for one in self.passes[:-1]:
            one.program = again
        if distributed.is_primary():
            for path in (self.folder / "dump").glob("*"):
                if path.suffix != ".txt":  # code, which nothing here reads
                    path.unlink()
            (self.folder / "step.hlo.txt").write_text(self.compiled.as_text())
            if len(self.passes) > 1:
                (self.folder / "attribution.hlo.txt").write_text(again.as_text())

    def _compiled(self, options: dict, until: float, within=NOTHING) -> Callable | None:
        """Returns the step compiled with these options, None if any process has not done so by then."""
        made: Future = Future()

        def compile_() -> None:
            try:
                with within:
                    made.set_result(self.recompile(options))
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=compile_, daemon=True).start()  # which keeps no process that has ended
        late = wait([made], max(0.0, until - time.monotonic())).not_done
        return None if any(distributed.gather_text("late" if late else "")) else made.result()

    def span(self, name: str, step: int | None = None) -> contextlib.AbstractContextManager:
        """Marks what the host does, see `xplane.SPANS`."""
        if self._running is None:
            return contextlib.nullcontext()
        return jax.profiler.TraceAnnotation(name, **({} if step is None else {"step_num": step}))

    def after(self, step: int) -> None:
        """Ends the trace once the last step wanted has finished."""
        if self._running and step >= self._running.last_step:
            self.close()

    def close(self) -> None:
        """Ends a trace that is still running; it is whole if the run ends with its last step."""
        if self._running is None:
            return
        self.say("collecting the profile")
        ended, self.program, self._running = self._running, self.compiled, None
        # Of a run that ends early the steps count that were finished.
        ended.steps = min(ended.steps, self._latest - ended.first_step + 1)
        try:
            with self._open:
                jax.profiler.stop_trace()
            self._samples.write(self.folder / ended.name / str(jax.process_index()) / "clocks.json")
            if distributed.is_primary():
                text = json.dumps(self.collected(), indent=1) + "\n"
                write_atomically(self.folder / "collected.json", text)
        except Exception as error:  # a full disk must not cost the run a step, nor its last state
            log.warning("%s: the trace is not whole: %s: %s", self.folder, type(error).__name__, error)

    def finish(self) -> None:
        """Ends profiling; writes ledger and report once the run's record is written, and shows them."""
        if not self.passes:
            return
        self.close()
        distributed.gather_text("")  # every process has written its trace
        if not distributed.is_primary() or self.passes[0] in self._coming:
            return
        if self.passes[-1] in self._coming:
            log.warning("%s: no ledger: the run ended before its steps were traced", self.folder)
            return
        self.say("reading the profile")
        try:
            self.publish(self.folder)
        except Exception as error:  # a profile that cannot be read, or a fault of ours, must not cost the run
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            log.warning("%s: no ledger: %s%s", self.folder, kind, error)

    def collected(self) -> dict[str, Any]:
        """Returns what the traces are of, for `profile.build`."""
        kind = jax.devices()[0].device_kind
        taken = [one for one in self.passes if one not in self._coming]
        machine = {"platform": jax.default_backend(), "device_kind": kind, "devices": jax.device_count()}
        return machine | {
            "processes": jax.process_count(),
            "peak_flops": hardware.data_sheet_flops(kind),
            "peak_bytes": self._peak or hardware.peak_bytes(),
            "host_pinned_bytes": self._pinned,
            "passes": {one.name: {"first_step": one.first_step, "steps": one.steps} for one in taken},
            "model": dataclasses.asdict(self.model),
        }


def options(clock: bool) -> jax.profiler.ProfileOptions:
    """Returns what the profiler records: no Python calls, which would slow the host. clock: a GPU's too."""
    chosen = jax.profiler.ProfileOptions()
    chosen.host_tracer_level, chosen.python_tracer_level = 1, 0
    if clock and jax.default_backend() == "gpu":
        chosen.advanced_configuration = clocks.sampling(jax.local_device_count())
    return chosen


def start_trace(folder: Path, clock: bool) -> None:
    """Starts a trace. clock: it samples a GPU's clock, too."""
    jax.profiler.start_trace(str(folder), profiler_options=options(clock))
    for name in CUPTI:
        with contextlib.suppress(OSError):  # not what this process has loaded
            library = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            if code := library.cuptiActivityFlushPeriod(ctypes.c_uint32(FLUSH_MS)):
                log.warning("CUPTI collects while the trace runs (%d): copies may take longer", code)


def pinned_bytes() -> int:
    """Returns the bytes of this process's arrays in pinned host memory."""
    arrays = (array for array in jax.live_arrays() if array.sharding.memory_kind == "pinned_host")
    return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)


def open_profile(
    config: ProfileConfig,
    directory: Path,
    program: Callable,
    recompile: Callable[[dict], Callable],
    start: int,
    last: int,
    publish: Callable[[Path], None],
    model: Facts,
    say: Callable[[str], None] = log.info,
) -> Profile:
    """Returns what the loop calls between its steps; see `Profile`.

    start: the step that the run goes on from. last: its last. publish: makes a report of what a folder holds.
    model: what the ledger goes by. say: shows what the run waits for.
    """
    folder, reached = directory / str(config.at), start < config.at <= last
    if config.at and not reached and not (folder / "collected.json").is_file() and distributed.is_primary():
        steps = config.at, start + 1, last
        log.warning("profile.at = %d: nothing is profiled, as this run takes steps %d to %d", *steps)
    passes = _passes(config, program, start, last) if config.at else []
    return Profile(folder, program, recompile, passes, publish, model, say)
