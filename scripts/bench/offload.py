"""Training with state in host memory, beside the same training with all of it on the GPU, and beside peers.

    python scripts/bench/offload.py --output FILE [--rows a,b,...] [--stop-after SECONDS]

Each row runs in a process of its own, once, then all again, and so on: 20 s of warm-up under load and 40 s
timed, at least three steps each (3 and 40 steps of the shipped 8B, 2 and 5 of the largest models). Finished
blocks are kept in FILE; the same command continues with those that are missing. All take rows of real
tokens, each as one document.
Both sides of a ratio have the same shape, micro-batches, recomputation and clip rule.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
import tempfile
from pathlib import Path

import blocks
import comparison
import harness
import numpy as np
from comparison import shown

from jaxthru import config as configuration
from jaxthru.models import llama
from jaxthru.runtime import hardware

LIMIT = 480.0  # seconds of one block, its start and compilation included


@dataclasses.dataclass(frozen=True)
class Row:
    """config: in configs/; settings: as `--set` takes them; peer: a module's name, which runs this shape.
    partners: rows that the bar of `ratio` or `slower` is against; beside: others whose ratio is shown.
    bars: what must hold: `slower`, `hbm_gib`, `host_gib`, `falls`, `slowest` at most, `ratio`, `mfu` at
    least. falls: the largest mean loss of a quarter of the timed steps, over that of the quarter before.
    slowest: the slowest of them over their median.
    steps: how many to warm up with and to time, in place of seconds.
    """

    config: str
    settings: str = ""
    peer: str = ""
    arguments: str = ""
    partners: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    bars: dict[str, float] = dataclasses.field(default_factory=dict)
    steps: tuple[int, int] | None = None


RESIDENT = "offload.level=none"
EXACT = "optim.clip_rule=exact"
FLOAT32 = "optim.state=split_master_float32"
INT8 = "optim.state=split_master_int8"
TOKENS = {"16k": "train.rows=2 train.microbatches=1", "64k": "train.rows=8 train.microbatches=4"}
LONG = "data.sequence=32768 train.rows=1 train.microbatches=1"
# All state on the host; DeepSpeed too has the bfloat16 weights on the GPU, clips exactly and recomputes.
HOST = f"offload.level=optimizer remat.policy=full {EXACT}"
CUT = "model.layers=20"
SMALL = {"hbm_gib": 65.0}
SLOWER = SMALL | {"slower": 0.15}


def _beside_peers(tokens: str, ratio: float) -> dict[str, Row]:
    """Returns the rows of the 8-layer shape at this many tokens a step."""
    shape, settings = "llama3_8b_8layer", TOKENS[tokens]
    deepspeed, fsdp = f"deepspeed_{tokens}", f"fsdp_{tokens}"
    eager = f"deepspeed_eager_{tokens}"
    peers = {"partners": (deepspeed, eager), "beside": (fsdp, f"fsdp_kept_{tokens}")}
    ours = f"{settings} {HOST}"
    return {
        f"8layer_{tokens}": Row(shape, f"{ours} {INT8}", **peers, bars={"ratio": ratio}),
        f"8layer_{tokens}_float32": Row(shape, f"{ours} {FLOAT32}", **peers),
        deepspeed: Row(shape, settings, "deepspeed_offload"),
        fsdp: Row(shape, settings, "fsdp_offload"),
        # Run when named: other settings, to find the peers' best.
        eager: Row(shape, settings, "deepspeed_offload", "--compile none"),
        f"fsdp_eager_{tokens}": Row(shape, settings, "fsdp_offload", "--compile none"),
        f"fsdp_kept_{tokens}": Row(shape, settings, "fsdp_offload", "--keep-gathered"),
        f"8layer_{tokens}_resident": Row(shape, f"{ours} {INT8} {RESIDENT}"),
    }


# fmt: off
ROWS = {
    "8b_64k": Row("llama3_8b", bars=SMALL | {"slowest": 1.05}, steps=(3, 40)),
    "8b_64k_exact": Row("llama3_8b", f"{EXACT} offload.level=optimizer offload.fraction=0.65", bars=SLOWER,
                        partners=("8b_64k_exact_resident",)),
    "8b_64k_exact_resident": Row("llama3_8b", f"{EXACT} {RESIDENT}"),
    "8b_16k": Row("llama3_8b", f"{TOKENS['16k']} offload.fraction=0.3", bars=SLOWER,
                  partners=("8b_16k_resident",)),
    "8b_16k_resident": Row("llama3_8b", f"{TOKENS['16k']} {RESIDENT}"),
    "8b_64k_float32": Row("llama3_8b", f"{FLOAT32} offload.fraction=0.85", bars=SMALL),
    "8b_16k_float32": Row("llama3_8b", f"{TOKENS['16k']} {FLOAT32}", bars=SMALL),
    "13b": Row("llama_13b", bars={"mfu": 0.45, "host_gib": 100.0}),
    "30b": Row("llama_30b", bars={"mfu": 0.40, "host_gib": 230.0}, steps=(2, 5)),
    "30b_8k": Row("llama_30b", "train.rows=1 train.microbatches=1 train.steps=400",
                  bars={"falls": 1.0, "host_gib": 230.0}, steps=(1, 40)),
    # 36.5 B and 52.9 B parameters, 206 and 200 GiB of weights and state: half of it on each side.
    "largest_exact": Row("llama_30b", "model.layers=72 offload.fraction=0.48 offload.activations=none "
                         "offload.host_gib=112 offload.staging_gib=0 train.rows=1 "
                         "train.microbatches=1", steps=(2, 5)),
    "largest": Row("llama_30b", "model.layers=106 offload.fraction=0.48 offload.activations=none "
                   "offload.host_gib=112 offload.staging_gib=0 train.rows=1 train.microbatches=1 "
                   "optim.state=stochastic_rounding", steps=(2, 5), bars={"host_gib": 128.0}),
    "8b_row_of_32k": Row("llama3_8b", LONG),
    "8b_row_of_32k_inputs": Row("llama3_8b", f"{LONG} offload.activations=inputs", bars={"slower": 0.05},
                                partners=("8b_row_of_32k",)),
    **_beside_peers("16k", 2.4),
    **_beside_peers("64k", 1.8),
    # Run when named. Those of 20 layers are for a GPU that has no room for 32 of them.
    "20layer_64k_exact": Row("llama3_8b", f"{CUT} {EXACT} offload.level=optimizer offload.fraction=0.65",
                             bars=SLOWER, partners=("20layer_64k_exact_resident",)),
    "20layer_64k_exact_resident": Row("llama3_8b", f"{CUT} {EXACT} {RESIDENT}"),
    "8b_64k_exact_host": Row("llama3_8b", f"{EXACT} offload.fraction=0.65", bars=SMALL),
    "8b_16k_exact": Row("llama3_8b", f"{TOKENS['16k']} {EXACT} offload.level=optimizer "
                        "offload.fraction=0.5", bars=SLOWER,
                        partners=("8b_16k_exact_resident",)),
    "8b_16k_exact_resident": Row("llama3_8b", f"{TOKENS['16k']} {EXACT} {RESIDENT}"),
    "20layer_64k_float32": Row("llama3_8b", f"{CUT} {FLOAT32}", partners=("20layer_64k_float32_resident",)),
    "20layer_64k_float32_resident": Row("llama3_8b", f"{CUT} {FLOAT32} {RESIDENT}"),
    "20layer_16k_float32": Row("llama3_8b", f"{CUT} {TOKENS['16k']} {FLOAT32}",
                               partners=("20layer_16k_float32_resident",)),
    "20layer_16k_float32_resident": Row("llama3_8b", f"{CUT} {TOKENS['16k']} {FLOAT32} {RESIDENT}"),
}
# fmt: on
_NAMED = (
    "eager",
    "kept",
    "float32_resident",
    "20layer",
    "8b_16k_exact",
    "8b_64k_exact_host",
)
DEFAULT = [
    name
    for name in ROWS
    if not any(part in name for part in _NAMED) and not (name.startswith("8layer") and "resident" in name)
]
NOTES = """\
`step s` is the median, `slowest` the slowest step over it, tok/s all tokens over all seconds.
A ratio is one of tokens per second to the row named after it; it is bold if it may be claimed: it differs
from 1 by more than twice the larger A-A spread. MFU counts needed FLOPs over the data sheet's dense bf16
peak. `host` is the most memory that the block's processes had.
Peers have float32 master weights and moments; jaxthru's format is in its settings: an exact float32 master
in all of them, with bfloat16 moments (split_master), 8-bit ones (split_master_int8) or float32 ones
(split_master_float32). All recompute each layer from its input, take micro-batches of 16k tokens (the
largest models 8k), clip to the global norm (with clip_rule previous: to the previous step's) and skip
updates that are not finite.
"""


def resolve(row: Row, overrides: list[str]) -> configuration.RunConfig:
    """Returns the row's configuration; overrides: of all rows, under the row's own."""
    path = blocks.ROOT / "configs" / f"{row.config}.py"
    return configuration.load(path, [*overrides, *row.settings.split()])


def command_of(row: Row, arguments: argparse.Namespace, tokens: Path) -> list[str]:
    """Returns the command line of one block."""
    timing = ["--warmup-seconds", f"{arguments.warmup_seconds:g}"]
    timing += ["--timed-seconds", f"{arguments.timed_seconds:g}"]
    if row.peer:
        config = resolve(row, arguments.overrides)
        words = harness.Shape.of(config.model).flags()
        words += ["--micro-rows", str(config.train.rows // config.train.microbatches)]
        words += ["--tokens", str(tokens), *row.arguments.split(), *timing]
        return [arguments.torch_python, "-m", f"peers.{row.peer}", *words]
    if row.steps:
        timing = ["--steps", *map(str, row.steps)]
    words = ["--config", str(blocks.ROOT / "configs" / f"{row.config}.py")]
    words += harness.set_words((*arguments.overrides, *row.settings.split()))
    words += ["--causal-rows", str(tokens), "--keep-compiled", *timing]
    return [sys.executable, str(blocks.HERE / "step.py"), *words]


def found_in(record: dict, overrides: list[str]) -> dict[str, comparison.Row]:
    """Returns {name: row} of the blocks that ran, each counted with its own shape."""
    peak = hardware.data_sheet_flops(comparison.device_kind(record["blocks"]))
    found = {}
    for name, row in ROWS.items():
        own = [block for block in record["blocks"] if block["contender"] == name and "line" in block]
        if not own:
            continue
        model = resolve(row, overrides).model
        needed = functools.partial(llama.train_flops, model)
        found |= comparison.rows(own, {name: "bf16"}, needed, peak)
        host = [block["host_gib"] for block in own if block.get("host_gib") is not None]
        losses = own[-1]["line"].get("losses")
        found[name] |= {
            "falls": falls(losses) if losses else None,
            "tokens_per_step": own[0]["line"]["tokens_per_step"],
            "parameters": llama.parameters(model),
            "host_gib": statistics.fmean(host) if host else None,
            "slowest": slowest([block["line"] for block in own]),
        }
    for name, row in found.items():
        others = [other for other in (*ROWS[name].partners, *ROWS[name].beside) if other in found]
        row["ratios"] = {other: comparison.ratio(row, found[other]) for other in others}
        row["bars"] = {kind: judge(row, ROWS[name], kind) for kind in ROWS[name].bars}
    return found


def slowest(lines: list[dict]) -> float | None:
    """Returns the slowest step of any block over that block's median; None of old blocks, which lack it."""
    over = [line["step_seconds_max"] / line["step_seconds"] for line in lines if "step_seconds_max" in line]
    return max(over, default=None)


def falls(losses: list[float]) -> float:
    """Returns the largest mean loss of a quarter of the steps, over that of the quarter before."""
    means = [statistics.fmean(quarter) for quarter in np.array_split(losses, 4)]
    return max(after / before for before, after in itertools.pairwise(means))


def judge(row: comparison.Row, of: Row, kind: str) -> dict:
    """Returns {"bar", "found", "met"} of one bar; found and met are None while it was not measured."""
    bar, at_most = of.bars[kind], kind not in ("ratio", "mfu")
    ratios = [row["ratios"][name]["ratio"] for name in of.partners if name in row["ratios"]]
    if kind == "ratio":
        value = min(ratios, default=None)
    elif kind == "slower":
        value = 1 / min(ratios) - 1 if ratios else None
    else:
        value = row["peak_hbm_gib" if kind == "hbm_gib" else kind]
    met = None if value is None else value <= bar if at_most else value >= bar
    return {"bar": bar, "found": value, "met": met}


FORMS = {"slower": "≤ {:.0%} slower", "ratio": "≥ {:g} ×", "mfu": "≥ {:.0%} MFU"}
FORMS |= {"hbm_gib": "≤ {:g} GiB HBM", "host_gib": "≤ {:g} GiB host", "falls": "loss falls"}
FORMS |= {"slowest": "slowest step ≤ {:g} × median"}
MARKS = {True: "met", False: "**missed**", None: "not measured"}


def table(found: dict[str, comparison.Row]) -> str:
    """Returns the rows in Markdown."""
    head = (
        "row",
        "parameters",
        "tokens a step",
        "step s",
        "slowest",
        "tok/s",
        "MFU",
        "HBM GiB",
        "host GiB",
        "A-A",
        "MHz",
    )
    head += ("ratio", "bar")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, row in found.items():
        ratios = []
        for other, compared in row["ratios"].items():
            mark = "**" if compared["claimed"] else ""
            ratios.append(f"{mark}{compared['ratio']:.3f}{mark} {other}")
        bars = [f"{FORMS[kind].format(of['bar'])}: {MARKS[of['met']]}" for kind, of in row["bars"].items()]
        cells = [
            name,
            f"{row['parameters'] / 1e9:.2f} B",
            shown(row["tokens_per_step"], ",.0f"),
            shown(row["step_milliseconds"] / 1e3, ".3f"),
            shown(row["slowest"], ".3f"),
            shown(row.get("tokens_per_second"), ",.0f"),
            shown(row.get("mfu"), ".1%"),
            shown(row["peak_hbm_gib"], ".1f"),
            shown(row["host_gib"], ".1f"),
            shown(row["spread"], ".2%"),
            shown(row["sm_clock_mhz"], ".0f"),
            ", ".join(ratios),
            ", ".join(bars),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summarise(record: dict, overrides: list[str]) -> str:
    """Adds the summary to the record and returns what is printed of it."""
    record["summary"] = found_in(record, overrides)
    return "\n\n".join([table(record["summary"]), NOTES, *comparison.remarks(record["blocks"])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(DEFAULT), help=f"of {', '.join(ROWS)}")
    blocks.add_arguments(parser)
    arguments = parser.parse_args()
    names = blocks.chosen(parser, "--rows", arguments.rows, list(ROWS))
    record = blocks.record_of("offload", arguments)
    record["settings"] = {name: row.settings for name, row in ROWS.items()}
    left = comparison.missing(names, arguments.rounds, record["blocks"])
    with tempfile.TemporaryDirectory() as folder:
        tokens = {}
        for name in dict.fromkeys(name for _, name in left):  # before anything runs, so that a bad key shows
            config = resolve(ROWS[name], arguments.overrides)
            rows, sequence = config.train.rows, config.data.sequence
            tokens[name] = Path(folder) / f"{rows}_rows_of_{sequence}.npy"
            if not tokens[name].exists():
                blocks.write_tokens(config, tokens[name], max(128 * 8192 // (rows * sequence), 8))
        blocks.run_missing(
            record,
            names,
            arguments,
            lambda name: command_of(ROWS[name], arguments, tokens[name]),
            lambda: summarise(record, arguments.overrides),
            LIMIT,
        )
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
