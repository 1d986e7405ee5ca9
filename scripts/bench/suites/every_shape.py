"""Is jaxthru fast for every shape, from the first second, without tuning by hand? On one GPU."""

from suites.grid import Grid
from suites.race import Race
from suites.rows import Bar, Row, rate, times
from suites.runs import NearLimit, Starts, Untuned

HF = ("hf", "hf_blocks", "hf_flash", "hf_checkpointed")
APART = ("documents_flex", "documents_flex_blocks", "documents_varlen", "documents_varlen_blocks")
MAXTEXT = ("maxtext_unrolled", "maxtext_scanned")

QWEN3_06B = ("qwen3_0_6b", "train.rows=16 data.sequence=2048")
LLAMA_1B = ("llama3_2_1b", "train.rows=16 data.sequence=2048")
LLAMA_1B_32K = ("llama3_2_1b", "train.rows=1 data.sequence=32768")
QWEN3_4B_SHAPE = "model.layers=36 model.embed=2560 model.heads=32 model.mlp=9728"
QWEN3_4B = ("qwen3_0_6b", f"{QWEN3_4B_SHAPE} train.rows=4 data.sequence=2048")
QWEN3_4B_8K = ("qwen3_0_6b", f"{QWEN3_4B_SHAPE} train.rows=2 data.sequence=8192")
QWEN3_8B = ("qwen3_8b", "train.rows=2")
LAYERS_8 = ("llama3_8b_8layer", "")
LAYERS_32 = ("llama3_8b_one_gpu", "")
FP8 = "precision.matmul=fp8"


def fp8(shape: tuple[str, str]) -> tuple[str, str]:
    """Returns a shape with its products in FP8."""
    return shape[0], f"{shape[1]} {FP8}".strip()


def packed(about: str, shape: tuple[str, str], bar: Bar) -> Race:
    """Returns a race of packed rows against peers that keep documents apart, beside one that does not."""
    return Race(about, *shape, (bar,), own="jaxthru_packed", against=APART, beside=("hf",))


APART_BAR = "the fastest peer that keeps documents apart"
GRID = (
    Bar("ratio", 0.99, "{:.3g} × the grid's fastest point"),
    Bar("unfit", 0, "{:.0f} points that the plan let pass and that do not fit", most=True),
)


def starts(first: float, stretch: float | None = None) -> tuple[Bar, ...]:
    """Returns the bars of a first and a second start."""
    return (
        Bar("first", first, "{:.3g} s to step 1", stretch, most=True),
        Bar("second", 12, "{:.3g} s to step 1 of the second start", most=True),
    )


LIMIT = (
    Bar("slowest", 1.05, "{:.3g} × the median for the slowest of 40 steps", most=True),
    Bar("share_of_card", 0.92, "{:.1%} of the card's memory by XLA's peak"),
)
# With exact clipping the gradients wait for their norm: 8 bytes a parameter, and 36 B do not fit.
OFFLOAD = "optim.state=split_master_int8 optim.clip_rule=previous"

# fmt: off
ROWS: dict[str, Row] = {
    "qwen3_0_6b": Race("Qwen3-0.6B, 16 rows of 2,048, causal", *QWEN3_06B, (times(1.03, 1.05),), against=HF),
    "llama_1b": Race("Llama-3.2-1B, 16 rows of 2,048, causal", *LLAMA_1B, (times(1.03, 1.07),), against=HF,
                     beside=MAXTEXT),
    "llama_1b_peers": Race("Llama-3.2-1B, 16 rows of 2,048, causal, more peers", *LLAMA_1B, (times(1.03),),
                           against=("torchtitan", "hf_flash_blocks")),
    "llama_1b_packed": packed("Llama-3.2-1B, 16 rows of 2,048, packed", LLAMA_1B, times(1.10, of=APART_BAR)),
    "llama_1b_packed_32k": packed("Llama-3.2-1B, 1 row of 32,768, packed", LLAMA_1B_32K,
                                  times(1.15, of=APART_BAR)),
    "qwen3_4b": Race("Qwen3-4B, 4 rows of 2,048, causal", *QWEN3_4B, (times(1.03, 1.05),), against=HF),
    "qwen3_4b_8k": Race("Qwen3-4B, 2 rows of 8,192, causal", *QWEN3_4B_8K, (times(1.05, 1.10),), against=HF),
    "layers_8": Race("8 layers of Llama 3 8B, 2 rows of 8,192, causal", *LAYERS_8, (rate(38_000),),
                     against=("hf", "torchtitan", *MAXTEXT)),
    "layers_8_fp8": Race("8 layers of Llama 3 8B in FP8", *fp8(LAYERS_8), (rate(48_000, 48_800),),
                         against=("torchtitan_fp8", "hf_fp8")),
    "layers_32": Race("all 32 layers of Llama 3 8B, 2 rows of 8,192, packed", *LAYERS_32, (rate(10_500),),
                      own="jaxthru_packed"),
    "layers_32_fp8": Race("all 32 layers in FP8, packed", *fp8(LAYERS_32), (rate(13_500),),
                          own="jaxthru_packed"),
    "grid_qwen3_0_6b": Grid("auto, Qwen3-0.6B, 16 rows of 2,048", *QWEN3_06B, GRID),
    "grid_llama_1b": Grid("auto, Llama-3.2-1B, 16 rows of 2,048", *LLAMA_1B, GRID),
    "grid_qwen3_4b": Grid("auto, Qwen3-4B, 4 rows of 2,048", *QWEN3_4B, GRID, seconds=60),
    "grid_qwen3_4b_8k": Grid("auto, Qwen3-4B, 2 rows of 8,192", *QWEN3_4B_8K, GRID, seconds=60),
    "grid_layers_8": Grid("auto, 8 layers of Llama 3 8B, 2 rows of 8,192", *LAYERS_8, GRID),
    "offload_runs": Untuned("offload.level=auto, 6 shapes of 9 to 36 B drawn from the commit's hash",
                            "llama3_8b_8layer", OFFLOAD,
                            (Bar("as_they_should", 6, "{:.0f} of 6 run 10 steps"),)),
    "offload_refuses": Untuned("offload.level=auto, 2 shapes too large, drawn in the same way",
                               "llama3_8b_8layer", OFFLOAD,
                               (Bar("as_they_should", 2, "{:.0f} of 2 refused before data is prepared"),),
                               steps=0),
    "starts_llama_1b": Starts("starts, Llama-3.2-1B", *LLAMA_1B, starts(45, 30)),
    "starts_layers_8": Starts("starts, 8 layers of Llama 3 8B", *LAYERS_8, starts(45, 30)),
    "starts_unrolled_36": Starts("starts, Qwen3-4B, 36 layers unrolled", QWEN3_4B[0],
                                 f"{QWEN3_4B[1]} model.loop=unroll", starts(60), seconds=130),
    "starts_layers_32": Starts("starts, all 32 layers of Llama 3 8B", *LAYERS_32, starts(60), seconds=190),
    "near_limit": NearLimit("Qwen3-8B, 2 rows of 8,192, as `auto` fills the card", *QWEN3_8B, LIMIT),
}
# fmt: on
NOTES = """\
A ratio is one of tokens per second, all tokens over all seconds of the timed span, between the means of two
blocks each; the fastest peer is that of the first round, and those within 2 % of it ran twice, the others in
1 block. A second block finds compiled and tuned what the first one left, in all contenders. A-A is the larger
spread of two blocks of one contender; a ratio is claimed, in bold, if it differs from 1 by more than twice
that. All contenders have float32 master weights and moments, clipping, a loss mask and a finite check. In
packed rows all that keep documents apart time the same 16 batches, each of them equally often.
Peers recompute nothing unless all that keep everything ran out of memory; MaxText has no finite check, and
recomputes what its policies make it. In packed rows `hf` lets tokens attend across documents, and is no part
of the ratio. A row's record has the sustained matrix product of its run, and blocks of one commit alone.
"""
