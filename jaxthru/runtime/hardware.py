"""Devices: their peak rates by data sheet, the roof of the roofline, and the memory in use."""

import hashlib
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxthru.runtime.errors import InputError

PEAK_BF16_FLOPS = {
    "h200 nvl": 835e12,
    "h200": 989.5e12,
    "h100 pcie": 756e12,
    "h100 nvl": 835e12,
    "h100": 989.5e12,
    "gh200": 989.5e12,
    "gb200": 2500e12,
    "b200": 2250e12,
    "a100": 312e12,
    "l40s": 362e12,
    "mi300x": 1307.4e12,
    "mi325x": 1307.4e12,
    "tpu v4": 275e12,
    "tpu v5 lite": 197e12,
    "tpu v5e": 197e12,
    "tpu v5p": 459e12,
    "tpu v5": 459e12,
    "tpu v6 lite": 918e12,
    "tpu v6e": 918e12,
    "tpu7x": 2307e12 / 2,
}
"""Whole words of a device kind's name, lower case -> dense bf16 FLOP/s of one device, of which a TPU7x chip
has two; the first that fits counts."""


BANDWIDTH = {
    "h200": 4.8e12,
    "h100 pcie": 2.0e12,
    "h100 nvl": 3.9e12,
    "h100": 3.35e12,
    "gh200": 4.0e12,
    "gb200": 8e12,
    "b200": 8e12,
    "l40s": 864e9,
}
"""The same of bytes/s of a device's own memory, for those that multiply float8."""


def data_sheet_flops(kind: str) -> float | None:
    """Returns the dense bf16 FLOP/s of one device of this kind, None where the data sheet is not known."""
    return _by_kind(PEAK_BF16_FLOPS, kind)


def data_sheet_bandwidth(kind: str) -> float | None:
    """Returns the bytes/s that a device of this kind reads its own memory with, None where not known."""
    return _by_kind(BANDWIDTH, kind)


def _by_kind(rates: dict[str, float], kind: str) -> float | None:
    named = (rate for words, rate in rates.items() if re.search(rf"\b{words}\b", kind.lower()))
    return next(named, None)


def peak_flops(devices: list[jax.Device]) -> float | None:
    """Returns the dense bf16 FLOP/s of all devices together, None where a data sheet is not known."""
    peaks = [data_sheet_flops(device.device_kind) for device in devices]
    return None if None in peaks else sum(peaks)


def devices() -> list[jax.Device]:
    """Returns all devices. Raises InputError, with the reason, where there is none that can be used."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # a bare assertion where a plugin finds no device
        asked = jax.config.jax_platforms
        why = (
            str(error).partition("\n")[0] or "none is here; leave it unset, or install jaxthru[gpu] or [tpu]"
        )
        raise InputError((f"JAX_PLATFORMS = {asked}: " if asked else "") + f"no device: {why}") from error


GRACE = re.compile(r"\b(gh200|gb200|gb300|gb10)\b")


def has_unified_memory(kind: str) -> bool:
    """Says whether devices of this kind read their host's memory as their own: beside NVIDIA's Grace."""
    return GRACE.search(kind.lower()) is not None


def peak_bytes() -> int | None:
    """Returns the most bytes in use at once on this process's fullest device, None where not counted."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if stat and "peak_bytes_in_use" in stat]
    return max(peaks, default=None)


CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
BOOT = Path("/proc/sys/kernel/random/boot_id")
GROUP_NAMESPACE = Path("/proc/self/ns/cgroup")


def host_limit_bytes() -> int:
    """Returns the bytes of host memory that this process may use: the least limit of its memory control group
    and of those around it (versions 1 and 2), or all that the machine has.

    Some machines show little memory and get more as it is used; there the control group's limit is the true
    one, though it lies above MemTotal. Where it lies little above that, the system has kept the rest.
    """
    total, limit = _memory_total(), min((limit for _, limit in _groups()), default=None)
    return total if limit is None or GROWN * limit < total < limit else limit


GROWN = 0.75
"""Share of a limit that a machine whose memory does not grow has at least."""


def host_free_bytes() -> int:
    """Returns the bytes of host memory that this process may still take: the least of what its control groups
    and the machine have left, with its swap space. What files occupy in memory is given up for it."""
    total = _memory_total()
    used = total - (_meminfo("MemAvailable") or total)
    left = [max(total, host_limit_bytes()) - used + (_meminfo("SwapFree") or 0)]
    for group, limit in _groups():
        usage = next((group / name for name in USAGES if (group / name).is_file()), None)
        if usage is not None:
            stats = (group / "memory.stat").read_text() if (group / "memory.stat").is_file() else ""
            whole = "total_" if "total_" in stats else ""  # version 1 has those of the group alone, too
            files = re.findall(rf"^(?:{whole}(?:in)?active_file|slab_reclaimable) (\d+)$", stats, re.M)
            left.append(limit - int(usage.read_text()) + sum(map(int, files)))
    return min(left)


USAGES = "memory.current", "memory.usage_in_bytes"


def _groups() -> Iterator[tuple[Path, int]]:
    """Yields the control groups that limit this process's memory, with the bytes of each."""
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.is_file() else []:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, name = CONTROL_GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = CONTROL_GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = root / group.lstrip("/")
        # In a container the path may be the host's, and the container's own group is then the root.
        for place in (own, *(parent for parent in own.parents if parent.is_relative_to(root))):
            text = (place / name).read_text().strip() if (place / name).is_file() else "max"
            if text != "max" and int(text) < UNLIMITED:
                yield place, int(text)


UNLIMITED = 1 << 60  # version 1 writes a number near 2**63 for no limit


def swap_bytes() -> int:
    """Returns the bytes of this machine's swap space, 0 where it has none or does not say."""
    return _meminfo("SwapTotal") or 0


def _memory_total() -> int:
    return _meminfo("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo(name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", MEMINFO.read_text(), re.M) if MEMINFO.is_file() else None
    return int(found[1]) << 10 if found else None


def memory_limit_identity() -> str:
    """Returns a text that is the same in two processes if one limit of host memory holds for both: machine,
    container and control group."""
    said = [path.read_text().strip() for path in (BOOT, OWN_GROUPS) if path.is_file()]
    namespace = str(GROUP_NAMESPACE.readlink()) if GROUP_NAMESPACE.is_symlink() else platform.node()
    return hashlib.sha256("\n".join([*said, namespace]).encode()).hexdigest()
