"""The rows of overlap.py, in the order of what matters most."""

import dataclasses
import shlex
from collections.abc import Iterable
from pathlib import Path

import blocks
import harness


@dataclasses.dataclass(frozen=True)
class Row:
    """commands: as one types them in bash; of several, each runs on a GPU of its own, all at the same time,
    and so does a single one if `alone`. seconds: that they should take on H200s, start and compilation
    included; limit: after which they are killed.
    safety: has to pass before anything that `waits`: kernels that wait for their peers, and may hang.
    instead_of: a row in whose place it runs, where that one failed or was left out.
    """

    commands: tuple[str, ...]
    seconds: float
    limit: float
    safety: bool = False
    waits: bool = False
    alone: bool = False
    instead_of: str = ""


ISSUE = ("qkv", "gate", "gate_up", "scatter_6144", "down")
UNTUNED = ("untuned_gather", "untuned_scatter")
MODEL = ("qkv_apart", "gate_up_apart", "attention_output", "down_two_rows")  # of two rows


def rows_for(devices: int, tiny: bool, config: str, settings: list[str], folder: Path) -> dict[str, Row]:
    """Returns the rows on so many devices.

    tiny: on a CPU. settings: of the configuration, for all that trains. folder: of the results.
    """

    def python(script: str, *words: object) -> tuple[str]:
        return (shlex.join(["python", f"{blocks.HERE / script}.py", *map(str, words)]),)

    def sets(*more: str) -> list[str]:
        return harness.set_words((*settings, *more))

    def step(*more: str, words: Iterable[str]) -> tuple[str]:
        return python("step", "--config", config, *sets(*more), "--keep-compiled", *words)

    axes = ["--axes", f"tensor={devices}", *(["data=2,tensor=2"] if devices == 4 else [])]
    without_kernels = ["--implementation", "ring", "--repeats", 1]

    def check(*shapes: str, repeats: int = 3) -> tuple[str]:
        words = without_kernels if tiny else ["--repeats", repeats]
        return python("collective_matmul_check", *axes, "--shapes", *shapes, *words)

    def bench(name: str, *more: str, shapes: Iterable[str] = ISSUE) -> tuple[str]:
        """more: directions, and options after them."""
        words = "--directions", *more, "--output", folder / f"collective_matmul_{name}.json"
        words += ("--devices", devices, "--first-run-done", *(["--tiny"] if tiny else []))
        return python("collective_matmul", "--shapes", *shapes, *words)

    quick = ["--warmup-seconds", "0.5", "--timed-seconds", "0.5"] if tiny else []
    # Contenders in turns see the same clocks after a short warm-up.
    brief = [*quick, "--turn-seconds", "0.2"] if tiny else ["--warmup-seconds", "12", "--timed-seconds", "24"]

    def turns(common: Iterable[str], **contenders: str) -> tuple[str]:
        """contenders: {name: settings, with commas between them}."""
        named = [word for pair in contenders.items() for word in ("--contender", "=".join(pair))]
        return python("steps_in_turns", "--config", config, *sets(*common), *named, *brief)

    def moved(*names: str) -> dict[str, str]:
        return {name: f"kernels.collective_matmul={name}" for name in names}

    tensor = "mesh.fsdp=1", f"mesh.tensor={devices}"
    copied = {"ring_copied": "kernels.collective_matmul=ring,mesh.transfers=copies"}
    over_fsdp = {way: f"mesh.transfers={way}" for way in ("collectives", "copies")}
    kept = "remat.keep_parameters=true"  # gathered once a step
    fsdp, one = (f"mesh.fsdp={devices}", f"train.rows={2 * devices}", kept), ("mesh.fsdp=1", kept)
    # As few blocks as NCCL needs for what is to be hidden.
    few = f"NCCL_MAX_CTAS=8 {step(*fsdp, words=quick)[0]}"
    fifty = ["--steps", "3", "5" if tiny else "50"]

    def losses(*more: str) -> tuple[str]:
        return step(*more, words=fifty)

    profiled = "train.steps=30", "profile.at=20", "profile.steps=3", "evaluate.rows=0"
    profiled += "checkpoint.every=0", "checkpoint.last=false"

    def traced(*more: str) -> tuple[str]:
        words = "python", "-m", "jaxthru.train", "--config", config, *sets(*fsdp, *more, *profiled)
        train = f"D=$(mktemp -d) && trap 'rm -rf $D' EXIT && {shlex.join(words)} --run-dir $D/run >&2"
        return (f"{train} && {python('exposed_collectives')[0]} $D/run/profile/20/production",)

    of_store = [text.partition("=")[2] for text in settings if text.startswith("data.store=")]
    store = ["--store", of_store[-1]] if of_store else []
    data = shlex.join(["python", "-m", "jaxthru.data", "prepare", "quickstart", *store])

    def tune(shapes: Iterable[str]) -> tuple[str]:
        words = "--devices", devices, "--first-run-done", "--shapes", *shapes
        return python("tune_collective_matmul", *words)

    many = ("all",) if not tiny else ("tiny_gather",)
    small = ("tiny",) if not tiny else ("tiny_gather",)
    return {
        "data": Row((f"{data} >&2 && echo '{{}}'",), 15, 90),
        "check_first": Row(check("tiny_gather"), 30, 90, safety=True, waits=True),
        "check_tiny": Row(check(*small), 75, 240, safety=True, waits=True),
        "forward": Row(bench("forward", "forward"), 150, 330, waits=True),
        "tensor": Row(turns(tensor, **moved("none", "auto", "fused")), 230, 450, waits=True),
        "tensor_ring": Row(turns(tensor, **moved("none", "ring")), 160, 330, instead_of="tensor"),
        "one_gpu": Row(step(*one, words=quick) * devices, 95, 240, alone=True),
        "fsdp": Row(turns(fsdp, **over_fsdp), 150, 400),
        # Each alone and without pauses, as one_gpu is timed.
        "fsdp_few": Row((few,), 95, 240),
        "fsdp_copies": Row(step(*fsdp, "mesh.transfers=copies", words=quick), 95, 240),
        "exposed": Row(traced("mesh.transfers=copies"), 90, 240),
        "exposed_collectives": Row(traced(), 90, 240),
        "losses_tensor": Row(losses(*tensor, "kernels.collective_matmul=fused"), 55, 180, waits=True),
        "losses_ring": Row(losses(*tensor, "kernels.collective_matmul=ring"), 55, 180),
        # The second adds up gradients in another order, nothing else: how far apart that takes it is noise.
        "losses_one": Row(losses(*one) + losses(*one, "train.microbatches=2"), 65, 180, alone=True),
        "backward": Row(bench("backward", "backward"), 120, 330, waits=True),
        "tune": Row(tune(ISSUE), 330, 560, waits=True),
        "tune_model": Row(tune(MODEL), 230, 520, waits=True),
        "tuned": Row(bench("tuned", "forward", "backward", shapes=ISSUE + UNTUNED), 300, 560, waits=True),
        "check_all": Row(check(*many, repeats=100), 200, 500, waits=True),
        "others": Row(bench("others", "forward", "backward", shapes=MODEL), 200, 450, waits=True),
        "tensor_more": Row(
            turns(tensor, **moved("none", "reference", "ring_bidirectional"), **copied), 300, 480
        ),
        "adds": Row(
            bench(
                "adds",
                "forward",
                "backward",
                *([] if tiny else ["--adds"]),
                shapes=("gate", "scatter_6144", "down"),
            ),
            150,
            400,
            waits=True,
        ),
        "torch": Row(bench("torch", "forward", *([] if tiny else ["--torch"])), 240, 520, waits=True),
    }
