"""jaxthru beside its peers on one GPU: the same shape, tokens and device, one table with ratios.

    python scripts/bench/one_gpu.py --output FILE [--contenders a,b,...] [--stop-after SECONDS] [--gpus N]

Every contender runs in a process of its own, once, then all again, and so on: A-B-A-B. A block is 20 s of
warm-up under load and 20 s timed, so that two rounds time each contender for 40 s. Finished blocks are kept
in FILE; the same command continues with those that are missing. On a host with several GPUs, N of them work
at once, one block each; a contender's next round is on the next GPU, so that what one GPU is faster than
another shows as A-A spread and favours nobody.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import comparison
import harness
import numpy as np

from jaxthru import config as configuration
from jaxthru.data.loader import open_data
from jaxthru.data.state import DataState
from jaxthru.models import flops
from jaxthru.runtime import hardware
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.xla import NO_MULTICAST

# Relative, so that commands are recorded as one types them.
HERE, ROOT = (Path(os.path.relpath(Path(__file__).resolve().parents[up])) for up in (0, 2))
BATCHES = 64  # distinct ones, which causal contenders take in turn


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
A ratio in bold is claimed: it differs from 1 by more than twice the larger A-A spread. MFU counts needed
FLOPs over the data sheet's dense bf16 peak, fp8 too. `of GEMM` is the share of this run's sustained product
of 8192 cubed in the same precision; the fp8 steps compute attention and the output layer in bf16 too, and
jaxthru's backward pass adds up in float32, which the fp8 product does not.
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
        words += ["--config", arguments.config, *(w for text in arguments.overrides for w in ("--set", text))]
    if contender.script == "step.py":
        words.append("--keep-compiled")
    return [sys.executable, str(HERE / contender.script), *words]


def run_block(command: list[str], gpu: str) -> dict:
    """Runs one block in its own process on one GPU; returns {"line": ...} or {"error": ...}."""
    path = os.pathsep.join(filter(None, [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    one = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu}
    environment = os.environ | NO_MULTICAST | one | {"PYTHONPATH": path}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = ended.stdout.strip().splitlines()
    if ended.returncode == 0 and lines:
        return {"line": json.loads(lines[-1])}
    print("\n".join(ended.stderr.strip().splitlines()[-12:]), file=sys.stderr)
    told = [line for line in ended.stderr.splitlines() if line.strip()] or ["no output"]
    return {"error": f"exit code {ended.returncode}: {told[-1].strip()[:300]}"}


def brief(outcome: dict) -> str:
    """Returns a block's outcome in a line."""
    shown = ("tokens_per_second", "tflops", "step_seconds", "sm_clock_mhz", "power_watts", "loss", "settings")
    line = outcome.get("line", {})
    return outcome.get("error") or ", ".join(f"{key} {line[key]}" for key in shown if line.get(key))


def ask(*command: str) -> str | None:
    """Returns what a command prints, None if it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_tokens(config: configuration.RunConfig, path: Path) -> None:
    """Writes the tokens of a run's first batches, int32 [batches, rows, sequence]."""
    data = open_data(config.data)
    schedule = DataState(0, ((0, data.mixing),), data.keys).schedule
    train = config.train
    with data.train_batches(schedule, seed=train.seed, rows=train.rows, steps=BATCHES) as batches:
        np.save(path, np.stack([batch["tokens"] for batch in batches]))


def record_of(arguments: argparse.Namespace) -> dict:
    """Returns the record in --output, or a new one. Exits if that one is of another comparison."""
    settings = {
        "benchmark": "one_gpu",
        "config": Path(arguments.config).stem,
        "set": arguments.overrides,
        "warmup_seconds": arguments.warmup_seconds,
        "timed_seconds": arguments.timed_seconds,
        "commit": ask("git", "-C", str(HERE), "rev-parse", "HEAD"),
    }
    if not arguments.output.exists():
        return settings | {"blocks": []}
    record = json.loads(arguments.output.read_text())
    changed = [key for key, value in settings.items() if record.get(key) != value]
    if changed:
        sys.exit(f"one_gpu.py: {arguments.output} holds another comparison: {', '.join(changed)} differ")
    return record


def summarise(record: dict, config: configuration.RunConfig) -> str:
    """Adds the summary to the record and returns what is printed of it."""
    blocks = record["blocks"]
    kind = next((block["line"]["device"]["kind"] for block in blocks if "line" in block), "")
    needed = functools.partial(flops.train_flops, config.model)
    precision = {name: contender.precision for name, contender in CONTENDERS.items()}
    peers = [name for name, contender in CONTENDERS.items() if contender.is_peer and name != "plain_jax"]
    found = comparison.rows(blocks, precision, needed, hardware.data_sheet_flops(kind))
    rated = [name for name, row in found.items() if "tokens_per_second" in row]
    record["summary"] = {
        "rows": found,
        "ratios": {
            own: {other: comparison.ratio(found[own], found[other]) for other in rated if other != own}
            for own in rated
        },
        "packed_saving": comparison.packed_saving(found, blocks, config.model.layers),
    }
    told = [comparison.table(found, list(CONTENDERS), BASE, peers), NOTES]
    if saving := record["summary"]["packed_saving"]:
        told.append(
            "packed rows: {rate_over_causal:.3f} of the causal rate; {measured_milliseconds:.1f} ms saved of "
            "{predicted_milliseconds:.1f} ms predicted ({measured_over_predicted:.0%})".format(**saving)
        )
    machines = sorted({str(block["gpu"]) for block in blocks if "line" in block})
    if len(machines) > 1:
        told.append(f"These blocks ran on {len(machines)} different GPUs: {', '.join(machines)}.")
    errors = {block["contender"]: block["error"] for block in blocks if "error" in block}
    told += [f"{name} failed: {error}" for name, error in errors.items()]
    skipped = sorted({block["contender"] for block in blocks if block.get("line", {}).get("skipped_updates")})
    told += [f"{name} skipped updates: a loss or a gradient was not finite." for name in skipped]
    return "\n\n".join(told)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON; finished blocks are kept and not run again")
    add("--config", default=str(ROOT / "configs" / "llama3_8b_8layer.py"))
    add("--set", action="append", default=[], dest="overrides", metavar="GROUP.KEY=VALUE")
    add("--contenders", default=",".join(DEFAULT), help=f"of {', '.join(CONTENDERS)}")
    add("--rounds", type=int, default=2)
    add("--gpus", type=int, default=1, help="of this host to use at once, one block each")
    add("--stop-after", type=float, default=float("inf"), metavar="SECONDS", help="start no block after it")
    add("--torch-python", default=sys.executable, help="a Python that has PyTorch, if this one has not")
    harness.add_seconds(parser, 20.0, 20.0)
    arguments = parser.parse_args()
    began = time.monotonic()
    names = arguments.contenders.split(",")
    if unknown := [name for name in names if name not in CONTENDERS]:
        parser.error(f"--contenders: {', '.join(unknown)}: not of {', '.join(CONTENDERS)}")
    arguments.resolved = configuration.load(arguments.config, arguments.overrides)
    record = record_of(arguments)
    left = comparison.missing(names, arguments.rounds, record["blocks"])
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(arguments.gpus)))).split(",")
    if len(visible) < arguments.gpus:
        parser.error(f"--gpus {arguments.gpus}: CUDA_VISIBLE_DEVICES shows {len(visible)}")
    writing = threading.Lock()

    def work(number: int, tokens: Path) -> None:
        """Runs the blocks that are this GPU's."""
        gpu = visible[number]
        identity = ask("nvidia-smi", f"--id={gpu}", "--query-gpu=uuid", "--format=csv,noheader")
        for turn, name in comparison.share(left, names, number, arguments.gpus):
            if time.monotonic() - began > arguments.stop_after:
                return
            command = command_of(CONTENDERS[name], arguments, tokens)
            started = time.monotonic()
            outcome = run_block(command, gpu)
            took = time.monotonic() - started
            print(f"round {turn} {name}, {took:.0f} s: {brief(outcome)}", flush=True)
            of_block = {
                "contender": name,
                "round": turn,
                "gpu": identity,
                "seconds": round(took, 1),
                **outcome,
            }
            with writing:
                kept = [b for b in record["blocks"] if (b["contender"], b["round"]) != (name, turn)]
                record["blocks"] = [*kept, of_block | {"command": shlex.join(["python", *command[1:]])}]
                record["command"] = shlex.join(["python", *sys.argv])
                summarise(record, arguments.resolved)
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(arguments.output, json.dumps(record, indent=2) + "\n")

    if left:
        with (
            tempfile.TemporaryDirectory() as folder,
            concurrent.futures.ThreadPoolExecutor(arguments.gpus) as pool,
        ):
            tokens = Path(folder) / "tokens.npy"
            write_tokens(arguments.resolved, tokens)
            for ended in [pool.submit(work, number, tokens) for number in range(arguments.gpus)]:
                ended.result()
    left = comparison.missing(names, arguments.rounds, record["blocks"])
    print(summarise(record, arguments.resolved))
    if left:
        print(f"\n{len(left)} blocks are missing: run the same command again.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
