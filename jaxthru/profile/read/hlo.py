"""XLA's optimised HLO text as data: instructions, what they call, how often each runs, what made it."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath

import numpy as np

Shape = tuple[str, tuple[int, ...]]
"""An array's dtype, as HLO names it, and dims."""

BITS = {"pred": 8, "s4": 4, "u4": 4, "f4e2m1fn": 4, "s2": 2, "u2": 2, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """shapes: of the result, or of each part of a tuple. operands: names; of a parameter its number, of a
    constant its value. attributes: the text behind the operands. calls: the computations that run within it.
    op_name: JAX's name scopes and primitive. frame: number of its stack frame."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    calls: tuple[str, ...]
    op_name: str
    frame: int
    root: bool

    @property
    def target(self) -> str:
        """The name of a custom call's implementation, empty for other instructions."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def trip_count(self) -> int | None:
        """How often a loop runs, None if the compiler does not know."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        return int(found[1]) if found else None

    @property
    def groups(self) -> list[list[int]]:
        """The devices that exchange data in a collective, by their places; none where it does not say."""
        text = self.attributes
        if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}:]*)\}", text):
            axes = re.findall(r"'([^']*)'=(\d+)", found[1])
            joined = [f"'{name}'" in found[2].split(",") for name, _ in axes]
            sizes, order = [int(size) for _, size in axes], np.argsort(joined, kind="stable")
            together = math.prod(size for size, one in zip(sizes, joined, strict=True) if one)
        elif found := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
            together, sizes = int(found[1]), _numbers(found[2])
            order = _numbers(found[3]) if found[3] else range(len(sizes))
        else:
            listed = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}", text)
            return _joined(map(_numbers, re.findall(r"\{([\d,]*)\}", listed[1]))) if listed else []
        return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(-1, together).tolist()

    @property
    def pairs(self) -> list[tuple[int, ...]]:
        """Of a permute, (from, to) of each pair of devices, by their places."""
        listed = re.search(r"source_target_pairs=\{((?:\{[\d,]*\},?)+)\}", self.attributes)
        return [_numbers(pair) for pair in re.findall(r"\{([\d,]*)\}", listed[1])] if listed else []

    def dims(self, attribute: str) -> tuple[int, ...]:
        """Returns the numbers of `attribute={0,1}`."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return _numbers(found[1]) if found else ()


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A program. computations: name -> instructions by name, in order. frames: number -> "file:line".
    wrapped: the name by which a trace knows an asynchronous instruction -> the instruction's own."""

    name: str
    header: str
    entry: str
    computations: dict[str, dict[str, Instruction]]
    frames: dict[int, str]
    wrapped: dict[str, str]

    @functools.cached_property
    def runs(self) -> dict[str, int]:
        """How often each computation runs in a run of the program; loops of unknown length count once, and
        so does each branch of a conditional."""
        runs = dict.fromkeys(self.computations, 0)
        runs[self.entry] = 1
        # XLA writes a computation before those that call it.
        for name in reversed(list(self.computations)):
            for instruction in self.computations[name].values():
                times = runs[name] * (self.trips(instruction) or 1)
                for called in instruction.calls:
                    runs[called] = runs.get(called, 0) + times
        return runs

    def trips(self, instruction: Instruction) -> int | None:
        """Returns how often a loop runs; None if nothing tells, and for other instructions. Where the
        compiler does not say so, as for TPUs, by the number that its condition counts up to from 0."""
        if instruction.opcode != "while" or instruction.trip_count:
            return instruction.trip_count if instruction.opcode == "while" else None
        named = re.search(r"\bcondition=%?([^\s,]+)", instruction.attributes)
        inner = self.computations.get(named[1], {}) if named else {}
        root = next((found for found in inner.values() if found.root), None)
        if root is None or root.opcode != "compare" or "direction=LT" not in root.attributes:
            return None
        bound = inner.get(root.operands[-1])
        counts = bound is not None and bound.opcode == "constant" and bound.operands[0].isdigit()
        return int(bound.operands[0]) if counts else None

    @functools.cached_property
    def where(self) -> dict[str, str]:
        """The computation of each instruction, by its name; names are unique in a module."""
        return {name: of for of, found in self.computations.items() for name in found}

    @functools.cached_property
    def readers(self) -> dict[str, list[str]]:
        """The instructions that read each instruction's result."""
        found: dict[str, list[str]] = {}
        for instructions in self.computations.values():
            for instruction in instructions.values():
                for name in instruction.operands:
                    found.setdefault(name, []).append(instruction.name)
        return found

    def find(self, name: str) -> Instruction | None:
        """Returns the instruction of this name, or the asynchronous one that wraps it."""
        name = self.wrapped.get(name, name)
        return self.computations[self.where[name]][name] if name in self.where else None

    def instructions(self) -> Iterator[tuple[Instruction, int]]:
        """Yields each instruction that is run, and how often; not what lies within fusions, reducers and the
        like, which run as one."""
        runs = self.runs
        scheduled = [self.entry]
        for computation in scheduled:  # grows
            for instruction in self.computations[computation].values():
                yield instruction, runs[computation]
                if instruction.opcode in CONTROL:
                    scheduled += [called for called in instruction.calls if called not in scheduled]

    def inner(self, instruction: Instruction) -> Iterator[tuple[Instruction, int]]:
        """Yields an instruction and all within it, with how often each runs in one run of it."""
        yield instruction, 1
        times = self.trips(instruction) or 1
        for called in instruction.calls:
            for found in self.computations.get(called, {}).values():
                for deeper, count in self.inner(found):
                    yield deeper, count * times

    def operand_shapes(self, instruction: Instruction) -> list[Shape]:
        """Returns the shapes of an instruction's operands, tuples taken apart."""
        return [shape for operand in self.operands(instruction) for shape in operand.shapes]

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions whose results an instruction reads; a parameter has none."""
        there = self.computations[self.where[instruction.name]]
        return [there[name] for name in instruction.operands if name in there]


CONTROL = ("while", "conditional", "call")
"""Instructions that run others, each of which is a kernel of its own."""


def _joined(groups: Iterable[Iterable[int]]) -> list[list[int]]:
    """Returns groups that have no member in common: of pairs, who is connected by some of them."""
    found: list[set[int]] = []
    for group in map(set, groups):
        apart = [other for other in found if not other & group]
        found = [*apart, group.union(*(other for other in found if other & group))]
    return sorted(map(sorted, found))


def size(shape: Shape) -> int:
    """Returns the bytes of an array."""
    dtype, dims = shape
    bits = re.search(r"\d+", dtype)
    width = BITS.get(dtype, int(bits[0]) if bits else 8)
    return math.prod(dims) * width // 8


def within(op_name: str, scope: str) -> bool:
    """Says whether an op_name ("jit(train_step)/transpose(jvp(model))/mlp/mul") lies within a scope."""
    return re.search(rf"[/(:]{scope}[/):]", op_name) is not None


def modules(text: str) -> dict[str, Module]:
    """Returns the modules of an HLO text, which may hold several one after the other, by name."""
    found = (module(part) for part in re.split(r"^(?=HloModule )", text, flags=re.M) if part.strip())
    return {one.name: one for one in found}


def module(text: str) -> Module:
    """Returns the module of an HLO text. Raises ValueError if it is none."""
    lines = text.splitlines()
    named = re.match(r"HloModule ([^\s,]+)", lines[0]) if lines else None
    if not named:
        raise ValueError("not an HLO module: its text begins with 'HloModule'")
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in lines[1:]:
        if opened := _COMPUTATION.match(line):
            current = computations.setdefault(opened[2], {})
            entry = opened[2] if opened[1] else entry
        elif current is not None and (instruction := _instruction(line)):
            current[instruction.name] = instruction
    wrapped = {inner: name for name, inner in _WRAPS.findall(text)}
    return Module(named[1], lines[0], entry, computations, _frames(text), wrapped)


_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{\s*$")
_NAME = re.compile(r"^\s+(ROOT )?%?(\S+) = ")
_WRAPS = re.compile(r"^// %(\S+) wraps %(\S+)$", re.M)  # as `runtime.xla.text` writes it
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([^\s,()]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|called_computations"
    r"|branch_computations)=(\{[^}]*\}|%?[^\s,]+)"
)


def _instruction(line: str) -> Instruction | None:
    named = _NAME.match(line)
    if not named:
        return None
    at = named.end()
    end = _closed(line, at) if line[at] == "(" else line.find(" ", at)
    shapes = tuple((dtype, _numbers(dims)) for dtype, dims in _ARRAY.findall(line[at:end]))
    opened = line.find("(", end)
    if end < 0 or opened < 0:
        return None
    closed = _closed(line, opened)
    attributes, opcode = line[closed:], line[end:opened].strip()
    # A parameter has its number for an operand, a constant its value.
    number = [line[opened + 1 : closed - 1]]
    operands = number if opcode in ("parameter", "constant") else _OPERAND.findall(line, opened, closed)
    op_name = _OP_NAME.search(attributes)
    frame = re.search(r"stack_frame_id=(\d+)", attributes)
    calls = tuple(name.lstrip("%") for text in _CALLS.findall(attributes) for name in _names(text))
    said = op_name[1].replace("\\'", "'") if op_name else ""
    held = shapes, tuple(operands), attributes, calls
    return Instruction(named[2], opcode, *held, said, int(frame[1]) if frame else 0, bool(named[1]))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.strip("{}").split(",") if name.strip()]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _closed(line: str, opened: int) -> int:
    """Returns the place behind the bracket that closes the one at `opened`."""
    depth = 0
    for at in range(opened, len(line)):
        depth += (line[at] == "(") - (line[at] == ")")
        if depth == 0:
            return at + 1
    return len(line)


def _frames(text: str) -> dict[int, str]:
    """Returns the source of each stack frame: its innermost place outside of installed packages."""

    def table(name: str) -> dict[int, str]:
        found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.M)
        rows = (line.partition(" ") for line in found[1].splitlines()) if found else ()
        return {int(number): rest for number, _, rest in rows}

    files = {number: name.strip('"') for number, name in table("FileNames").items()}
    places = {number: _fields(row) for number, row in table("FileLocations").items()}
    stack = {number: _fields(row) for number, row in table("StackFrames").items()}

    def place(number: int) -> str | None:
        innermost = None
        while number in stack:
            at = places.get(stack[number].get("file_location_id", 0), {})
            file = files.get(at.get("file_name_id", 0), "")
            said = f"{_short(file)}:{at.get('line', 0)}"
            innermost = innermost or said
            if file and "site-packages" not in file and not file.startswith("<"):
                return said
            number = stack[number].get("parent_frame_id", 0) - 1  # written with one added: 0 is none
        return innermost

    return {number: found for number in stack if (found := place(number))}


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}


def _short(file: str) -> str:
    """Returns a file's path from the package that it belongs to."""
    parts = PurePath(file).parts
    for package in ("site-packages", "jaxthru", "pallas_kernels"):
        if package in parts:
            last = len(parts) - 1 - parts[::-1].index(package)
            return "/".join(parts[last + (package == "site-packages") :])
    return parts[-1] if parts else ""
