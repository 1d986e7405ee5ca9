"""Lint: faults that the text of a step's program shows, and their cost."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxthru.models.scopes import EXCHANGES
from jaxthru.profile.account.attribution import Attribution, Work
from jaxthru.profile.account.ledger import Lint
from jaxthru.profile.read.hlo import Instruction, Module, size, within
from jaxthru.runtime.mesh import AXES
from jaxthru.runtime.sharding import LOGICAL_AXIS_RULES

LARGE = 1 << 20
"""Bytes below which a copy is nothing to speak of."""

MOST = 10
"""Findings of a rule: those that cost the most."""


def lint(
    attribution: Attribution,
    spent: Mapping[tuple[str, str], float],
    config: Mapping[str, Any],
    runs: Mapping[str, float] | None = None,
    exchanges: Mapping[str, str] = {},
) -> tuple[Lint, ...]:
    """Returns the findings, rule by rule, the dearest first.

    spent: seconds of a step by (module, instruction), as measured. config: the run's, as nested plain values,
    with the sizes of its mesh found. runs: of each program in a step. exchanges: of the model's `Facts`.
    """
    found: list[Lint] = []
    for rule in (copies, float32_matmuls, collectives, loops, not_donated, attention_again):
        more = (exchanges,) if rule is collectives else ()
        of = []
        for work, moved, text in rule(attribution, config, *more):
            name, times = work.instruction.name, (runs or {}).get(work.module, 1.0)
            seconds = spent.get((work.module, name))
            of.append(Lint(rule.__name__, work.op_name, name, moved * times, seconds, text))
        of.sort(key=lambda entry: (-(entry.seconds or 0.0), -(entry.bytes or 0.0)))
        found += of[:MOST]
    return tuple(found)


Found = Iterator[tuple[Work, float, str]]
"""What a rule yields: the instruction, the bytes that it moves or holds in one run of its program, and what
to say of it."""


def copies(attribution: Attribution, config: Mapping[str, Any]) -> Found:
    """Copies and transposes of at least a mebibyte: arrays that lie as their readers do not want them."""
    for work in attribution.all():
        module, result = attribution.modules[work.module], sum(map(size, work.instruction.shapes))
        if result >= LARGE and work.runs and _only_moves(module, work.instruction):
            times = f", {work.runs} times a step" if work.runs > 1 else ""
            yield work, 2.0 * result * work.runs, f"copies {_shown(work.instruction)}{times}"


def _only_moves(module: Module, instruction: Instruction) -> bool:
    """Says whether all that an instruction does is to lay an array out anew."""
    if instruction.opcode in ("copy", "transpose"):
        return True
    if instruction.opcode != "fusion":
        return False
    inner = {found.opcode for found, _ in module.inner(instruction)} - {"fusion", "parameter", "bitcast"}
    return bool(inner) and inner <= {"copy", "transpose", "reshape"}


def float32_matmuls(attribution: Attribution, config: Mapping[str, Any]) -> Found:
    """Matmuls of float32 arrays where the run computes in bfloat16: a GPU is at half its speed or
    less. Matmuls of arrays that were just widened are the compiler's own, and are not meant."""
    if config["precision"]["compute"] != "bfloat16":
        return
    for work in attribution.all():
        module = attribution.modules[work.module]
        wide = [one for one, _ in module.inner(work.instruction) if _is_wide_product(module, one)]
        if work.line == "matmul" and work.runs and wide:
            moved = sum(size(shape) for one in wide for shape in module.operand_shapes(one))
            text = f"multiplies float32: {work.flops * work.runs:.3g} FLOPs a step"
            yield work, float(moved * work.runs), text


def _is_wide_product(module: Module, instruction: Instruction) -> bool:
    if instruction.opcode != "dot" and not instruction.target.startswith("__cublas"):
        return False
    operands = module.operands(instruction)[:2]
    wide = (operand.shapes[0][0] == "f32" and not _widened(module, operand) for operand in operands)
    return len(operands) == 2 and all(wide)


def _widened(module: Module, instruction: Instruction, depth: int = 4) -> bool:
    """Says whether an array is made by a conversion from a narrower type, moved about since or not."""
    if instruction.opcode == "convert":
        return True
    if depth == 0 or instruction.opcode not in ("bitcast", "copy", "transpose", "reshape", "fusion"):
        return False
    if instruction.opcode == "fusion":  # what it does last counts: it may convert only to compute
        inner = module.computations.get(instruction.calls[0], {}) if instruction.calls else {}
        last = next((one for one in inner.values() if one.root), None)
        if last and last.opcode != "parameter" and _widened(module, last):
            return True
        if last and not _only_moves(module, instruction):
            return False
    return any(_widened(module, operand, depth - 1) for operand in module.operands(instruction))


def collectives(
    attribution: Attribution, config: Mapping[str, Any], exchanges: Mapping[str, str] = {}
) -> Found:
    """Collectives that the mesh does not explain: FSDP gathers parameters and scatters gradients, tensor
    parallelism also sums activations, data parallelism only sums gradients; and what stages exchange."""
    split = {axis: config["mesh"].get(axis, 1) != 1 for axis in AXES}
    known = (EXCHANGES | dict(exchanges)).items()
    exchanging = [scope for scope, over in known if any(split[axis] for axis in LOGICAL_AXIS_RULES[over])]
    for work in attribution.all():
        kind = work.collective
        if not kind or not work.runs or work.instruction.opcode.endswith("-done") or work.bytes < 1024:
            continue
        why = None
        meant = any(within(work.instruction.op_name, scope) for scope in exchanging)
        if kind in ("all-to-all", "ragged-all-to-all") and not meant:
            why = "no axis of the mesh needs it: an array is laid out in two ways"
        elif kind in ("all-gather", "reduce-scatter") and not (split["fsdp"] or split["tensor"]):
            why = "nothing is split over fsdp or tensor"
        elif kind == "all-gather" and not split["tensor"] and _of_tokens(work.instruction, config):
            why = "it gathers activations, which fsdp leaves where they are"
        if why:
            yield work, float(work.bytes * work.runs), f"{kind} of {_shown(work.instruction)}: {why}"


def _of_tokens(instruction: Instruction, config: Mapping[str, Any]) -> bool:
    """Says whether an array has an entry for each token of a batch: [rows, sequence, ...]."""
    sequence = config["data"]["sequence"]
    return any(
        len(dims) >= 3 and sequence in dims[:-1] and math.prod(dims) > sequence * dims[-1]
        for _, dims in instruction.shapes
    )


def loops(attribution: Attribution, config: Mapping[str, Any]) -> Found:
    """Loops whose length the compiler does not know: it cannot overlap their rounds, and FLOPs within are
    counted once."""
    for work in attribution.all():
        if work.instruction.opcode == "while" and work.instruction.trip_count is None:
            yield work, float(work.bytes), "a loop of unknown length"


def not_donated(attribution: Attribution, config: Mapping[str, Any]) -> Found:
    """Parts of the state whose memory the step does not take over: old and new exist at once."""
    for module in attribution.modules.values():
        aliased = re.search(r"input_output_alias=\{(.*?)\}, \w+=", module.header)
        taken = set(re.findall(r"\((\d+), \{", aliased[1])) if aliased else set()
        for instruction in module.computations[module.entry].values():
            held = sum(map(size, instruction.shapes))
            mine = instruction.opcode == "parameter" and instruction.op_name.startswith("state[")
            if mine and held >= LARGE and instruction.operands[0] not in taken:
                work = attribution.find(module.name, instruction.name)
                yield work, float(held), f"{instruction.op_name} is not donated"


def attention_again(attribution: Attribution, config: Mapping[str, Any]) -> Found:
    """Attention's forward pass run once more in the backward pass."""
    for work in attribution.all():
        if work.line == "attention" and work.phase == "recomputation" and work.flops and work.runs:
            text = f"attention's forward pass is computed again: {work.flops * work.runs:.3g} FLOPs a step"
            yield work, float(work.bytes * work.runs), text


def _shown(instruction: Instruction) -> str:
    return ", ".join(f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in instruction.shapes[:3])
