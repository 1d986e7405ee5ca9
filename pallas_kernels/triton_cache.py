"""Triton kernels, compiled once for all starts: jax-triton keeps what it compiles in memory alone.

A start of Llama-3.2-1B whose programs all came from JAX's cache took 3 s of its 13 for seven kernels, which
the step, an evaluation and the check of attention had each waited for, on threads (an H200's host).
"""

import contextlib
import functools
import hashlib
import importlib
import json
import logging
import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

PLATFORM = "cuda"
"""The one whose kernels are kept. AMD's are files of jax-triton's own, gone with the process."""
KEPT = ("binary", "name", "shared_mem_bytes")
"""Of a result what is kept: PTX, the kernel's name there, and bytes."""
NOT_KEPT = {"ttgir": None, "llir": None}
"""The rest, which jax-triton leaves out too where nothing is to be dumped."""

logger = logging.getLogger("jaxthru.kernels")
_hooking = threading.Lock()
_being_compiled: dict[str, threading.Lock] = {}


def keep_compiled() -> None:
    """Has jax-triton keep what it compiles for NVIDIA's GPUs beside the programs that JAX keeps.

    That is in `jax_compilation_cache_dir`, on a disk; nothing is kept where JAX keeps nothing, and what lies
    there is run, as JAX's programs are.
    """
    library = importlib.import_module("jax_triton.triton_lib")
    with _hooking:  # what is compiled beside a step loads other kernels at the same time
        if not isinstance(library.compile_ttir_inplace, functools.partial):
            library.compile_ttir_inplace = functools.partial(kept, library.compile_ttir_inplace, library)


def kept(compile_ttir: Callable, library: Any, ttir: Any, backend: Any, options: Any, *target: Any) -> Any:
    """Returns a kernel as compiled by `compile_ttir`, now or by an earlier start.

    library: jax-triton's, for the type of its results. ttir: the kernel in Triton's IR, which compiling
    changes. backend, options: Triton's. target: the compute capability and the platform.
    """
    folder = cache_folder()
    shown = options.debug or library._JAX_TRITON_DUMP_DIR or "TRITON_ALWAYS_COMPILE" in os.environ
    if folder is None or target[-1] != PLATFORM or shown:
        return compile_ttir(ttir, backend, options, *target)
    key = _key(ttir, backend, options, target)
    path, alone = folder / "triton" / f"{key}.json", _being_compiled.setdefault(key, threading.Lock())
    with alone:  # the step and what is compiled beside it have kernels in common
        if (found := _read(path)) is not None:
            return library.CompilationResult(**found, **NOT_KEPT)
        made = compile_ttir(ttir, backend, options, *target)
        _write(path, {name: getattr(made, name) for name in KEPT})
    return made


def cache_folder() -> Path | None:
    """Returns where JAX keeps what it compiles; None where it keeps nothing, or not on a disk."""
    given = jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None
    return Path(given) if given and "://" not in given else None


def _key(ttir: Any, backend: Any, options: Any, target: tuple) -> str:
    """Returns what names a kernel: all that can change what it compiles to."""
    versions = [importlib.import_module(name).__version__ for name in ("jax_triton", "triton")]
    settings = importlib.import_module("triton._C.libtriton").get_cache_invalidating_env_vars()
    of = *versions, backend.hash(), options.hash(), *target, sorted(settings.items()), ttir
    return _digest("\n".join(map(str, of)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    """Returns what is kept in a file; None of none, and of one that is not as it was written."""
    try:
        digest, _, text = path.read_text(errors="replace").partition("\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        return _warn(path.parent, error.strerror)
    return json.loads(text) if digest == _digest(text) else _warn(path.parent, "files were damaged")


def _write(path: Path, found: dict[str, Any]) -> None:
    """Writes a file that is whole or not there at all, whatever other processes write."""
    text = json.dumps(found)
    begun = path.with_suffix(f".{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        begun.write_text(f"{_digest(text)}\n{text}")
        begun.replace(path)
    except OSError as error:  # a full disk costs the next start its time, and this one nothing
        _warn(path.parent, error.strerror)
        with contextlib.suppress(OSError):
            begun.unlink(missing_ok=True)


@functools.cache
def _warn(folder: Path, why: str) -> None:
    """Says, once, why kernels of earlier starts are not all taken from a folder."""
    logger.warning("%s: kernels that Triton had compiled are compiled again: %s", folder, why)
