"""Training with state in host memory, beside the same with all of it on the GPU, and beside peers."""

import dataclasses
import itertools
import statistics

import numpy as np
from comparison import shown
from suites.race import Contender, Race
from suites.rows import Bar, lines_of, times

from jaxthru.models import llama

CAUSAL = "--causal-rows {tokens}"
EXACT = "optim.clip_rule=exact"
FLOAT32 = "optim.state=split_master_float32"
TOKENS = {"16k": "train.rows=2 train.microbatches=1", "64k": "train.rows=8 train.microbatches=4"}
LONG = "data.sequence=32768 train.rows=1 train.microbatches=1"
# All state on the host; DeepSpeed too has the bfloat16 weights on the GPU, clips exactly and recomputes.
HOST, NONE = "offload.level=optimizer", "offload.level=none"
CUT = "model.layers=20"
HALF = "offload.fraction=0.48 offload.activations=none offload.host_gib=112 offload.staging_gib=0"
ONE_ROW = "train.rows=1 train.microbatches=1"
SMALL = Bar("peak_hbm_gib", 65, "{:g} GiB of HBM", most=True)
SLOWER = Bar("slower", 0.15, "{:.0%} slower than all on the GPU", most=True)
SLOWEST = Bar("slowest", 1.05, "{:g} × the median for the slowest step", most=True)
INPUTS = Bar("slower", 0.05, "{:.0%} slower than all on the GPU", most=True)
FALLS = Bar("falls", 1.0, "{:g} × the quarter before for the mean loss of a quarter", most=True)


def host(gib: float) -> Bar:
    return Bar("host_gib", gib, "{:g} GiB of host memory", most=True)


def mfu(share: float) -> Bar:
    return Bar("mfu", share, "{:.0%} MFU")


@dataclasses.dataclass(frozen=True)
class Offload(Race):
    """A race of one shape, whose own contender has state in host memory."""

    common: str = ""
    timed: tuple[float, float] = (20.0, 40.0)

    def found(self, setup, done):
        told, lines = super().found(setup, done), lines_of(done, self.own)
        own = told["contenders"].get(self.own, {})
        hosts = [each["host_gib"] for each in done if each["contender"] == self.own and each.get("host_gib")]
        losses = lines[-1].get("losses") if lines else None
        return told | {
            "parameters": llama.parameters(setup.config(self).model),
            "mfu": own.get("mfu"),
            "peak_hbm_gib": own.get("peak_hbm_gib"),
            "host_gib": statistics.fmean(hosts) if hosts else None,
            "slower": 1 / told["ratio"] - 1 if "ratio" in told else None,
            "slowest": slowest(lines),
            "falls": falls(losses) if losses else None,
        }

    def details(self, found):
        host, slow = shown(found["host_gib"], ".1f"), shown(found["slowest"], ".3f")
        own = f"{found['parameters']:,} parameters, {host} GiB of host memory"
        return f"{super().details(found)}\n\n{own}, slowest step {slow} × the median"


def slowest(lines: list[dict]) -> float | None:
    """Returns the slowest step of any block over that block's median; None of old blocks, which lack it."""
    over = [line["step_seconds_max"] / line["step_seconds"] for line in lines if "step_seconds_max" in line]
    return max(over, default=None)


def falls(losses: list[float]) -> float:
    """Returns the largest mean loss of a quarter of the steps, over that of the quarter before."""
    means = [statistics.fmean(quarter) for quarter in np.array_split(losses, 4)]
    return max(after / before for before, after in itertools.pairwise(means))


def row(name: str, config: str, settings: str = "", own: str = "", resident: str = "", **more) -> dict:
    """Returns a row. own: settings of the offloaded side; resident: of the other, if it has one."""
    other = f"{name}_resident"
    extra = {name: Contender(arguments=CAUSAL, settings=own, seconds=180)}
    if resident:
        extra[other] = Contender(arguments=CAUSAL, settings=resident, seconds=140)
        more["against"] = (other,)
    return {name: Offload(name, config, settings, own=name, extra=extra | more.pop("extra", {}), **more)}


def offload_peer(script: str, words: str = "") -> Contender:
    return Contender(script, f"--micro-rows {{micro}} {words}", seconds=240)


# FSDP2 in another setting too, to find its best.
DEEPSPEED = {"deepspeed": "", "deepspeed_eager": "--compile none"}
FSDP = {"fsdp": "", "fsdp_kept": "--keep-gathered", "fsdp_eager": "--compile none"}


def beside_peers(tokens: str, ratio: float) -> dict[str, Race]:
    """Returns the rows of the 8-layer shape at this many tokens a step."""
    own, config = f"8layer_{tokens}", "llama3_8b_8layer"
    deepspeed = {f"{name}_{tokens}": offload_peer("deepspeed_offload", of) for name, of in DEEPSPEED.items()}
    *fsdp, (eager, _) = peers = [
        (f"{name}_{tokens}", offload_peer("fsdp_offload", of)) for name, of in FSDP.items()
    ]
    resident, host = (Contender(arguments=CAUSAL, settings=of, seconds=180) for of in (NONE, HOST))
    extra = deepspeed | dict(peers) | {f"{own}_resident": resident, own: host}
    sides = {"extra": extra, "against": tuple(deepspeed), "beside": tuple(dict(fsdp))}
    settings = f"{TOKENS[tokens]} remat.policy=full model.loop=unroll {EXACT}"
    int8 = f"{settings} optim.state=split_master_int8"
    others = {"against": (f"{own}_resident",), "beside": (eager,), "named": True}
    about = f"8 layers of Llama 3 8B, {tokens} tokens a step, other settings"
    return (
        row(own, config, int8, HOST, bars=(times(ratio, of="DeepSpeed"),), **sides)
        | row(f"{own}_float32", config, f"{settings} {FLOAT32}", HOST, **sides)
        | {f"{own}_others": Offload(about, config, int8, own=own, extra=extra, **others)}
    )


# fmt: off
ROWS = {
    **row("8b_64k", "llama3_8b", bars=(SMALL, SLOWEST), steps=(3, 40)),
    **row("8b_64k_exact", "llama3_8b", EXACT, f"{HOST} offload.fraction=0.65", NONE, bars=(SMALL, SLOWER)),
    **row("8b_16k", "llama3_8b", TOKENS["16k"], "offload.fraction=0.3", NONE, bars=(SMALL, SLOWER)),
    **row("8b_64k_float32", "llama3_8b", FLOAT32, "offload.fraction=0.85", bars=(SMALL,)),
    **row("8b_16k_float32", "llama3_8b", f"{TOKENS['16k']} {FLOAT32}", bars=(SMALL,)),
    **row("13b", "llama_13b", bars=(mfu(0.45), host(100))),
    **row("30b", "llama_30b", bars=(mfu(0.40), host(230)), steps=(2, 5)),
    **row("30b_8k", "llama_30b", f"{ONE_ROW} train.steps=400", bars=(FALLS, host(230)), steps=(1, 40)),
    # 36.5 B and 52.9 B parameters, 206 and 200 GiB of weights and state: half of it on each side.
    **row("largest_exact", "llama_30b", f"model.layers=72 {HALF} {ONE_ROW}", steps=(2, 5)),
    **row("largest", "llama_30b", f"model.layers=106 {HALF} {ONE_ROW} optim.state=stochastic_rounding",
          bars=(host(128),), steps=(2, 5)),
    "8b_row_of_32k_inputs": Offload(
        "8b_row_of_32k_inputs", "llama3_8b", LONG, (INPUTS,), own="8b_row_of_32k_inputs",
        against=("8b_row_of_32k",), extra={
            "8b_row_of_32k": Contender(arguments=CAUSAL, seconds=180),
            "8b_row_of_32k_inputs": Contender(arguments=CAUSAL, settings="offload.activations=inputs",
                                              seconds=180)}),
    **beside_peers("16k", 2.4),
    **beside_peers("64k", 1.8),
    # Run when named. Those of 20 layers are for a GPU that has no room for 32 of them.
    **row("20layer_64k_exact", "llama3_8b", f"{CUT} {EXACT}", f"{HOST} offload.fraction=0.65", NONE,
          bars=(SMALL, SLOWER), named=True),
    **row("8b_64k_exact_host", "llama3_8b", EXACT, "offload.fraction=0.65", bars=(SMALL,), named=True),
    **row("8b_16k_exact", "llama3_8b", f"{TOKENS['16k']} {EXACT}", f"{HOST} offload.fraction=0.5", NONE,
          bars=(SMALL, SLOWER), named=True),
    **row("20layer_64k_float32", "llama3_8b", f"{CUT} {FLOAT32}", "", NONE, named=True),
    **row("20layer_16k_float32", "llama3_8b", f"{CUT} {TOKENS['16k']} {FLOAT32}", "", NONE, named=True),
}
# fmt: on
NOTES = """\
All take rows of real tokens, each as one document; 20 s of warm-up under load and 40 s timed, or as many
steps as the row says. A ratio is one of tokens per second, bold if it differs from 1 by more than twice the
larger A-A spread; both sides have the same shape, micro-batches, recomputation and clip rule. MFU counts
needed FLOPs over the data sheet's dense bf16 peak. Host memory is the most that a block's processes had.
Peers have float32 master weights and moments; jaxthru's format is in its settings: an exact float32 master
in all of them, with bfloat16 moments (split_master), 8-bit ones (split_master_int8) or float32 ones
(split_master_float32). All recompute each layer from its input, take micro-batches of 16k tokens (the
largest models 8k), clip to the global norm (with clip_rule previous: to the previous step's) and skip
updates that are not finite.
"""
