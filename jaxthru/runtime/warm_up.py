"""What every start on a GPU waits for and nothing else of it depends on, begun on threads of their own.

XLA takes a device's memory whole, at its first array: 2.3 s for an H200's 134 GiB. Triton and Grain take 0.5
and 0.3 s to import there, most of it in calls of the file system, which let other threads go on. (Sampled.)
"""

import contextlib
import importlib
import threading

import jax
import numpy as np

IMPORTED = "jax_triton", "grain"
"""What kernels and the loader import when they are first used."""


def warm_up() -> None:
    """Begins both; does nothing off a GPU. Call it once XLA is configured. What goes wrong is left to whoever
    needs the memory or the module, and says it."""
    if (devices := jax.local_devices())[0].platform == "gpu":
        for work in (lambda: _take_memory(devices), _import):
            threading.Thread(target=work, name="jaxthru-warm-up", daemon=True).start()


def _take_memory(devices: list[jax.Device]) -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.block_until_ready([jax.device_put(np.zeros((), np.uint8), device) for device in devices])


def _import() -> None:
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
