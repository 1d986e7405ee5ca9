"""jaxthru beside its peers on one GPU: the same shape, tokens and device, one table with ratios.

    python scripts/bench/one_gpu.py --output FILE [--contenders a,b,...] [--stop-after SECONDS] [--gpus N]

Every contender runs in a process of its own, once, then all again, and so on: A-B-A-B. A block is 20 s of
warm-up under load and 20 s timed, so that two rounds time each contender for 40 s. Finished blocks are kept
in FILE; the same command continues with those that are missing. On a host with several GPUs, N of them work
at once, one block each; a contender's next round is on the next GPU, so that what one GPU is faster than
another shows as A-A spread and favours nobody.
"""

import argparse
import dataclasses
import functools
import shlex
import sys
import tempfile
from pathlib import Path

import blocks
import comparison
import harness

from jaxthru import config as configuration
from jaxthru.models import llama
from jaxthru.runtime import hardware


@dataclasses.dataclass(frozen=True)
class Contender:
    """script: ours, in this folder; module: a peer's. arguments: as one types them."""

    script: str = ""
    module: str = ""
    arguments: str = ""
    precision: str = "bf16"

    @property
    def is_peer(self) -> bool:
        return bool(self.module)


# fmt: off
CONTENDERS = {
    "gemm_bf16": Contender("gemm.py", arguments="--dtype bf16"),
    "gemm_fp8": Contender("gemm.py", arguments="--dtype fp8", precision="fp8"),
    "jaxthru_causal": Contender("step.py", arguments="--causal-rows {tokens}"),
    "hf": Contender(module="peers.hugging_face"),
    "hf_default": Contender(module="peers.hugging_face", arguments="--residual float32 --masks whole"),
    "jaxthru_packed": Contender("step.py"),
    "torchtitan": Contender(module="peers.torchtitan"),
    "plain_jax": Contender(module="peers.plain_jax"),
    "jaxthru_fp8": Contender("step.py", arguments="--causal-rows {tokens} --set precision.matmul=fp8",
                             precision="fp8"),
    "torchtitan_fp8": Contender(module="peers.torchtitan", arguments="--float8 tensorwise", precision="fp8"),
    "attention": Contender("attention_saving.py"),
    # Run when named: other settings of the peers, to find their best.
    "jaxthru_fp8_packed": Contender("step.py", arguments="--set precision.matmul=fp8", precision="fp8"),
    "hf_fp8": Contender(module="peers.hugging_face", arguments="--float8 tensorwise", precision="fp8"),
    "hf_blocks": Contender(module="peers.hugging_face", arguments="--compile blocks"),
    "hf_flash": Contender(module="peers.hugging_face", arguments="--attention flash"),
    "hf_autotune": Contender(module="peers.hugging_face", arguments="--mode max-autotune-no-cudagraphs"),
    "hf_float32_residual": Contender(module="peers.hugging_face", arguments="--residual float32"),
    "torchtitan_whole": Contender(module="peers.torchtitan", arguments="--compile whole"),
    "torchtitan_float32_residual": Contender(module="peers.torchtitan", arguments="--residual float32"),
    "torchtitan_fp8_whole": Contender(module="peers.torchtitan", precision="fp8",
                                      arguments="--float8 tensorwise --compile whole"),
    "torchtitan_fp8_rowwise": Contender(module="peers.torchtitan", arguments="--float8 rowwise",
                                        precision="fp8"),
}
# fmt: on
DEFAULT = list(CONTENDERS)[: list(CONTENDERS).index("attention") + 1]
BASE = "hf"
NOTES = """\
tok/s is all tokens over all seconds, `step ms` the median. A ratio in bold is claimed: it differs from 1 by
more than twice the larger A-A spread. MFU counts needed FLOPs over the data sheet's dense bf16 peak, fp8
too. `of GEMM` is the share of this run's sustained product of 8192 cubed in the same precision; the fp8 steps
compute attention and the output layer in bf16 too, and add up in float32 in their backward passes, which the
fp8 product does not.
All have float32 master weights and moments, clipping, a loss mask and a finite check that skips the update.
Causal contenders take the same rows of real tokens. In jaxthru_packed (and _fp8_packed) tokens attend within
their documents, so its ratio to the others is one of tokens, not of FLOPs: the peers' own document masks
(Hugging Face: whole masks, flex attention, the flash-attn package; torchtitan: flex and varlen attention) are
not run here.
hf: masks are left out, so that attention is cuDNN's causal kernel, and the residual stream is bf16; whole
logits, which the compiler fuses. hf_default: the masks and the float32 residual stream that its users get.
"""


def command_of(contender: Contender, arguments: argparse.Namespace, tokens: Path) -> list[str]:
    """Returns the command line of one block."""
    words = shlex.split(contender.arguments.replace("{tokens}", str(tokens)))
    words += ["--warmup-seconds", f"{arguments.warmup_seconds:g}"]
    words += ["--timed-seconds", f"{arguments.timed_seconds:g}"]
    if contender.is_peer:
        python = sys.executable if contender.module == "peers.plain_jax" else arguments.torch_python
        shape = harness.Shape.of(arguments.resolved.model)
        return [python, "-m", contender.module, *shape.flags(), "--tokens", str(tokens), *words]
    if contender.script != "gemm.py":
        words += ["--config", arguments.config, *harness.set_words(arguments.overrides)]
    if contender.script == "step.py":
        words.append("--keep-compiled")
    return [sys.executable, str(blocks.HERE / contender.script), *words]


def summarise(record: dict, config: configuration.RunConfig) -> str:
    """Adds the summary to the record and returns what is printed of it."""
    done = record["blocks"]
    kind = comparison.device_kind(done)
    needed = functools.partial(llama.train_flops, config.model)
    precision = {name: contender.precision for name, contender in CONTENDERS.items()}
    peers = [name for name, contender in CONTENDERS.items() if contender.is_peer and name != "plain_jax"]
    found = comparison.rows(done, precision, needed, hardware.data_sheet_flops(kind))
    rated = [name for name, row in found.items() if "tokens_per_second" in row]
    record["summary"] = {
        "rows": found,
        "ratios": {
            own: {other: comparison.ratio(found[own], found[other]) for other in rated if other != own}
            for own in rated
        },
        "packed_saving": comparison.packed_saving(found, done, config.model.layers),
    }
    told = [comparison.table(found, list(CONTENDERS), BASE, peers), NOTES]
    if saving := record["summary"]["packed_saving"]:
        told.append(
            "packed rows: {rate_over_causal:.3f} of the causal rate; {measured_milliseconds:.1f} ms saved of "
            "{predicted_milliseconds:.1f} ms predicted ({measured_over_predicted:.0%})".format(**saving)
        )
    return "\n\n".join(told + comparison.remarks(done))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--config", default=str(blocks.ROOT / "configs" / "llama3_8b_8layer.py"))
    add("--contenders", default=",".join(DEFAULT), help=f"of {', '.join(CONTENDERS)}")
    blocks.add_arguments(parser, 20.0, 20.0)
    arguments = parser.parse_args()
    names = blocks.chosen(parser, "--contenders", arguments.contenders, list(CONTENDERS))
    arguments.resolved = configuration.load(arguments.config, arguments.overrides)
    record = blocks.record_of("one_gpu", arguments, config=Path(arguments.config).stem)
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.npy"
        if comparison.missing(names, arguments.rounds, record["blocks"]):
            blocks.write_tokens(arguments.resolved, tokens)
        blocks.run_missing(
            record,
            names,
            arguments,
            lambda name: command_of(CONTENDERS[name], arguments, tokens),
            lambda: summarise(record, arguments.resolved),
        )
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
