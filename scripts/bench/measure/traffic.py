"""Says how many bytes the kernels of a step read and write, part by part, without a GPU.

    python scripts/bench/measure/traffic.py --config llama3_2_1b --set data.sequence=2048 [--top 20]

The step is compiled for a GPU that need not be here, as `python -m jaxthru.plan memory` does, and each
kernel's operands and results are added up: what it moves at the least, however often its cache is asked. A
part is a phase (forward, backward or optimizer), the name scope and the primitive that a kernel is named
after. Divided by what the GPU sustains, 4.1 to 4.2 TB/s on an H200, that is the least time of kernels that
are no products. Triton's kernels are XLA's here, or stand-ins: attention's rows are not its own. Needs
"jaxthru[aot]".
"""

import collections
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness

from jaxthru import config as configuration
from jaxthru.build.choices import DOCUMENTS
from jaxthru.build.defaults import plain
from jaxthru.models import scopes
from jaxthru.plan.memory import compiled, traced
from jaxthru.profile.read import hlo
from jaxthru.runtime import aot, xla

FREE = "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "opt-barrier"
"""What moves nothing."""


def part_of(op_name: str) -> tuple[str, str]:
    """Returns the phase and the scope of a kernel."""
    words = re.findall(r"[\w-]+", op_name)
    if scopes.OPTIMIZER in words:
        return "optimizer", scopes.OPTIMIZER
    phase = "backward" if {"transpose", "rematted_computation"} & {*words[1:-1]} else "forward"
    named = [word for word in words if word in (*scopes.LAYER_KINDS, scopes.ATTENTION_KERNEL)]
    return phase, "/".join(dict.fromkeys(named)) or "other"


def moved(module: hlo.Module) -> list[dict]:
    """Returns the kernels of a program, added up by part and by what they do, the largest first."""
    found: dict[tuple, list[int]] = collections.defaultdict(lambda: [0, 0])
    for instruction, times in module.instructions():
        if instruction.opcode in FREE + hlo.CONTROL:
            continue
        size = sum(map(hlo.size, instruction.shapes)) + sum(map(hlo.size, module.operand_shapes(instruction)))
        # A product with the slices around it has no name of its own.
        inner = [instruction, *(one for one, _ in module.inner(instruction))]
        op_name = next((one.op_name for one in inner if one.op_name), "")
        target = next((one.target for one in inner if one.target), "")
        sums = found[*part_of(op_name), target or op_name.rpartition("/")[2] or instruction.opcode]
        sums[0] += size * times
        sums[1] += times
    keys = "phase", "scope", "does"
    rows = [dict(zip(keys, part, strict=True)) | {"bytes": b, "kernels": n} for part, (b, n) in found.items()]
    return sorted(rows, key=lambda row: -row["bytes"])


def measure(arguments) -> dict:
    aot.use_cpu(1)
    xla.configure()
    target = aot.target(arguments.device)
    config = plain(configuration.load(arguments.config, arguments.overrides))
    made, _, how = traced(config, target, 1, arguments.segments)
    program = compiled(made, target, 1)
    rows = moved(hlo.module(program.hlo))
    for row in rows[: arguments.top]:
        text = "{bytes:16,} bytes  {kernels:5} kernels  {phase:9} {scope:40} {does}"
        print(text.format(**row), file=sys.stderr)
    tokens = config.train.rows * config.data.sequence
    return {"how": how, "tokens": tokens, "bytes": sum(row["bytes"] for row in rows), "parts": rows}


main = harness.program(
    __doc__,
    measure,
    harness.option("--device", default="h200", help=f"one of {', '.join(aot.TARGETS)}"),
    harness.option("--segments", type=int, default=DOCUMENTS, help="most documents in a row"),
    harness.option("--top", type=int, default=30, help="rows to print; the record has all"),
)


if __name__ == "__main__":
    sys.exit(main())
