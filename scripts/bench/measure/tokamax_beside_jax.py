"""tokamax 0.0.12 beside JAX 0.11.2, which is newer than it knows."""

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax

RENAMED = {"out_shape": "out_type", "scratch_shapes": "scratch_types"}
"""Arguments of Pallas' kernels for Mosaic GPU: {as tokamax 0.0.12 has them: in JAX 0.11.2}."""

LOCATIONS = {"name": "NameLoc", "callsite": "CallSiteLoc", "fused": "FusedLoc", "file": "FileLineColLoc"}
"""Kinds of MLIR's locations: {as tokamax 0.0.12 asks for them, by `is_a_...`: the class in JAX 0.11.2}."""


@functools.cache
def import_tokamax() -> tuple[Any, str | None]:
    """Returns tokamax, or the reason why it cannot be imported."""
    if importlib.util.find_spec("xprof") is None:
        # Its own benchmarks want that, nothing here does.
        for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["xprof.cli.tools"].get_kernel_stats_tool = None
    try:
        tokamax = importlib.import_module("tokamax")
        # Or it would take this program's arguments for flags of its own.
        importlib.import_module("absl.flags").FLAGS.mark_as_parsed()
        pallas = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
        pallas.kernel = by_old_names(pallas.kernel)
        tell_locations(importlib.import_module("jaxlib.mlir.ir"))
        # JAX 0.11 has it no more, and its tuner asks it before it times anything.
        jax.core.is_concrete = lambda array: not isinstance(array, jax.core.Tracer)
        # Kernels alone are tuned; of 128 groups it would read 3,600 small operations too, at 10 ms each.
        hlo = importlib.import_module("tokamax._src.hlo_utils")
        hlo.get_opspecs = functools.partial(hlo.get_opspecs, include_xla_kernels=False)
        # CUPTI, its choice, would stay attached to this process and slow down what is timed after it.
        importlib.import_module("tokamax._src.benchmarking")._DEFAULT_TIMING_METHOD["gpu"] = "wallclock"
        return tokamax, None
    except Exception as error:  # whatever it raises beside a JAX that it does not know
        return None, reason(error)


def reason(error: BaseException) -> str:
    """Returns an error's type and the last line of what it says; of a group, of the first in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1][-300:]}"


def tell_locations(ir: ModuleType) -> None:
    """Has MLIR's locations say of what kind they are as they did before each kind was a class."""
    for kind, name in LOCATIONS.items():
        if not hasattr(ir.Location, f"is_a_{kind}"):
            of = getattr(ir, name)
            setattr(ir.Location, f"is_a_{kind}", lambda self, of=of: isinstance(self, of))


def by_old_names(kernel: Callable) -> Callable:
    """Returns the function, which takes arguments by what they were called before, too."""

    @functools.wraps(kernel)
    def called(*arguments, **named):
        return kernel(*arguments, **{RENAMED.get(name, name): value for name, value in named.items()})

    return called
