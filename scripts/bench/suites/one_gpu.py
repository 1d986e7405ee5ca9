"""One H200 and the shape of Llama 3 8B cut to 8 layers: jaxthru, its peers, and what packed rows save."""

import comparison
from suites.race import Race

SHAPE = ("llama3_8b_8layer", "")
FP8 = ("llama3_8b_8layer", "precision.matmul=fp8")
HF = ("hf", "hf_blocks", "hf_flash", "hf_autotune", "hf_float32_residual")


class Packed(Race):
    """Packed rows beside causal ones: what they save, of what the attention kernels alone predict."""

    def found(self, setup, done):
        told = super().found(setup, done)
        return told | {"saving": comparison.packed_saving(told["contenders"], done, self.layers)}

    def details(self, found):
        saving = (
            "packed rows: {rate_over_causal:.3f} of the causal rate; {measured_milliseconds:.1f} ms saved of "
        )
        saving += "{predicted_milliseconds:.1f} ms predicted ({measured_over_predicted:.0%})"
        told = [super().details(found), *([saving.format(**found["saving"])] if found["saving"] else [])]
        return "\n\n".join(told)


# fmt: off
ROWS = {
    "causal": Race("causal rows", *SHAPE, common="", against=("hf", "torchtitan"),
                   beside=("hf_default", "plain_jax")),
    "fp8": Race("causal rows in FP8", *FP8, common="", against=("torchtitan_fp8",)),
    "packed": Packed("packed rows", *SHAPE, common="", own="jaxthru_packed", beside=("jaxthru", "attention")),
    "packed_fp8": Race("packed rows in FP8", *FP8, common="", own="jaxthru_packed", named=True),
    # Other settings of the peers, to find their best.
    "peers": Race("the peers' settings", *SHAPE, common="", named=True,
                  against=(*HF, "torchtitan", "torchtitan_whole", "torchtitan_float32_residual")),
    "peers_fp8": Race("the peers' settings in FP8", *FP8, common="", named=True,
                      against=("hf_fp8", "torchtitan_fp8", "torchtitan_fp8_whole", "torchtitan_fp8_rowwise")),
}
# fmt: on
NOTES = """\
A ratio is bold if it differs from 1 by more than twice the larger A-A spread. MFU counts needed FLOPs over
the data sheet's dense bf16 peak, in FP8 too. `of GEMM` is the share of this run's sustained product of 8192
cubed in the same precision; the FP8 steps compute attention and the output layer in bf16 too, and add up in
float32 in their backward passes, which the FP8 product does not.
All have float32 master weights and moments, clipping, a loss mask and a finite check that skips the update.
Causal contenders take the same rows of real tokens. In jaxthru_packed tokens attend within their documents,
so its ratio to causal rows is one of tokens, not of FLOPs.
hf: masks are left out, so that attention is cuDNN's causal kernel, and the residual stream is bf16; whole
logits, which the compiler fuses. hf_default: the masks and the float32 residual stream that its users get.
"""
