"""Triton kernels, compiled once for all starts: jax-triton keeps what it compiles in memory alone.

A start of Llama-3.2-1B whose programs all came from JAX's cache took 3 s of its 13 for seven kernels, which
the step, an evaluation and the check of attention had each waited for, on threads (an H200's host).
"""

import contextlib
import functools
import hashlib
import importlib
import json
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

PLATFORM = "cuda"
"""The one whose kernels are kept. AMD's are files of jax-triton's own, gone with the process."""

_being_compiled: dict[str, threading.Lock] = {}


@functools.cache
def keep_compiled() -> None:
    """Has jax-triton keep what it compiles for NVIDIA's GPUs beside the programs that JAX keeps.

    That is in `jax_compilation_cache_dir`, on a disk; nothing is kept where JAX keeps nothing, and what lies
    there is run, as JAX's programs are.
    """
    library = importlib.import_module("jax_triton.triton_lib")
    library.compile_ttir_inplace = functools.partial(kept, library.compile_ttir_inplace, library)


def kept(compile_ttir: Callable, library: Any, ttir: Any, backend: Any, options: Any, *target: Any) -> Any:
    """Returns a kernel as compiled by `compile_ttir`, now or by an earlier start.

    library: jax-triton's, for the type of its results. ttir: the kernel in Triton's IR, which compiling
    changes. backend, options: Triton's. target: the compute capability and the platform.
    """
    folder = _folder()
    if folder is None or target[-1] != PLATFORM or library._JAX_TRITON_DUMP_DIR:
        return compile_ttir(ttir, backend, options, *target)
    key = _key(ttir, backend, options, target)
    path, alone = folder / f"{key}.json", _being_compiled.setdefault(key, threading.Lock())
    with alone:  # the step and what is compiled beside it have kernels in common
        with contextlib.suppress(OSError, ValueError):  # none, or a damaged one: it is compiled again
            return library.CompilationResult(**json.loads(path.read_text()), **NOT_KEPT)
        made = compile_ttir(ttir, backend, options, *target)
        with contextlib.suppress(OSError):  # a full disk costs the next start its time, and this one nothing
            _write(path, json.dumps({name: getattr(made, name) for name in RESULT}))
    return made


RESULT = ("binary", "name", "shared_mem_bytes")
"""Of a result what is kept: PTX, the kernel's name there, and bytes."""
NOT_KEPT = {"ttgir": None, "llir": None}
"""The rest, which jax-triton leaves out too where nothing is to be dumped."""


def _folder() -> Path | None:
    """Returns where kernels are kept; None where JAX keeps no programs, or none on a disk."""
    given = jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None
    return Path(given) / "triton" if given and "://" not in given else None


def _key(ttir: Any, backend: Any, options: Any, target: tuple) -> str:
    """Returns what names a kernel: all that can change what it compiles to."""
    triton = importlib.import_module("triton")
    settings = importlib.import_module("triton._C.libtriton").get_cache_invalidating_env_vars()
    of = triton.__version__, backend.hash(), options.hash(), *target, sorted(settings.items()), ttir
    return hashlib.sha256("\n".join(map(str, of)).encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    """Writes a file that is whole or not there at all, whatever other processes write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix(f".{uuid.uuid4().hex}")
    try:
        begun.write_text(text)
        begun.replace(path)
    except OSError:
        begun.unlink(missing_ok=True)
        raise
