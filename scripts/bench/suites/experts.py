"""Experts on one GPU: grouped matmuls against dense ones, whole layers, and what PyTorch makes of them."""

import dataclasses
import sys

import blocks
import comparison
import harness
from suites.commits import InTurns
from suites.expert_products import Calls, Float8, Float8Layers, Layers, TunedTiles
from suites.race import Race
from suites.rows import AUTO, TINY, TINY_EXPERTS, Bar, Block, Row, lines_of, rate


def over(what: str, other: str, value: float, stretch: float | None = None, of: str = "") -> Bar:
    return Bar(f"{what} / {other}", value, f"{what}: {{:.2f}} × {of or other}", stretch)


@dataclasses.dataclass(frozen=True)
class Whole(Race):
    """A whole model on packed rows of real text, its router as it comes; alone, for no peer trains it on one
    GPU."""

    own: str = "jaxthru_packed"
    small: str = TINY_EXPERTS


@dataclasses.dataclass(frozen=True)
class Balance(InTurns):
    """Steps whose tokens go where the router says, of real text, and to all experts alike, on one state."""

    contenders: tuple[str, ...] = ("natural", "forced=model.force_load_balancing=true")
    documents: int = 0
    steps: int = 5
    timed: float = 20.0
    seconds: float = 170.0
    small: str = Whole.small

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
    "float8_layer": Float8Layers(
        "Mixtral's whole layer, forward and backward, 32,768 tokens: in float8 over in bfloat16",
        bars=(Bar("mixtral / float8", 0.8, "{:.2f} of bfloat16's time", most=True),),
        operation="experts",
        shapes="float8",
        part="layers",
        seconds=100.0,
        named=True,
    ),
    "layers": Layers(
        "a whole layer, forward and backward, 32,768 tokens",
        bars=LAYERS,
        operation="experts",
        shapes="all",
        part="layers",
        seconds=160.0,
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
