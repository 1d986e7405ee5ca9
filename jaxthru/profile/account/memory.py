"""What fills a device's memory at a step's peak: categories, the largest buffers, the curve of a step."""

import itertools
import re
from pathlib import Path

from jaxthru.models.scopes import PURPOSES
from jaxthru.profile.account.attribution import Attribution, layer_and_phase
from jaxthru.profile.account.ledger import Buffer, Memory
from jaxthru.profile.read import buffers
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
    parts = {name: buffers.breakdown(dump, PURPOSES) for name, dump in programs.items()}
    name = max(parts, key=lambda name: parts[name].peak_device)
    categories = dict(parts[name].device)
    if peak_bytes is not None:
        # Of a step of several programs the dump knows what one needs, and not what lives beside it.
        rest = "fragmentation" if len(programs) == 1 else "beside"
        categories[rest] = max(peak_bytes - parts[name].peak_device, 0)
    allocations, values = buffers.parse(programs[name])
    purpose = buffers.Purpose(values, PURPOSES, "other")
    there = [
        (size, category, value)
        for found, value, size, category in buffers.held(allocations, purpose)
        if value and found.space != buffers.HOST
    ]
    for size, category, value in there:
        layer = _layer(value, name, attribution) if category == "activations" else "other"
        if layer != "other":
            of = f"activations of {layer}"
            categories[of] = categories.get(of, 0) + size
            categories[category] -= size
    largest = []
    for size, category, value in sorted(there, key=lambda row: -row[0])[:BUFFERS]:
        work = attribution.find(name, value.instruction)
        largest.append(Buffer(size, value.made, work.source if work else None, category))
    return Memory(peak_bytes, categories, tuple(largest), _curve(allocations), host_pinned_bytes)


def _dumps(folder: Path) -> dict[str, dict[str, str]]:
    """Returns each module's texts by kind, as `aot.read_dump` does of the last."""
    found: dict[str, dict[str, str]] = {}
    for kind, pattern in aot.DUMPED.items():
        for path in sorted(folder.glob(pattern)):
            module = re.match(r"module_\d+\.([^.]+)\.", path.name)
            if module:
                found.setdefault(module[1], {})[kind] = path.read_text()
    return found


def _layer(value: buffers.Value, module: str, attribution: Attribution) -> str:
    """Returns the kind of layer that makes an array. What a scan keeps of all layers is made by its loop: it
    is of the layer of what each round writes into it."""
    layer, of = layer_and_phase(value.made, module, attribution.kinds)[0], attribution.modules.get(module)
    made, element = of and of.find(value.instruction), re.search(r"\{(\d+)\}$", value.name)
    if layer != "other" or not made or not element:
        return layer
    if made.opcode == "while":
        body = next((name for name in made.calls if f"body=%{name}," in f"{made.attributes},"), None)
    else:
        body = of.where[made.name] if made.opcode == "parameter" else None
    there = of.computations.get(body, {})
    results = next((found.operands for found in there.values() if found.root and found.opcode == "tuple"), ())
    written = there.get(results[int(element[1])]) if int(element[1]) < len(results) else None
    works = (attribution.find(module, name) for name in written.operands) if written else ()
    return next((work.layer for work in works if work and work.layer != "other"), "other")


def _curve(allocations: list[buffers.Allocation]) -> tuple[tuple[float, float], ...]:
    """Returns (position from 0 to 1, bytes): what lives throughout, and temporaries. Of many points, the
    highest of each stretch is kept."""
    here = [found for found in allocations if found.space != buffers.HOST]
    constant = sum(found.size for found in here if found.kind != "temporary")
    points = buffers.curve(allocations)
    last = max((at for at, _ in points), default=0) or 1
    stretches = itertools.groupby(points, key=lambda point: point[0] * POINTS // (last + 1))
    highest = (max(within, key=lambda point: point[1]) for _, within in stretches)
    return tuple((at / last, float(constant + size)) for at, size in highest)
