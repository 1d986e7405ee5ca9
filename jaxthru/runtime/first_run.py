"""The first run of a compiled program, alone on the devices.

XLA loads a program's cuDNN graphs while the program is run for the first time, and cuDNN then captures a CUDA
graph from the very stream that programs run in (CudnnSupport::DeserializeGraph, which calls cudnn-frontend's
Graph::warmup). XLA starts copies from other threads, each with an event recorded in that stream for another
to wait for. If one is recorded during the capture, the other stream becomes part of it, and the program fails
with "capturing stream has unjoined work". Nothing in XLA's options leaves the capture out (jaxlib 0.11.2).
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax

from jaxthru.runtime import xla

COPIES = threading.Lock()
"""Held by a first run. A thread beside the one that runs programs holds it while it starts copies."""


def wait_for_all() -> None:
    """Waits until all arrays are there. A buffer given to a running program cannot be waited for, but what
    that program makes can; and an array whose program failed says so to whoever reads it."""
    for array in jax.live_arrays():
        with contextlib.suppress(RuntimeError):
            array.block_until_ready()


class FirstAlone:
    """A compiled program of which the first run begins once all that was started before has ended, and ends
    before anything else is started. Later runs are dispatched as they come."""

    def __init__(self, program: Callable):
        self.program, self._run = program, self._first

    def __call__(self, *arguments: Any) -> Any:
        return self._run(*arguments)

    def _first(self, *arguments: Any) -> Any:
        with COPIES:
            # A copy has ended when what it makes is there; who started it need not be known. (Nobody starts
            # one to the host's own memory without waiting for it.)
            wait_for_all()
            results = jax.block_until_ready(self.program(*arguments))
        self._run = self.program
        return results

    def as_text(self) -> str:
        """Returns the compiled program's HLO."""
        return xla.text(self.program.runtime_executable())
