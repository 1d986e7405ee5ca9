"""The C library's allocator: a run on CPUs alone keeps the memory that a step frees for the next one."""

import ctypes
import os
import platform
from importlib import metadata, util

import jax

TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8  # glibc's malloc.h
NEVER = -1


def keep_freed() -> bool:
    """Has glibc keep what this process frees, if its devices are CPUs alone; returns whether it does.

    XLA allocates a step's temporaries anew in each step. glibc maps and unmaps what is as large as those, and
    the system clears each page of it when it is first touched: nearly a third of the quickstart's step. In
    return the process holds two and a half times the memory.

    Whatever the environment sets of glibc's allocator (GLIBC_TUNABLES, MALLOC_*) stays as it is. Call it
    before JAX looks for devices: XLA's threads would have areas ("arenas") of their own already, which hold
    at most 64 MiB, and what is larger is mapped whatever MMAP_MAX says.
    """
    ours = not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if not (ours and on_cpus_alone() and platform.libc_ver()[0] == "glibc"):
        return False
    options = {ARENA_MAX: 1, MMAP_MAX: 0, TRIM_THRESHOLD: NEVER}
    set_option = ctypes.CDLL(None).mallopt
    return all([set_option(option, value) for option, value in options.items()])


def on_cpus_alone() -> bool:
    """Says whether JAX will find CPUs alone, as far as that can be said before it looks: they were asked for,
    or nothing is installed by which it would find others."""
    if asked := jax.config.jax_platforms:
        return asked == "cpu"
    found = util.find_spec("jax_plugins") or util.find_spec("libtpu")
    return not (found or metadata.entry_points(group="jax_plugins"))
