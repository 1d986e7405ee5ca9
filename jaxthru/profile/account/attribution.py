"""What an instruction of a step's HLO is: its line in the ledger, layer and phase, FLOPs and bytes."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping

from jaxthru.models import scopes
from jaxthru.models.scopes import ATTENTION_KERNEL
from jaxthru.profile.read import hlo
from jaxthru.profile.read.hlo import Instruction, Module, size, within

COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)

PROGRAMS = {
    scopes.FORWARD: ("other", "forward"),
    scopes.EMBED: (scopes.EMBEDDING, "forward"),
    scopes.LOSS_HEAD: (scopes.HEAD, "loss"),
    scopes.BACKWARD: ("other", "backward"),
    scopes.EMBED_BACKWARD: (scopes.EMBEDDING, "backward"),
    scopes.UPDATE_EMBEDDING: (scopes.OPTIMIZER, "optimizer"),
    scopes.UPDATE_HEAD: (scopes.OPTIMIZER, "optimizer"),
    scopes.UPDATE_LAYER: (scopes.OPTIMIZER, "optimizer"),
}
"""Layer and phase of what no scope names, in the programs of a layered step."""

COLLECTIVE_MATMULS = re.compile(r"/jit\((gather_matmul|matmul_scatter)\)/")
"""In op_names: the functions of `pallas_kernels.collective_matmul` whose kernels communicate and multiply."""

GEMMS = re.compile(r"__cublas|__triton_gemm|__onednn\$matmul|__cudnn\$(?:conv|gemm)|\bgemm\b")


@dataclasses.dataclass(frozen=True)
class Work:
    """One instruction's. runs: of it in a run of its program. bytes: of operands and results, once each;
    of a collective the larger of the two."""

    module: str
    instruction: Instruction
    line: str
    layer: str
    phase: str
    op_name: str
    source: str | None
    runs: int
    flops: float
    bytes: int
    collective: str | None


class Attribution:
    """The work of a step's programs, found by the names that a trace has."""

    def __init__(self, modules: dict[str, Module], kinds: Collection[str] = ()):
        """kinds: name scopes of the model's own, by which its layers are told too."""
        self.modules, self.kinds = modules, kinds
        self._runs = {
            (module.name, instruction.name): runs
            for module in modules.values()
            for instruction, runs in module.instructions()
        }
        self.find = functools.cache(self._find)
        # A GPU's kernel is named after its fusion, with what C does not allow in names replaced.
        wrapped = [(module.name, name) for module in modules.values() for name in module.wrapped]
        self._kernels = {
            re.sub(r"\W", "_", name): (module, name) for module, name in wrapped + list(self._runs)[::-1]
        }

    def of_kernel(self, name: str) -> Work | None:
        """Returns the work of the instruction that a kernel is named after, None if there is none."""
        return self.find(*self._kernels[name]) if name in self._kernels else None

    def _find(self, module: str, name: str) -> Work | None:
        """Returns the work of an instruction, None if the programs have no such instruction."""
        of = self.modules.get(module)
        instruction = of.find(name) if of else None
        return instruction and self._work(of, instruction)

    def all(self) -> Iterator[Work]:
        """Yields the work of each instruction that is run."""
        for module, name in self._runs:
            yield self.find(module, name)

    def flops(self, line: str, runs: Mapping[str, float] | None = None) -> float:
        """Returns the FLOPs of a line, on one device. runs: of each program, one if it is not given."""
        of = [work for work in self.all() if work.line == line]
        return sum(work.flops * work.runs * (runs or {}).get(work.module, 1.0) for work in of)

    def _work(self, module: Module, instruction: Instruction) -> Work:
        named, frame = _named(module, instruction)
        kind = collective(module, instruction)
        layer, phase = layer_and_phase(named, module.name, self.kinds)
        # The result of a "-start" also holds its operands.
        made, read = sum(map(size, instruction.shapes)), sum(map(size, module.operand_shapes(instruction)))
        own = made - read if instruction.opcode.endswith("-start") else made
        moved = max(own, read) if kind else made + read
        # A loop's body is counted where it runs.
        done = 0.0 if instruction.opcode in hlo.CONTROL else flops(module, instruction, phase, named)
        runs, source = self._runs.get((module.name, instruction.name), 0), module.frames.get(frame)
        of = line(module, instruction, named, kind), layer, phase, named, source
        return Work(module.name, instruction, *of, runs, done, moved, kind)


def line(module: Module, instruction: Instruction, op_name: str, kind: str | None) -> str:
    """Returns the ledger's line for what an instruction launches."""
    if kind:
        return "exposed_communication"
    if instruction.opcode == "custom-call" and COLLECTIVE_MATMULS.search(op_name):
        return "collective_matmul"
    if within(op_name, ATTENTION_KERNEL):
        return "attention"
    if instruction.opcode in ("copy-start", "copy-done"):
        return "exposed_host_copies"
    inner = [found for found, _ in module.inner(instruction)]
    if any(found.opcode in ("dot", "convolution", "ragged-dot") or _is_gemm(found) for found in inner):
        return "matmul"
    return "other_kernels"


def collective(module: Module, instruction: Instruction) -> str | None:
    """Returns the kind of a collective in any of its spellings (`all-gather`, `all-gather-start` and
    `async-start` of a computation that holds one), None for other instructions."""
    bare = instruction.opcode.removesuffix("-start").removesuffix("-done")
    if bare in COLLECTIVES:
        return bare
    if bare != "async":
        return None
    if instruction.opcode == "async-done":
        begun = module.find(instruction.operands[0])
        return begun and collective(module, begun)
    return next((found.opcode for found, _ in module.inner(instruction) if found.opcode in COLLECTIVES), None)


def _is_gemm(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and bool(GEMMS.search(instruction.target))


def flops(module: Module, instruction: Instruction, phase: str, op_name: str) -> float:
    """Returns the floating-point operations of the matmuls in one run of an instruction."""
    if instruction.opcode == "custom-call" and within(op_name, ATTENTION_KERNEL):
        return _attention(module, instruction, phase)
    if instruction.opcode == "custom-call" and (found := COLLECTIVE_MATMULS.search(op_name)):
        return _collective_matmul(module, instruction, gathers=found[1] == "gather_matmul")
    return sum(times * _product(module, found) for found, times in module.inner(instruction))


def _product(module: Module, instruction: Instruction) -> float:
    operands = module.operand_shapes(instruction)
    if instruction.opcode == "dot":
        contracted = [operands[0][1][dim] for dim in instruction.dims("lhs_contracting_dims")]
        return 2.0 * math.prod(instruction.shapes[0][1]) * math.prod(contracted)
    if instruction.opcode == "convolution":
        labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
        kernel = operands[1][1]
        features = kernel[labels[1].index("o")] if labels else 1
        return 2.0 * math.prod(instruction.shapes[0][1]) * math.prod(kernel) / features
    if _is_gemm(instruction):
        lhs = operands[0][1]
        named = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
        dims = [int(dim) for dim in json.loads(f"[{named[1]}]")] if named else [len(lhs) - 1]
        return 2.0 * math.prod(instruction.shapes[0][1]) * math.prod(lhs[dim] for dim in dims)
    return 0.0


def _attention(module: Module, instruction: Instruction, phase: str) -> float:
    """Returns the FLOPs that a call of a causal attention kernel needs, by its shapes [B, T, H, C].

    Forward two matmuls over half of T × T; backward four, of which a kernel that gives one of the
    three gradients has a third. What it computes again of the forward pass is not needed, and not counted.
    """
    queries = next((dims for _, dims in module.operand_shapes(instruction) if len(dims) == 4), None)
    results = sum(len(dims) == 4 for _, dims in instruction.shapes)
    if queries is None:
        return 0.0
    product = float(queries[1]) * math.prod(queries)
    return product * (4 / 3 * results if phase == "backward" else 2.0)


def _collective_matmul(module: Module, instruction: Instruction, gathers: bool) -> float:
    """Returns the FLOPs of a kernel that gathers the rows of its first operand and multiplies them by each
    other matrix, or that sums the products of pairs over devices; an odd matrix is only gathered, and one
    that becomes a result is only added to."""
    aliased = re.search(r"output_to_operand_aliasing=\{(.*?)\)\}", instruction.attributes)
    become_results = {int(number) for number in re.findall(r"\((\d+),", aliased[1])} if aliased else ()
    operands = [
        dims for i, (_, dims) in enumerate(module.operand_shapes(instruction)) if i not in become_results
    ]
    matrices = [dims for dims in operands if len(dims) == 2]
    if gathers:
        return 2.0 * instruction.shapes[0][1][0] * sum(map(math.prod, matrices[1:]))
    return 2.0 * matrices[0][0] * sum(map(math.prod, matrices[1::2]))


def layer_and_phase(op_name: str, module: str, kinds: Collection[str] = ()) -> tuple[str, str]:
    """Returns the kind of layer, by the innermost scope that names one, and the phase (`ledger.Scope`), of an
    op_name such as "jit(train_step)/transpose(jvp(model))/while/body/mlp/mul". kinds: as of `Attribution`."""
    layer, phase = PROGRAMS.get(scopes.program_of(module), ("other", "other"))
    names = "|".join(map(re.escape, (*scopes.LAYER_KINDS, ATTENTION_KERNEL, *kinds)))
    found = re.findall(rf"(?<=[/(:])({names})(?=[/):])", op_name)
    if found:
        layer = {scopes.LOSS: scopes.HEAD, ATTENTION_KERNEL: scopes.ATTENTION}.get(found[-1], found[-1])
    # Of a loop over layers also what it does beside its body, which has no `jvp`.
    loops = (name for name in (scopes.FORWARD, scopes.BACKWARD) if within(op_name, f"{scopes.MODEL}/{name}"))
    phase = next(loops, phase)
    if phase == "optimizer" or scopes.OPTIMIZER in found:
        return layer, "optimizer"
    if scopes.LOSS in found:
        return layer, "loss"
    if "rematted_computation" in op_name:
        return layer, "recomputation"
    if "transpose(" in op_name:
        return layer, "backward"
    if "jvp(" in op_name:
        # A layered step's backward programs, and loops', begin with what of the forward pass was not kept.
        return layer, "recomputation" if phase == "backward" else phase if phase == "loss" else "forward"
    return layer, phase


def _named(module: Module, instruction: Instruction) -> tuple[str, int]:
    """Returns an instruction's op_name and stack frame; where a rewrite left it none, those of what lies
    within it, or else of what it is read by or reads itself."""
    inner = [found for found, _ in module.inner(instruction)]
    # Of a fusion that holds a matmul, the matmul says what it is.
    products = [found for found in inner if found.opcode == "dot"]
    for found in (*products, *inner):
        if "/" in found.op_name:
            return found.op_name, found.frame or instruction.frame
    near = [found for found in _near(module, instruction) if "/" in found.op_name]
    if any(found.dims("lhs_batch_dims") for found in products):  # of which only attention has some
        near.sort(key=lambda found: not within(found.op_name, ATTENTION_KERNEL))
    return (near[0].op_name, near[0].frame) if near else (instruction.op_name, instruction.frame)


NEAR = 24


def _near(module: Module, instruction: Instruction) -> list[Instruction]:
    """Returns the instructions that an instruction is connected with, the nearest first."""
    there = module.computations[module.where[instruction.name]]
    names = [instruction.name]
    for name in names:  # grows
        if len(names) > NEAR:
            break
        around = (*module.readers.get(name, ()), *there[name].operands)
        names += [other for other in dict.fromkeys(around) if other in there and other not in names]
    return [there[name] for name in names]
