"""Are the steps of one commit as fast as those of another? Both in turns, in one process, on one state."""

import dataclasses
import sys

import blocks
import comparison
from suites.rows import Bar, Block, Row, Setup, lines_of

KEPT = "remat.keep_parameters=true"
FSDP = "mesh.fsdp=2,train.rows=4"
TENSOR = "mesh.fsdp=1,mesh.tensor=2,kernels.collective_matmul"
BOTH = ("step@old", "step")
SLOWER = (Bar("of_old", 0.99, "{:.3g} × the other commit's tokens per second"),)
PAIRS = {
    "fsdp_kept": f"{FSDP},{KEPT},mesh.transfers=collectives",
    "fsdp_copies": f"{FSDP},{KEPT},mesh.transfers=copies",
    "tensor": f"{TENSOR}=none",
    "tensor_fused": f"{TENSOR}=fused",
}


def both(*names: str) -> tuple[str, ...]:
    """Returns contenders of both commits."""
    return tuple(f"{name}{side}={PAIRS[name]}" for name in names for side in ("@old", ""))


def lacks_old(setup: Setup) -> str:
    """Returns what a row of two commits says where there is one; empty where both are there."""
    return "" if setup.old else "give the other commit's files with --old"


@dataclasses.dataclass(frozen=True)
class InTurns(Row):
    """Contenders of steps_in_turns.py. documents: in a row of random tokens. steps: of a turn. warmup:
    seconds of all that take turns, beside their first steps. timed: of each. seconds: of the row."""

    contenders: tuple[str, ...] = BOTH
    documents: int = 12
    steps: int = 10
    warmup: float = 20.0
    timed: float = 40.0
    seconds: float = 240.0
    common: str = ""

    def wanted(self, done):
        return [Block("in_turns", 1, self.seconds)]

    def refuses(self, setup):
        return lacks_old(setup) if any("@old" in contender for contender in self.contenders) else ""

    def command(self, name, setup):
        script = [sys.executable, str(blocks.HERE / "measure" / "steps_in_turns.py"), *setup.words(self)]
        named = [word for contender in self.contenders for word in ("--contender", contender)]
        counts = ["--documents", str(self.documents), "--steps", str(2 if setup.tiny else self.steps)]
        old = ["--old", str(setup.old)] if setup.old else []
        return [*script, *named, *counts, *old, *setup.seconds(self.warmup, self.timed)]

    def found(self, setup, done):
        for line in lines_of(done, "in_turns"):
            of = line["contenders"]
            ratios = [row["over_old"]["ratio"] for row in of.values() if "over_old" in row]
            spread = max(row["spread"] for row in of.values())
            return {"of_old": min(ratios, default=None), "spread": spread, "contenders": of}
        return {}

    def details(self, found):
        lines = ["| contender | tokens/s | / the first | / the other commit | A-A |", "|---|---|---|---|---|"]
        for name, row in found.get("contenders", {}).items():
            over = row.get("over_old", {}).get("ratio", "")
            cells = f"{row['tokens_per_second']:,.0f} | {row['ratio']} | {over} | {row['spread']:.2%}"
            lines.append(f"| {name} | {cells} |")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Compiled(Row):
    """How long both commits compile a step for an H200 that need not be here, and its peaks, in a process of
    its own each, in turns; the quickest counts."""

    rounds: int = 3
    common: str = ""
    products = ()

    def wanted(self, done):
        return [Block(side, turn + 1, 60.0) for turn in range(self.rounds) for side in ("old", "new")]

    def refuses(self, setup):
        return lacks_old(setup)

    def command(self, name, setup):
        script = [sys.executable, str(blocks.HERE / "measure" / "compile_time.py"), *setup.words(self)]
        return ["env", "JAX_PLATFORMS=cpu", *script, *(["--tree", str(setup.old)] if name == "old" else [])]

    def found(self, setup, done):
        sides = {side: lines_of(done, side) for side in ("old", "new")}
        if not all(sides.values()):
            return {}
        old, new = (min(of, key=lambda line: line["compile_seconds"]) for of in sides.values())
        of = {f"{key}_ratio": round(new[key] / old[key], 5) for key in ("compile_seconds", "peak_device")}
        return of | {"spread": comparison.spread([line["compile_seconds"] for line in sides["new"]])}


EXACT = "optim.clip_rule=exact offload.level=optimizer offload.fraction=0.65"
ALONE = ("alone@alone=mesh.fsdp=1", f"alone_kept@alone=mesh.fsdp=1,{KEPT}", f"fsdp={FSDP}")
PROJECTIONS = "remat.policy=projections model.loop=unroll"
EIGHT = ("llama3_8b_8layer", PROJECTIONS)
THIRTY_TWO = ("llama3_8b_one_gpu", "remat.policy=gate model.loop=unroll")
LONGER = (
    Bar("compile_seconds_ratio", 1.1, "{:.3g} × the other commit's seconds to compile", most=True),
    Bar("peak_device_ratio", 1.01, "{:.3g} × its peak on the device", most=True),
)
HOST = {"steps": 3, "warmup": 0.0, "seconds": 500}
TWO = {"warmup": 10.0, "seconds": 500, "gpus": 2, "named": True}
# fmt: off
ROWS = {
    "8layer_packed": InTurns("8 layers of Llama 3 8B, 12 documents a row", *EIGHT, SLOWER),
    "8layer_causal": InTurns("the same, one document a row", *EIGHT, SLOWER, documents=1, warmup=8.0),
    "8layer_fp8": InTurns("8 layers in FP8", EIGHT[0], f"{PROJECTIONS} precision.matmul=fp8", SLOWER,
                          warmup=8.0),
    "32layer": InTurns("all 32 layers", *THIRTY_TWO, SLOWER, steps=4, warmup=8.0),
    "8b_64k": InTurns("Llama 3 8B, state on the host", "llama3_8b", "", SLOWER, **HOST),
    "8b_64k_exact": InTurns("the same, clipped exactly", "llama3_8b", EXACT, SLOWER, **HOST),
    "fsdp": InTurns("two GPUs beside single ones", *EIGHT, SLOWER, steps=5, **TWO,
                    contenders=(*ALONE, *both("fsdp_kept", "fsdp_copies"))),
    "tensor": InTurns("tensor parallelism on two GPUs", *EIGHT, SLOWER, steps=9, **TWO,
                      contenders=both("tensor", "tensor_fused")),
    "compile_8layer": Compiled("compiling 8 layers", *EIGHT, LONGER, named=True),
    "compile_32layer": Compiled("compiling all 32", *THIRTY_TWO, LONGER, named=True),
    "compile_8b_64k": Compiled("compiling Llama 3 8B", "llama3_8b", "", LONGER, named=True),
}
# fmt: on
NOTES = """\
Needs --old FOLDER, the other commit's files (git worktree add build/old OLD). Steps of both take turns in one
process and hand on one state; batches are random tokens, the same for both. A ratio is the least of a row's.
"""
