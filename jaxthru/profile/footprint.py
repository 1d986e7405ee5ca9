"""What fills a device's memory at a step's peak: categories, the largest buffers, the curve of a step."""

import re
from pathlib import Path

from jaxthru.profile import memory
from jaxthru.profile.attribution import Attribution
from jaxthru.profile.ledger import Buffer, Memory
from jaxthru.runtime import aot

BUFFERS = 20
POINTS = 400


def footprint(
    folder: Path, attribution: Attribution, peak_bytes: int | None, host_pinned_bytes: int
) -> Memory | None:
    """Returns the memory of the program that needs the most, None without a dump.

    folder: with XLA's buffer assignments. peak_bytes: the runtime's own, which has all that the step's dump
    does not: other programs, libraries, and gaps. Where it is known, the category "fragmentation" is what
    the others lack of it.
    """
    programs = {name: dump for name, dump in _dumps(folder).items() if len(dump) == len(aot.DUMPED)}
    if not programs:
        return None
    parts = {name: memory.breakdown(dump) for name, dump in programs.items()}
    name = max(parts, key=lambda name: parts[name].peak_device)
    categories = dict(parts[name].device)
    if peak_bytes is not None:
        # Of a step of several programs the dump knows what one needs, and not what lives beside it.
        rest = "fragmentation" if len(programs) == 1 else "beside"
        categories[rest] = max(peak_bytes - parts[name].peak_device, 0)
    allocations, values = memory.parse(programs[name])
    return Memory(
        peak_bytes=peak_bytes,
        categories=categories,
        buffers=_largest(allocations, memory.Purpose(values, "other"), name, attribution),
        curve=_curve(allocations),
        host_pinned_bytes=host_pinned_bytes,
    )


def _dumps(folder: Path) -> dict[str, dict[str, str]]:
    """Returns each module's texts by kind, as `aot.read_dump` does of the last."""
    found: dict[str, dict[str, str]] = {}
    for kind, pattern in aot.DUMPED.items():
        for path in sorted(folder.glob(pattern)):
            module = re.match(r"module_\d+\.([^.]+)\.", path.name)
            if module:
                found.setdefault(module[1], {})[kind] = path.read_text()
    return found


def _largest(
    allocations: list[memory.Allocation], purpose: memory.Purpose, module: str, attribution: Attribution
) -> tuple[Buffer, ...]:
    """Returns the largest arrays on the device at the peak."""
    moment = max(memory.curve(allocations), key=lambda point: point[1], default=(0, 0))[0]
    rows = []
    for found in allocations:
        if found.space == memory.HOST or not found.values or found.kind in ("constant", "local"):
            continue
        if found.kind == "temporary":
            rows += [(value.size, purpose(value), value) for value in memory.alive(found.values, moment)]
        else:
            argument = found.kind == "argument"
            value = found.argument if argument else max(found.values, key=lambda value: value.size)
            rows.append((found.size, memory.by_path(value.made) if argument else purpose(value), value))
    rows.sort(key=lambda row: -row[0])
    return tuple(
        Buffer(size, value.made, _source(attribution, module, value.instruction), category)
        for size, category, value in rows[:BUFFERS]
    )


def _source(attribution: Attribution, module: str, instruction: str) -> str | None:
    work = attribution.find(module, instruction)
    return work.source if work else None


def _curve(allocations: list[memory.Allocation]) -> tuple[tuple[float, float], ...]:
    """Returns (position from 0 to 1, bytes): what lives throughout, and temporaries. Of many points, the
    highest of each stretch is kept."""
    constant = sum(
        found.size for found in allocations if found.kind != "temporary" and found.space != memory.HOST
    )
    points = memory.curve(allocations)
    last = max((at for at, _ in points), default=0) or 1
    highest: dict[int, tuple[int, int]] = {}
    for at, size in points:
        stretch = at * POINTS // (last + 1)
        if stretch not in highest or size > highest[stretch][1]:
            highest[stretch] = at, size
    return tuple((at / last, float(constant + size)) for at, size in highest.values())
