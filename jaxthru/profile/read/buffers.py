"""What a program's memory is made of: the one reader of XLA's buffer assignments.

XLA writes text (`xla_dump_to`): each allocation with the values that lie in it, each value with the
instruction that makes it and those that read it, and from which instruction to which it lives. Sizes and
places are exact. What a temporary is *for* XLA does not know: that is read off the name scopes of the step in
the instruction that makes it, and is as good as those names are after fusion.
"""

import dataclasses
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

from jaxthru.profile.read.hlo import within

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "loss", "staging", "other")
"""gradients: temporaries from the model or the loss that the optimizer, or a result, reads. activations: the
rest of the model's, with its copies of weights in the compute dtype. loss: the rest of the loss's. optimizer:
its state, and its temporaries. staging: copies between memories. other: batch, metrics, and gaps between
buffers."""

HOST = 5  # XLA's number of the memory that JAX calls pinned_host


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Bytes by category while a program needs the most device memory. `device` adds up to `peak_device`, all
    that is allocated for the program, and so does `host`. at: the instruction of that moment."""

    device: dict[str, int]
    host: dict[str, int]
    peak_device: int
    peak_host: int
    at: str


def by_path(name: str) -> str:
    """Returns the category of a step's argument, by its path in the state: "state['params']..."."""
    if "'params'" in name:
        return "parameters"
    return "optimizer" if "'opt_state'" in name else "other"


@dataclasses.dataclass
class Value:
    """One array. offset, size: in its allocation, bytes. made: op_name of the instruction that makes it."""

    name: str
    phi: bool = False
    allocation: int = -1
    offset: int = 0
    size: int = 0
    instruction: str = ""
    made: str = ""
    parameter: bool = False
    readers: tuple[str, ...] = ()
    first: int = 0
    last: int = 0


@dataclasses.dataclass
class Allocation:
    """A stretch of memory. size: bytes. kind: "argument", "temporary", "output", "constant" or "local"."""

    size: int
    space: int
    kind: str
    values: list[Value]

    @property
    def argument(self) -> Value:
        """The argument, of the values that lie where one does."""
        return next((value for value in self.values if value.parameter), self.values[0])


def breakdown(
    dump: Mapping[str, str],
    scopes: Mapping[str, str],
    argument: Callable[[str], str | None] = by_path,
    unnamed: str = "other",
    output: str | None = None,
) -> Breakdown:
    """Returns what a compiled program's memory is made of.

    dump: texts `buffer-assignment`, `values` and `live-range` of XLA. scopes: as for `Purpose`. argument: the
    op_name of an argument, which is its path, to its category; None is not counted. unnamed: the category of
    temporaries that no scope names. output: that of results that take over no argument's memory; None asks
    the scopes.
    """
    allocations, values = parse(dump)
    purpose = Purpose(values, scopes, unnamed)
    device, host = dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0)
    for found, _, size, category in held(allocations, purpose, argument, output):
        (host if found.space == HOST else device)[category] += size
    moment = fullest(allocations)
    at = next((value.made for value in values if value.first == moment and value.made), "")
    return Breakdown(device, host, sum(device.values()), sum(host.values()), at)


def held(
    allocations: list[Allocation],
    purpose: "Purpose",
    argument: Callable[[str], str | None] = by_path,
    output: str | None = None,
) -> Iterator[tuple[Allocation, Value | None, int, str]]:
    """Yields what is in memory when temporaries take the most: the allocation, the array, its bytes, and its
    category. Constants, and what of an allocation no temporary takes, have no array. argument, output: as of
    `breakdown`."""
    moment = fullest(allocations)
    for found in allocations:
        if found.kind == "argument":
            category = argument(found.argument.made)
            if category is not None:
                yield found, found.argument, found.size, category
        elif found.kind == "output":
            live = max(found.values, key=lambda value: value.size)
            yield found, live, found.size, (output or purpose(live)) if live.size >= 1024 else "other"
        elif found.kind == "temporary":
            rest = found.size
            for value in alive(found.values, moment):
                yield found, value, value.size, purpose(value)
                rest -= value.size
            yield found, None, rest, "other"
        elif found.kind == "constant":
            yield found, None, found.size, "other"


def fullest(allocations: list[Allocation]) -> int:
    """Returns the moment at which temporaries on the device take the most."""
    return max(curve(allocations), key=lambda point: point[1], default=(0, 0))[0]


def parse(dump: Mapping[str, str]) -> tuple[list[Allocation], list[Value]]:
    """Returns a program's allocations, and all its values. dump: as of `breakdown`."""
    values = _values(dump["values"])
    allocations = _allocations(dump["buffer-assignment"], values)
    _live_ranges(dump["live-range"], values)
    return allocations, list(values.values())


_HEADER = re.compile(r"^<(\d+) (.+?)( \(phi\))? @\d+>$")
_IN_ALLOCATION = re.compile(r"^ value: <(\d+) .*? @(\d+)> \(size=(\d+),offset=(\d+)\)")
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(?: color (\d+),)?(.*)$")
_MADE_BY = re.compile(r'^ from instruction:\s+%?(\S+) = .*?(?:op_name="((?:[^"\\]|\\.)*)"|$)')
_RANGE = re.compile(r"^    (\S+):(\d+)-(\d+)$")


def _values(text: str) -> dict[str, Value]:
    """Returns the values by number."""
    values: dict[str, Value] = {}
    section = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            number, name, phi = header.groups()
            value = values[number] = Value(name, bool(phi))
            section = ""
        elif line in (" positions:", " uses:"):
            section = line.strip()
        elif line.startswith(" from instruction:"):
            made = _MADE_BY.match(line)
            if made and values:
                value.instruction, value.made = made[1], (made[2] or "").replace("\\'", "'")
                value.parameter = " parameter(" in line
            section = ""
        elif section == "uses:" and line.strip() != "(none)":
            value.readers += (line.strip().partition(",")[0],)
    return values


def _allocations(text: str, values: dict[str, Value]) -> list[Allocation]:
    """Returns the allocations, and notes in each value where it lies."""
    found: list[Allocation] = []
    for line in text.splitlines():
        if line.startswith("Used values"):
            break
        if allocation := _ALLOCATION.match(line):
            size, space, rest = allocation.groups()
            kinds = (("parameter", "argument"), ("thread-local", "local"), ("constant", "constant"))
            kind = next((kind for word, kind in kinds if f", {word}" in rest), None)
            kind = kind or ("output" if "output shape" in rest or "maybe-live-out" in rest else "temporary")
            found.append(Allocation(int(size), int(space or 0), kind, []))
        elif (member := _IN_ALLOCATION.match(line)) and member[1] in values:
            value = values[member[1]]
            value.allocation, value.size, value.offset = len(found), int(member[3]), int(member[4])
            found[-1].values.append(value)
    return found


def _live_ranges(text: str, values: dict[str, Value]) -> None:
    named = {
        value.name if value.name.endswith("}") else value.name + "{}": value for value in values.values()
    }
    for line in text.splitlines():
        if (found := _RANGE.match(line)) and found[1] in named:
            named[found[1]].first, named[found[1]].last = int(found[2]), int(found[3])


def curve(allocations: list[Allocation]) -> list[tuple[int, int]]:
    """Returns the bytes that temporaries on the device take together, from each moment at which they change.
    Moments are places in the program's order of instructions."""
    changes: dict[int, list[tuple[bool, Value]]] = defaultdict(list)
    here = (found for found in allocations if found.kind == "temporary" and found.space != HOST)
    for value in itertools.chain.from_iterable(found.values for found in here):
        changes[value.first].append((True, value))
        changes[value.last + 1].append((False, value))
    points, total = [], 0
    live: dict[tuple[int, int, int], int] = Counter()  # a value may be written over the one it is made from
    for at in sorted(changes):
        for begins, value in changes[at]:
            place = value.allocation, value.offset, value.size
            live[place] += 1 if begins else -1
            total += value.size * ((live[place] == 1) if begins else -(live[place] == 0))
        points.append((at, total))
    return points


def alive(values: list[Value], moment: int) -> list[Value]:
    """Returns the values that live at a moment; of those that share memory, the one made last."""
    live = [value for value in values if value.first <= moment <= value.last and value.size]
    kept: list[Value] = []
    for value in sorted(live, key=lambda value: -value.first):
        end = value.offset + value.size
        if all(end <= other.offset or other.offset + other.size <= value.offset for other in kept):
            kept.append(value)
    return kept


class Purpose:
    """What a temporary is for."""

    def __init__(self, values: list[Value], scopes: Mapping[str, str], otherwise: str):
        """scopes: the names of those of "optimizer", "loss", "activations" and "gradients", where these are
        added up over micro-batches. otherwise: what no scope names."""
        self.scopes, self.otherwise = scopes, otherwise
        self.op_names = {value.instruction: value.made for value in values if not value.phi}
        self.made_by, self.places = defaultdict(list), defaultdict(list)
        for value in values:
            self.made_by[value.instruction].append(value)
            self.places[value.allocation, value.offset, value.size].append(value)

    def __call__(self, value: Value) -> str:
        if value.instruction.startswith("copy-start") and not value.phi:
            return "staging"
        if within(value.made, self.scopes["optimizer"]):
            return "optimizer"
        if self.reaches_optimizer(value, set()):
            return "gradients"
        return self.named(value) or self.otherwise

    def named(self, value: Value) -> str:
        """Returns what the instruction is for that makes an array, or, where fusion left it no name, those
        that read it, or what makes the arrays that take over its memory."""
        after, seen = [value], {id(value)}
        for array in after:  # grows
            for name in (array.made, *(self.op_names.get(name, "") for name in array.readers)):
                if found := self.of(name):
                    return found
            fresh = [other for other in self.handed_on(array) if id(other) not in seen]
            seen |= {id(other) for other in fresh}
            after += fresh
        return ""

    def of(self, op_name: str) -> str:
        """Returns what an op_name says of its purpose, "" where it lies in none of the scopes."""
        phases = ("optimizer", "loss", "activations")
        return next((phase for phase in phases if within(op_name, self.scopes[phase])), "")

    def handed_on(self, value: Value) -> list[Value]:
        """Returns the arrays that take over an array's memory with what is in it: of a loop that carries it,
        and of instructions that write their result over it."""
        return [
            other
            for other in self.places[value.allocation, value.offset, value.size]
            if other is not value
            and value.first <= other.first <= value.last + 1
            and (other.phi or other.instruction in value.readers)
        ]

    def reaches_optimizer(self, value: Value, seen: set[int]) -> bool:
        """Says whether the optimizer reads this array's memory before it is used for anything else, or a sum
        over micro-batches to which it is added."""
        seen.add(id(value))
        if any(within(self.op_names.get(name, ""), self.scopes["optimizer"]) for name in value.readers):
            return True
        sums = (name for name in value.readers if self.adds(name))
        after = [*self.handed_on(value), *(made for name in sums for made in self.made_by.get(name, ()))]
        return any(self.reaches_optimizer(other, seen) for other in after if id(other) not in seen)

    def adds(self, instruction: str) -> bool:
        """Says whether an instruction adds to sums of gradients: in a scope of that name, or outside of the
        model, the loss and the optimizer."""
        name = self.op_names.get(instruction, "")
        return name.endswith("/add") and (not self.of(name) or within(name, self.scopes["gradients"]))
