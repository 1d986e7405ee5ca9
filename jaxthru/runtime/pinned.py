"""The host memory that XLA pins for a GPU: how much it may be, and that it is there before the first step."""

import functools
import logging
import math
import os
import time

import jax
import jax.numpy as jnp

from jaxthru.runtime.errors import require

LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The size in GiB that XLA's pool of pinned host memory may grow to; read when a GPU's backend loads."""

DEFAULT = 64  # GiB, where that is not set

COST = 1.05
"""Bytes of host memory that a pinned byte takes: 1.047 with NVIDIA's driver 580 on an H200's host, from 20 to
112 GiB."""

log = logging.getLogger("jaxthru")


def spared(needed: int) -> int:
    """Returns the size of a pool for so many bytes of arrays: 5 % and 4 GiB more, for gaps between arrays and
    for copies on their way to disk."""
    return round(1.05 * needed) + (4 << 30)


def limit(needed: int, allowed: int) -> None:
    """Lets XLA pin as much host memory as a plan needs. Call it before the first device is touched.

    needed, allowed: bytes that the plan keeps in pinned memory, 0 if that is not known, and that may be
    pinned (offload.host_gib, or the host's limit less what a process takes). The pool may grow to what is
    needed and `spared`: it grows by regions that double, so that with more room 24.4 GiB of arrays took 37. A
    limit in the environment stays as it is, unless an earlier call set it and no backend has loaded since.
    Raises InputError, naming the setting, where either is too low, or where a GPU's backend has already
    loaded with a lower one.
    """
    from jax._src import xla_bridge

    require(
        needed <= allowed,
        f"the plan keeps {needed / 2**30:.1f} GiB on the host, which may pin {allowed / 2**30:.1f} "
        "(offload.host_gib); give it more, or choose offload.prefetch = 0 or a smaller optim.state or "
        "offload.fraction",
    )
    given, loaded = os.environ.get(LIMIT), xla_bridge.backends_are_initialized()
    if not loaded and _ours(LIMIT):
        most = min(spared(needed), allowed) if needed else allowed
        _set_here[LIMIT] = str(math.ceil(most / 2**30))
        os.environ.update(_set_here)
        return
    advice = f"set it to at least {math.ceil(needed / 2**30)}, or leave it to offload.host_gib"
    if given is None:
        why = "XLA's default, and too late to change: a device is in use"
    elif _ours(LIMIT):
        why, advice = "set by an earlier run in this process", "run it in a process of its own"
    else:
        why = "as it is set"
    require(
        needed <= _present() << 30,
        f"{LIMIT} = {_present()} ({why}): the plan pins {needed / 2**30:.1f} GiB of host memory; {advice}",
    )


def reserve(size: int) -> None:
    """Has XLA's pool of pinned host memory hold `size` bytes from now on, or its limit, in `regions`.

    By itself it grows when an array finds no gap that is large enough, which may be in the twentieth step:
    the system then pins 8 GiB in 5 s, or 32 in 18 (an H200's host), while the device waits.
    XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE would take all of it twice: XLA has two such pools, of which the
    other only stages copies. What a process has reserved stays in its pool, and a later run there that needs
    more has it grow by itself: gaps between what others keep may serve for any request for a region.
    """
    if not (taken := missing(size)):
        there, wanted = sum(_reserved), min(-(-size >> 30), _present())
        if wanted > there:
            said = "an earlier run of this process pinned %d GiB of host memory, and %d are needed: %s"
            log.warning(said, there, wanted, "steps may wait for it; use a process of its own")
        return
    host = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
    started, held = time.monotonic(), []  # until the last is there: a gap in one would serve for the next
    log.info("pinning %d GiB of host memory ...", sum(taken))
    try:
        for region in taken:
            # A little less: of the pool a little is in use by now, and its limit may size the last region.
            shape = (region * 4 - 1, 1 << 28)
            make = jax.jit(functools.partial(jax.lax.empty, shape, jnp.uint8), out_shardings=host)
            held.append(make().block_until_ready())
            _reserved.append(region)
    except jax.errors.JaxRuntimeError as error:
        why = str(error).partition("\n")[0]
        log.warning("could not pin %d GiB of host memory at once; steps may wait for it: %s", sum(taken), why)
    else:
        log.info("pinned %d GiB of host memory in %.0f s", sum(taken), time.monotonic() - started)


def missing(size: int) -> list[int]:
    """Returns the `regions` that `reserve` of so many bytes would take: none, if this process has some."""
    return [] if _reserved else regions(size, _present())


_reserved: list[int] = []  # GiB of regions


SMALLEST = 4  # GiB of a region: arrays end where it ends, so that several small ones would be of no use


def regions(size: int, limit: int) -> list[int]:
    """Returns the GiB of at most four regions for `size` bytes, in the order in which to ask for them.

    limit: of the pool, in GiB. XLA's pool answers a request for which it has no gap by a region of the next
    power of two, never smaller than the one before, or by all that the limit leaves: 72 GiB at once become
    128, and the system kills a process that pins more than there is. So they are powers of two, the smallest
    first, that add up to at most an eighth and 4 GiB more than `size`; or one region, all that the limit
    allows, where that is less than 4 GiB more.
    """
    needed = -(-size >> 30)
    step = max(SMALLEST, 1 << max(needed.bit_length() - 4, 0))
    total = -(-needed // step) * step
    if total > limit - SMALLEST:
        return [limit]
    return [1 << bit for bit in range(total.bit_length()) if total >> bit & 1]


_set_here: dict[str, str] = {}  # variables that `limit` set, with their values


def _ours(name: str) -> bool:
    """Says whether a variable of the environment is not set, or as `limit` set it."""
    return os.environ.get(name) in (None, _set_here.get(name))


def _present() -> int:
    """Returns the limit in GiB that a backend has, or would have."""
    text = os.environ.get(LIMIT, str(DEFAULT))
    require(text.isdigit(), f"{LIMIT} = {text!r}: must be a whole number of GiB")
    return int(text)
