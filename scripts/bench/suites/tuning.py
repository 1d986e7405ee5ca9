"""Tuning an 8B by low-rank adapters on one GPU: jaxthru beside Hugging Face with PEFT, and its first step."""

from suites.race import Contender, Race
from suites.rows import Bar, rate, times
from suites.runs import Starts

SHAPE = "llama3_8b_one_gpu"
# Rank 16 on all linear layers; rows of 4,096 tokens, weights drawn from the seed.
LORA = "lora.rank=16 lora.alpha=32 data.sequence=4096 optim.learning_rate=1e-4 optim.weight_decay=0"
FP8 = "lora.base=fp8"


class Tuning(Race):
    """A race of adapters: FLOPs are those that they need, without gradients of the base."""

    def found(self, setup, done):
        told = super().found(setup, done)
        guide = told["contenders"].get("peft_guide", {}).get("tokens_per_second")
        own = told.get("tokens_per_second")
        return told | {"over_guide": own / guide if own and guide else None}


# fmt: off
PEERS = {
    "peft": Contender("hugging_face_lora", layer_seconds=5),
    "peft_blocks": Contender("hugging_face_lora", "--compile blocks"),
    "peft_flash": Contender("hugging_face_lora", "--attention flash", layer_seconds=5),
    "peft_checkpointed": Contender("hugging_face_lora", "--compile blocks --checkpoint full",
                                   instead_of=("peft", "peft_blocks", "peft_flash")),
    "peft_guide": Contender("hugging_face_lora", "--masks whole", layer_seconds=5),
}
OF_GUIDE = Bar("over_guide", 1.15, "{:.3g} × PEFT as its guide has it")
AT_BEST = ("peft_blocks", "peft", "peft_flash", "peft_checkpointed")


def tuning(about: str, rows: int, *bars: Bar, more: str = "", **how) -> Tuning:
    """Returns a race of so many rows a step."""
    settings = f"{LORA} train.rows={rows} {more}".strip()
    return Tuning(about, SHAPE, settings, bars, extra=PEERS, **how)


ROWS = {
    "lora_8b": tuning("8B, rank 16, 4 rows of 4,096", 4, rate(16_000), times(1.05), OF_GUIDE,
                      against=AT_BEST, beside=("peft_guide",)),
    "lora_8b_2_rows": tuning("the same, 2 rows", 2, times(1.05), against=AT_BEST, beside=("peft_guide",),
                             named=True),
    "lora_8b_fp8": tuning("the same beside a base in FP8, 4 rows", 4, rate(20_000), more=FP8),
    "lora_8b_packed": tuning("packed rows", 4, own="jaxthru_packed", named=True),
    # Of published weights, where `--set model.pretrained=FOLDER` names some (measure/random_folder.py).
    "lora_8b_first_step": Starts("8B: the first step, 4 rows", SHAPE, f"{LORA} train.rows=4",
                                 (Bar("second", 90, "{:.3g} s to step 1 of the second start", most=True),),
                                 seconds=400.0),
}
# fmt: on
NOTES = """\
Both have the base frozen in bfloat16, adapters of rank 16 on all linear layers with float32 masters and
moments, clipping, a loss mask and a finite check that skips the update, and take the same rows of real
tokens. FLOPs are those that adapters need: no gradients of the base's weights. peft: masks are left out, so
that attention is cuDNN's causal kernel, and the loss is compiled with the LM head. peft_guide: the masks that
its users get. first step: from the start of the process, with all that is compiled in the cache.
"""
