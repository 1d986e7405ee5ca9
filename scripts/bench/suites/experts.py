"""Experts on one GPU: grouped matmuls against dense ones, whole layers, and what PyTorch makes of them."""

import dataclasses
import shlex
import sys
from pathlib import Path

import blocks
import comparison
import harness
from suites.commits import InTurns
from suites.race import Race
from suites.rows import AUTO, TINY, Bar, Block, Row, Setup, lines_of, rate

OWN = ("mosaic_gpu", "triton", "xla", "reference")
Rates = dict[str, dict[str, float]]
"""{shape or call: {contender: TFLOP/s}}."""


@dataclasses.dataclass(frozen=True)
class Timed(Row):
    """What measure/kernel.py knows by this name, timed in turns in one process; and the same by PyTorch in
    another. shapes: a group of the operation's. part: of what the peer prints. seconds: of our block, about.
    """

    config: str = ""
    common: str = ""
    operation: str = ""
    shapes: str = ""
    part: str = ""
    seconds: float = 90.0
    products, reads, small = (), False, ""

    def wanted(self, done: list[dict]) -> list[Block]:
        return [Block("ours", 1, self.seconds), Block("torch", 1, 60.0)]

    def check(self, setup: Setup) -> None:
        """Nothing of it can be set."""

    def program(self, setup: Setup, *more: object) -> list[str]:
        """Returns the command line of measure/kernel.py."""
        script = str(blocks.HERE / "measure" / "kernel.py")
        words = [self.operation, "--shape", "tiny" if setup.tiny else self.shapes, *map(str, more)]
        if not setup.tiny:
            return [sys.executable, script, *words]
        brief = ["--warmup-seconds", "0", "--timed-seconds", "0"]
        return ["env", "JAX_PLATFORMS=cpu", sys.executable, script, *words, *brief]

    def command(self, name: str, setup: Setup) -> list[str]:
        if name == "torch":
            words = ["--part", self.part, *(["--tiny"] if setup.tiny else [])]
            return [setup.torch_python, "-m", "peers.torch_experts", *words]
        table = table_of(setup)
        return self.program(setup, *(["--table", table] if table.exists() else []))

    def of_torch(self, line: dict) -> Rates:
        """Returns the rates of what the peer printed, {shape: {contender: rate}}."""
        raise NotImplementedError

    def of_ours(self, line: dict) -> Rates:
        """Returns the rates of what measure/kernel.py printed."""
        raise NotImplementedError

    def found(self, setup: Setup, done: list[dict]) -> dict:
        rates: Rates = {}
        for name, read in (("ours", self.of_ours), ("torch", self.of_torch)):
            for line in lines_of(done, name):
                for shape, of in read(line).items():
                    rates[shape] = rates.get(shape, {}) | of
        found = {"rates": rates, "spread": None}
        for shape, of in rates.items():
            own = max((of[name] for name in OWN if name in of), default=None)
            if own is not None:
                others = {name: rate for name, rate in of.items() if name not in OWN and rate}
                found |= {shape: own} | {f"{shape} / {name}": own / rate for name, rate in others.items()}
        return found

    def details(self, found: dict) -> str:
        rates = found["rates"]
        names = list(dict.fromkeys(name for of in rates.values() for name in of))
        lines = [[shape, *(str(of.get(name, "")) for name in names)] for shape, of in rates.items()]
        return comparison.markdown(("TFLOP/s", *names), lines)


def tflops(contenders: dict, *within: str) -> dict[str, float]:
    """Returns the rates of those that ran. within: keys under which each says it."""
    found = {}
    for name, line in contenders.items():
        for key in within:
            line = line.get(key) if isinstance(line, dict) else None
        if isinstance(line, dict) and "tflops" in line:
            found[name] = line["tflops"]
    return found


class Calls(Timed):
    """Grouped matmuls, each beside a dense one of as many FLOPs in the same process."""

    def of_ours(self, line):
        return {shape: tflops(of) for shape, of in line["contenders"].items()}

    def of_torch(self, line):
        names = {"dense": "torch_dense"}  # of its own process
        return {
            shape: {names.get(name, name): rate for name, rate in tflops(of).items()}
            for shape, of in line["calls"].items()
        }


class Float8(Calls):
    """All grouped matmuls of a layer, forward and backward, with products in float8 beside all in bfloat16:
    for each model the time of these over that of those."""

    def wanted(self, done):
        return [Block("ours", 1, self.seconds)]

    def refuses(self, setup):
        return "its kernels are of Hopper" if setup.tiny else ""

    def command(self, name, setup):
        table = table_of(setup)
        times = ["--warmup-seconds", "1", "--timed-seconds", "0.4"]
        return self.program(setup, *times, *(["--table", table] if table.exists() else []))

    def found(self, setup, done):
        found = super().found(setup, done)
        times: dict[str, list[float]] = {}
        for case, of in found["rates"].items():
            model = case.removeprefix("float8_").rsplit("_", 2)[0]  # of MODEL_up_product
            plain = max((rate for name, rate in of.items() if name in OWN), default=None)
            if plain is None:
                continue
            fastest = max(rate for name, rate in of.items() if name in OWN or name.startswith("float8"))
            share = 2.0 if "_up_" in case else 1.0  # gate and up are twice the down map's FLOPs
            both = times.setdefault(model, [0.0, 0.0])
            both[0] += share / plain
            both[1] += share / fastest
        return found | {model: plain / float8 for model, (plain, float8) in times.items()}


class Layers(Timed):
    """Whole layers, forward and backward; `shape_forward` is the forward pass alone."""

    passes = (("", "both"), ("_forward", "forward"))

    def found(self, setup, done):
        found = super().found(setup, done)
        for line in lines_of(done, "ours"):
            for shape, of in line["contenders"].items():
                whole = [of[name]["both"]["milliseconds"] for name in OWN if "both" in of.get(name, {})]
                if whole and (rest := of.get("around", {}).get("around")):
                    found[f"{shape}_around"] = rest["milliseconds"] / min(whole)
        return found

    def of_ours(self, line):
        shapes = line["contenders"]
        return {f"{name}{more}": tflops(shapes[name], key) for name in shapes for more, key in self.passes}

    def of_torch(self, line):
        found = {}
        for name, forms in line["layers"].items():
            for more, key in self.passes:
                rates = tflops(forms, key)
                found[name + more] = {"torch": max(rates.values())} if rates else {}
        return found


class TunedTiles(Calls):
    """Hopper's kernel in other tiles, and the table of the fastest, which the rows after it take."""

    def wanted(self, done):
        return [Block("ours", 1, self.seconds)]

    def refuses(self, setup):
        return "its kernels are of NVIDIA GPUs" if setup.tiny else ""

    def command(self, name, setup):
        folder = setup.kept("tiles")
        record = folder / f"{self.shapes}.json"
        times = ["--warmup-seconds", "1", "--timed-seconds", "0.4"]
        measure = self.program(setup, "--tiles", *times, "--output", record)
        make = [sys.executable, str(blocks.HERE / "measure" / "experts_tiles.py"), str(record)]
        typed = f"{shlex.join(measure)} >&2 && {shlex.join([*make, '--table', str(table_of(setup))])}"
        return ["bash", "-c", f"mkdir -p {shlex.quote(str(folder))} && {typed}"]

    def found(self, setup, done):
        entries = [of for line in lines_of(done, "ours") for of in line["entries"].values()]
        table = {key: entry for of in entries for key, entry in of.items()}
        slower = sum(not entry["faster"] for entry in table.values()) if table else None
        return {"slower_shapes": slower, "entries": table, "spread": None}

    def details(self, found):
        lines = []
        for key, of in found["entries"].items():
            m, n, cluster = (of["tiles"][name] for name in ("m", "n", "cluster"))
            shared = "w" if of["tiles"]["shares_w"] else ""
            others = cluster, shared, of["tiles"]["late"], of["microseconds"], of["faster"]
            lines.append([key, f"{m} × {n}", *map(str, others)])
        return comparison.markdown(("shape", "tiles", "cluster", "shares", "late", "µs", "faster"), lines)


def table_of(setup: Setup) -> Path:
    """Returns the file of the tiles that were found in this run, which may not exist."""
    return setup.kept("tiles") / "tile_table.json"


def over(what: str, other: str, value: float, stretch: float | None = None, of: str = "") -> Bar:
    return Bar(f"{what} / {other}", value, f"{what}: {{:.2f}} × {of or other}", stretch)


@dataclasses.dataclass(frozen=True)
class Whole(Race):
    """A whole model on packed rows of real text, its router as it comes; alone, for no peer trains it on one
    GPU."""

    own: str = "jaxthru_packed"
    small: str = (
        f"{TINY} model.experts=4 model.top_k=2 model.expert_mlp=64 offload.level=none kernels.attention=auto"
    )


@dataclasses.dataclass(frozen=True)
class Balance(InTurns):
    """Steps whose tokens go where the router says, of real text, and to all experts alike, on one state."""

    contenders: tuple[str, ...] = ("natural", "forced=model.force_load_balancing=true")
    documents: int = 0
    steps: int = 5
    timed: float = 20.0
    seconds: float = 170.0
    small: str = Whole.small

    def refuses(self, setup):
        return ""

    def found(self, setup, done):
        found = super().found(setup, done)
        of = found.get("contenders", {})
        if set(of) == {"natural", "forced"}:
            found["apart"] = abs(1 - of["forced"]["ratio"])
        return found

    def details(self, found):
        columns = {"tokens_per_second": ",.0f", "ratio": ".4f", "expert_load_max": ".2f", "spread": ".2%"}
        lines = [
            [name, *(comparison.shown(row.get(key), form) for key, form in columns.items())]
            for name, row in found.get("contenders", {}).items()
        ]
        return comparison.markdown(("routing", "tokens/s", "/ natural", "load max ÷ mean", "A-A"), lines)


@dataclasses.dataclass(frozen=True)
class StateLoss(Row):
    """A mixture's loss with offloaded 8-bit moments, beside that of resident float32, over several seeds."""

    config: str = ""
    common: str = ""
    seconds: float = 400.0
    products = ()
    small: str = (
        f"{TINY} model.experts=4 model.top_k=2 model.expert_mlp=32 precision.compute=float32 evaluate.rows=4"
    )

    def wanted(self, done):
        return [Block("seeds", 1, self.seconds)]

    def check(self, setup):
        """Its configuration is the script's own."""

    def command(self, name, setup):
        script = str(blocks.HERE / "measure" / "experts_state_loss.py")
        counts = ["--steps", "20", "--seeds", "2"] if setup.tiny else ["--stop-after", f"{self.seconds:g}"]
        return [sys.executable, script, *harness.set_words(setup.settings(self)), *counts]

    def found(self, setup, done):
        for line in lines_of(done, "seeds"):
            of = line["offloaded_over_float32"]
            error = of["held_out"]["standard_error"]
            return {"apart": abs(of["held_out"]["mean"]), "spread": error, "seeds": line["seeds"]} | of
        return {}

    def details(self, found):
        parts = [key for key in ("all_steps", "last_50_steps", "held_out") if key in found]
        lines = [
            [key, f"{found[key]['mean']:+.2%}", comparison.shown(found[key]["standard_error"], ".2%")]
            for key in parts
        ]
        return comparison.markdown(("loss of", "/ float32 - 1", "standard error"), lines)


DENSE = "cuBLAS's dense product"
CALLS = (
    over("up_product", "dense", 0.85, 0.90, DENSE),
    over("up_product", "tokamax", 1.3),
    over("up_sum", "dense", 0.85, 0.90, DENSE),
    over("up_sum", "tokamax", 4.0),
    *(over(what, "dense", 0.78, of=DENSE) for what in ("down_product", "up_turned", "down_turned")),
    over("down_sum", "dense", 0.85, 0.90, DENSE),
)
LAYERS = (
    Bar("qwen3_30b", 410.0, "{:.0f} TFLOP/s", 450.0),
    Bar("wide", 430.0, "wide: {:.0f} TFLOP/s", 510.0),
    Bar("qwen3_30b_around", 0.12, "{:.1%} of it router, sort, gather and combine", 0.08, most=True),
)
ROWS = {
    "tiles": TunedTiles(
        "tiles of Hopper's grouped matmuls",
        bars=(Bar("slower_shapes", 0, "{:.0f} shapes where another way is faster", most=True),),
        operation="grouped_matmul",
        shapes="qwen3_30b",
        seconds=170.0,
    ),
    **{
        f"tiles_{model}": TunedTiles(
            f"the same for {name}'s experts",
            operation="grouped_matmul",
            shapes=model,
            seconds=150.0,
            named=True,
        )
        for model, name in (("olmoe", "OLMoE"), ("mixtral", "Mixtral"))
    },
    "calls": Calls(
        "131,072 rows of 128 experts, 2,048 → 1,536 and 768 → 2,048, random counts",
        bars=CALLS,
        operation="grouped_matmul",
        shapes="qwen3_30b",
        part="calls",
    ),
    "float8": Float8(
        "a layer's grouped matmuls, products in float8 and sums in bfloat16",
        bars=(
            Bar("mixtral", 1.25, "Mixtral's: {:.2f} × bfloat16", 1.4),
            Bar("qwen3_30b", 1.05, "Qwen3-30B's: {:.2f} × bfloat16, below which its experts stay in that"),
        ),
        operation="grouped_matmul",
        shapes="float8",
        seconds=170.0,
    ),
    "layers": Layers(
        "a whole layer, forward and backward, 32,768 tokens",
        bars=LAYERS,
        operation="experts",
        shapes="all",
        part="layers",
    ),
    "olmoe": Whole("OLMoE-1B-7B whole, resident, rows of 4,096", "olmoe_1b_7b", bars=(rate(50_000, 55_000),)),
    "qwen3_12layer": Whole(
        "Qwen3-30B-A3B, 12 layers, resident", "qwen3_30b_a3b_12layer", bars=(rate(52_000, 57_000),)
    ),
    "balance": Balance(
        "natural against forced balance, the 12 layers",
        "qwen3_30b_a3b_12layer",
        bars=(Bar("apart", 0.03, "{:.1%} apart", most=True),),
        common=AUTO,
    ),
    "state_loss": StateLoss(
        "300 steps of a mixture of 0.4 B active parameters: offloaded 8-bit moments against float32",
        bars=(Bar("apart", 0.002, "{:.2%} apart", most=True),),
        named=True,
    ),
    # As its configuration has it: what `auto` would take is a row of its own.
    "qwen3_30b": Whole(
        "Qwen3-30B-A3B whole, 64k tokens a step", "qwen3_30b_a3b", bars=(rate(13_011, 15_000),), common=""
    ),
    "qwen3_30b_auto": Whole("the same, as `auto` has it", "qwen3_30b_a3b", bars=(rate(13_011, 15_000),)),
}
NOTES = """\
`calls` beside a dense product of as many FLOPs in the same process, in turns; PyTorch in a process of its
own, in turns with its own dense product. `sum` is the gradient of the matrices, `turned` that of the rows,
`into` a sum into a float32 buffer. Where `tiles` has run, its table is what the rows after it take: it lies
beside its record, and belongs into pallas_kernels/grouped_matmul/. Whole models train on packed rows of real
text; their tokens per second are all tokens over all seconds. `balance` times steps in turns that hand on
one state; what is apart is the forced one's rate.
"""
