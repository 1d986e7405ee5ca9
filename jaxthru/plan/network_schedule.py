"""The schedule of a compiled step, walked: which seconds of its collectives no computation hides.

One stream computes, one communicates. An operation takes what its FLOPs or its bytes ask for at stated rates,
a collective what it was found to take; it begins when it is started and the stream is free, and the step
waits for it where the schedule does.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping

from jaxthru.models.scopes import OPTIMIZER
from jaxthru.profile.account.attribution import Attribution, Work
from jaxthru.profile.read.hlo import CONTROL, Instruction, Module, size

FREE = (
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "iota"),
    *("partition-id", "replica-id", "copy-start", "copy-done", "optimization-barrier"),
)
"""Opcodes that take no time of the compute stream; asynchronous copies are others' work."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a device does a second: flops of bf16 matrix products, memory bytes of HBM. launch: seconds of
    each kernel beside that."""

    flops: float
    memory: float
    launch: float = 2e-6


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Seconds of a step, of its collectives and its computation; and of each collective, by its name, those
    in which nothing else is done."""

    step: float
    links: float
    compute: float
    exposed: dict[str, float]

    @property
    def waits(self) -> float:
        """Seconds of the step in which only links work."""
        return sum(self.exposed.values())


class Program:
    """A step's program, with what each of its instructions takes to compute."""

    def __init__(self, module: Module, rates: Rates, kinds: Collection[str] = (), optimizer: float = 1.0):
        """kinds: name scopes of the model's own. optimizer: share of its computation that a device does,
        where the program was compiled for fewer devices than share it."""
        self.module = module
        self._works = {
            work.instruction.name: work for work in Attribution({module.name: module}, kinds).all()
        }
        self._takes = {
            name: _seconds(module, work, rates) * (optimizer if work.layer == OPTIMIZER else 1.0)
            for name, work in self._works.items()
        }

    def schedule(self, seconds: Mapping[str, float], runs: Mapping[str, float] | None = None) -> Schedule:
        """Returns the schedule, where each collective takes so many seconds, by its name, each time. runs: of
        each collective, where on more devices it runs more often than here."""
        more = {name: count / max(1, self._works[name].runs) for name, count in (runs or {}).items()}
        seconds = {name: each * more.get(name, 1.0) for name, each in seconds.items()}
        walk = _Walk(self.module, self._works, self._takes, seconds)
        walk.run(self.module.entry)
        step = max(walk.now, walk.free)
        exposed = dict(walk.exposed)
        if walk.free > walk.now and walk.last:  # nobody waits for it but the step's end
            exposed[walk.last] = exposed.get(walk.last, 0.0) + walk.free - walk.now
        return Schedule(step, walk.links, walk.compute, exposed)


class _Walk:
    def __init__(self, module: Module, works: dict[str, Work], takes: dict[str, float], seconds: Mapping):
        self.module, self.works, self.takes, self.seconds = module, works, takes, seconds
        self.now = self.free = self.links = self.compute = 0.0
        self.last = ""
        self.exposed: Counter[str] = Counter()
        self.ends: dict[str, tuple[float, str]] = {}

    def run(self, computation: str) -> None:
        for one in self.module.computations[computation].values():
            work = self.works.get(one.name)
            if one.opcode == "while":
                self._loop(one)
            elif one.opcode in CONTROL:
                branches = [name for name in one.calls if name in self.module.computations]
                if branches:  # of a conditional the longest
                    self.run(max(branches, key=lambda name: len(self.module.computations[name])))
            elif work and work.collective:
                self._exchange(one)
            else:
                self.now += self.takes.get(one.name, 0.0)
                self.compute += self.takes.get(one.name, 0.0)

    def _exchange(self, one: Instruction) -> None:
        if one.opcode.endswith("-done"):
            end, name = self.ends.pop(one.operands[0], (0.0, one.name))
            self._wait(end, name)
            return
        takes = self.seconds.get(one.name, 0.0)
        self.free = max(self.now, self.free) + takes
        self.links, self.last = self.links + takes, one.name
        if one.opcode.endswith("-start"):
            self.ends[one.name] = self.free, one.name
        else:
            self._wait(self.free, one.name)

    def _wait(self, end: float, name: str) -> None:
        if end > self.now:
            self.exposed[name] += end - self.now
            self.now = end

    def _loop(self, one: Instruction) -> None:
        """Walks a loop's body twice; the runs after the second are like it."""
        body, trips = _attribute(one, "body"), self.module.trips(one) or 1
        self.run(body)
        if trips == 1:
            return
        before, seen = (self.now, self.links, self.compute), self.exposed.copy()
        ahead = self.free - self.now
        self.run(body)
        more = trips - 2
        for name in self.exposed:
            self.exposed[name] += more * (self.exposed[name] - seen[name])
        later = more * (self.now - before[0])
        self.now += later
        self.free = max(self.free + later, self.now + min(ahead, 0.0))
        self.links += more * (self.links - before[1])
        self.compute += more * (self.compute - before[2])
        self.ends = {start: (end + later, name) for start, (end, name) in self.ends.items()}


def _attribute(one: Instruction, name: str) -> str:
    _, _, rest = one.attributes.partition(f"{name}=")
    return rest.partition(",")[0].lstrip("%")


def _seconds(module: Module, work: Work, rates: Rates) -> float:
    one = work.instruction
    if one.opcode in FREE or one.opcode in CONTROL or work.collective or one.opcode.endswith("-done"):
        return 0.0
    double = any(dtype.startswith("f8") for dtype, _ in module.operand_shapes(one))
    flops = work.flops / (rates.flops * (2 if double else 1))
    return rates.launch + max(flops, touched(module, one) / rates.memory)


def touched(module: Module, one: Instruction) -> int:
    """Returns the bytes that an instruction reads and writes: of what it slices or updates in place, the
    slice. One that is started (`fusion-start`) touches what it would at once."""
    opcode, read = one.opcode.removesuffix("-start"), sum(map(size, module.operand_shapes(one)))
    # The result of a "-start" also holds its operands.
    made = sum(map(size, one.shapes)) - read * (opcode != one.opcode)
    if opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * made
    if opcode == "dynamic-update-slice":
        return 2 * size(module.operand_shapes(one)[1])
    if opcode != "fusion" or not one.calls or one.calls[0] not in module.computations:
        return made + read
    inner = module.computations[one.calls[0]]
    parameters = [found for found in inner.values() if found.opcode == "parameter"]
    root = next(found for found in inner.values() if found.root)
    written = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return sum(_read(module, found) for found in parameters) + sum(
        _written(module, found) for found in written
    )


def _read(module: Module, parameter: Instruction) -> int:
    users = _users(module, parameter.name)
    whole = sum(map(size, parameter.shapes))
    if any(user.opcode not in ("dynamic-slice", "dynamic-update-slice") for user, _ in users):
        return whole
    # An index is read whole; of what is sliced the slice, and what is updated in place not at all.
    slices = [user for user, place in users if place == 0 and user.opcode == "dynamic-slice"]
    return sum(size(shape) for user in slices for shape in user.shapes) + whole * any(at for _, at in users)


def _users(module: Module, name: str) -> list[tuple[Instruction, int]]:
    """Returns who reads a result, through bitcasts, and as which operand."""
    found = []
    for reader in module.readers.get(name, ()):
        there = module.computations[module.where[reader]][reader]
        if there.opcode == "bitcast":
            found += _users(module, reader)
        else:
            found.append((there, there.operands.index(name)))
    return found


def _written(module: Module, one: Instruction) -> int:
    there = module.computations[module.where[one.name]]
    while one.opcode == "bitcast" and one.operands[0] in there:
        one = there[one.operands[0]]
    if one.opcode == "dynamic-update-slice":
        return size(module.operand_shapes(one)[1])
    return sum(map(size, one.shapes))
