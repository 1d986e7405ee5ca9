"""Lint: faults that the text of a step's program shows, and their cost."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxthru.models.scopes import COMBINE, DISPATCH, EXCHANGES, EXPERTS, ROUTER
from jaxthru.profile.account.attribution import Work
from jaxthru.profile.account.build import Accounted
from jaxthru.profile.account.ledger import Lint
from jaxthru.profile.read.hlo import CONTROL, Instruction, Module, size, within
from jaxthru.runtime.mesh import AXES
from jaxthru.runtime.sharding import LOGICAL_AXIS_RULES

LARGE = 1 << 20
"""Bytes below which a copy is nothing to speak of."""

MOST = 10
"""Findings of a rule: those that cost the most."""


RULES: tuple[Callable[[Work, Accounted], "Found"], ...]
"""All of them, at the end of this file."""


def lint(made: Accounted) -> tuple[Lint, ...]:
    """Returns the findings in a profile's programs, rule by rule, the dearest first."""
    found: list[Lint] = []
    for rule in RULES:
        of = []
        for work in made.program.all():
            if told := rule(work, made):
                (moved, text), name = told, work.instruction.name
                seconds, times = made.spent.get((work.module, name)), made.runs.get(work.module, 1.0)
                of.append(Lint(rule.__name__, work.op_name, name, moved * times, seconds, text))
        of.sort(key=lambda entry: (-(entry.seconds or 0.0), -(entry.bytes or 0.0)))
        found += of[:MOST]
    return tuple(found)


Found = tuple[float, str] | None
"""What a rule says of an instruction: the bytes that it moves or holds in one run of its program, and what is
wrong with it. None where nothing is."""


def copies(work: Work, made: Accounted) -> Found:
    """Copies and transposes of at least a mebibyte: arrays that lie as their readers do not want them."""
    module, result = made.program.modules[work.module], sum(map(size, work.instruction.shapes))
    if result < LARGE or not work.runs or not _only_moves(module, work.instruction):
        return None
    times = f", {work.runs} times a step" if work.runs > 1 else ""
    return 2.0 * result * work.runs, f"copies {_shown(work.instruction)}{times}"


def _only_moves(module: Module, instruction: Instruction) -> bool:
    """Says whether all that an instruction does is to lay an array out anew."""
    if instruction.opcode in ("copy", "transpose"):
        return True
    if instruction.opcode != "fusion":
        return False
    inner = {found.opcode for found, _ in module.inner(instruction)} - {"fusion", "parameter", "bitcast"}
    return bool(inner) and inner <= {"copy", "transpose", "reshape"}


def float32_matmuls(work: Work, made: Accounted) -> Found:
    """Matmuls of float32 arrays where the run computes in bfloat16: a GPU is at half its speed or
    less. Matmuls of arrays that were just widened are the compiler's own, and are not meant."""
    if made.config["precision"]["compute"] != "bfloat16" or work.line != "matmul" or not work.runs:
        return None
    module = made.program.modules[work.module]
    wide = [one for one, _ in module.inner(work.instruction) if _is_wide_product(module, one)]
    moved = sum(size(shape) for one in wide for shape in module.operand_shapes(one))
    text = f"multiplies float32: {work.flops * work.runs:.3g} FLOPs a step"
    return (float(moved * work.runs), text) if wide else None


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


def collectives(work: Work, made: Accounted) -> Found:
    """Collectives that the mesh does not explain: FSDP gathers parameters and scatters gradients, tensor
    and expert parallelism also gather activations and scatter their sums, data parallelism only sums
    gradients; and what stages exchange."""
    kind, why = work.collective, None
    if not kind or not work.runs or work.instruction.opcode.endswith("-done") or work.bytes < 1024:
        return None
    split = {axis: made.config["mesh"].get(axis, 1) != 1 for axis in AXES}
    tokens_move = split["expert"] or split["tensor"]
    shards = split["fsdp"] or tokens_move
    meant = (
        any(split[axis] for axis in LOGICAL_AXIS_RULES[over])
        for scope, over in (EXCHANGES | made.ledger.model.exchanges).items()
        if within(work.instruction.op_name, scope)
    )
    if kind in ("all-to-all", "ragged-all-to-all") and not any(meant):
        why = "no axis of the mesh needs it: an array is laid out in two ways"
    elif kind in ("all-gather", "reduce-scatter") and not shards:
        why = "nothing is split over fsdp, expert or tensor"
    elif kind == "all-gather" and not tokens_move and _of_tokens(work.instruction, made.config):
        why = "it gathers activations, which fsdp leaves where they are"
    return why and (float(work.bytes * work.runs), f"{kind} of {_shown(work.instruction)}: {why}")


def _of_tokens(instruction: Instruction, config: Mapping[str, Any]) -> bool:
    """Says whether an array has an entry for each token of a batch: [rows, sequence, ...]."""
    sequence = config["data"]["sequence"]
    return any(
        len(dims) >= 3 and sequence in dims[:-1] and math.prod(dims) > sequence * dims[-1]
        for _, dims in instruction.shapes
    )


def loops(work: Work, made: Accounted) -> Found:
    """Loops whose length the compiler does not know: it cannot overlap their rounds, and FLOPs within are
    counted once. That over blocks of experts' rows is meant: the router decides how many there are."""
    unknown = work.instruction.opcode == "while" and work.instruction.trip_count is None
    meant = within(work.op_name, EXPERTS)
    return (float(work.bytes), "a loop of unknown length") if unknown and not meant else None


def not_donated(work: Work, made: Accounted) -> Found:
    """Parts of the state whose memory the step does not take over: old and new exist at once."""
    own, module = work.instruction, made.program.modules[work.module]
    held, argument = (
        sum(map(size, own.shapes)),
        own.opcode == "parameter" and own.op_name.startswith("state["),
    )
    if held < LARGE or not argument or module.where[own.name] != module.entry:
        return None
    aliased = re.search(r"input_output_alias=\{(.*?)\}, \w+=", module.header)
    taken = re.findall(r"\((\d+), \{", aliased[1]) if aliased else ()
    return None if own.operands[0] in taken else (float(held), f"{own.op_name} is not donated")


def attention_again(work: Work, made: Accounted) -> Found:
    """Attention's forward pass run once more in the backward pass."""
    if work.line != "attention" or work.phase != "recomputation" or not work.flops or not work.runs:
        return None
    text = f"attention's forward pass is computed again: {work.flops * work.runs:.3g} FLOPs a step"
    return float(work.bytes * work.runs), text


def dense_experts(work: Work, made: Accounted) -> Found:
    """Products of all tokens with all experts, of which the most part is thrown away: what XLA makes of a
    ragged dot off a TPU. No product of theirs has the FLOPs that a whole layer's forward pass needs."""
    if not work.flops or not within(work.op_name, EXPERTS):
        return None
    mesh, train, model = made.config["mesh"], made.config["train"], made.ledger.model
    tokens = train["rows"] // train["microbatches"] * made.config["data"]["sequence"]
    # Each of those that share experts may be asked for all tokens of all of them.
    of_device = tokens * mesh.get("expert", 1) / math.prod(mesh.values())
    needed = of_device * model.matmul_flops_per_token / model.layers / 3  # backward is two of three parts
    if work.flops <= needed:
        return None
    text = f"multiplies {work.flops / needed:.1f} times as much as a whole layer needs forward"
    return float(work.bytes * work.runs), text


def sorted_scores(work: Work, made: Accounted) -> Found:
    """Sorts of [tokens, experts], where the few best experts of a token are found by comparisons. The sort of
    assignments by expert, which has one dim, is not meant."""
    meant = any(within(work.op_name, scope) for scope in (ROUTER, DISPATCH))
    if not meant or work.instruction.opcode in CONTROL:
        return None
    module = made.program.modules[work.module]
    for one, _ in module.inner(work.instruction):
        sorts = one.opcode in ("sort", "topk") or re.search("topk|sort", one.target, re.IGNORECASE)
        sizes = (sum(size > 1 for size in dims) for _, dims in module.operand_shapes(one))
        if sorts and max(sizes, default=0) > 1:
            return float(work.bytes * work.runs), f"sorts [tokens, experts]: {_shown(one)}"
    return None


def scattered_sums(work: Work, made: Accounted) -> Found:
    """Sums of floats by scatter where tokens go to experts and back: in an order that differs from run to run
    on a GPU, and an addition to memory for each number."""
    meant = (ROUTER, DISPATCH, EXPERTS, COMBINE)
    if work.instruction.opcode in CONTROL or not any(within(work.op_name, scope) for scope in meant):
        return None
    module = made.program.modules[work.module]
    for one, _ in module.inner(work.instruction):
        floats = [shape for shape in one.shapes if shape[0].startswith(("f", "bf"))]
        added = one.opcode == "scatter" and any(
            inner.opcode == "add" for inner, _ in module.inner(one) if inner is not one
        )
        # A CPU's compiler makes a loop of it, which keeps its name.
        if floats and (added or one.op_name.endswith(("scatter-add", "scatter_add"))):
            return float(work.bytes * work.runs), f"adds by scatter: {_shown(one)}"
    return None


RULES = (
    *(copies, float32_matmuls, collectives, loops, not_donated, attention_again),
    *(dense_experts, sorted_scores, scattered_sums),
)


def _shown(instruction: Instruction) -> str:
    return ", ".join(f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in instruction.shapes[:3])
