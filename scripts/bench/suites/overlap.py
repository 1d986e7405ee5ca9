"""Overlapped collectives on several GPUs: kernels, steps, exposed time and losses, what matters most first.

Kernels that wait for their peers may hang, so rows with them are left out until the safety rows have passed.
"""

import dataclasses
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterable

import blocks
from suites.overlap_bars import kernels, measured
from suites.rows import Bar, Block, Row, Setup, lines_of

from pallas_kernels.collective_matmul.tiles import TABLE_FILE

ISSUE = ("qkv", "gate", "gate_up", "scatter_6144", "down")
NEW = ("untuned_gather", "untuned_scatter")  # in no table of tiles
MODEL = ("qkv_apart", "gate_up_apart", "attention_output", "down_two_rows")  # of two rows


@dataclasses.dataclass(frozen=True)
class Overlap(Row):
    """shell: of a setup and the row, its command as one types it in bash. seconds: on H200s. safety: has to
    pass before anything that `waits`, kernels that wait for their peers. instead_of: a row in whose place it
    runs, where that one failed or was left out. alone: a process on each GPU by itself."""

    shell: Callable[[Setup, "Overlap"], str] = lambda setup, row: ""
    seconds: float = 60.0
    safety: bool = False
    waits: bool = False
    instead_of: str = ""
    alone: bool = False
    name: str = ""
    common: str = "remat.policy=projections model.loop=unroll"
    gpus: int = 2
    products = ()

    def wanted(self, done):
        count = self.gpus if self.alone else 1
        group = "each" if self.alone else ""
        return [Block(self.name, turn + 1, self.seconds, group) for turn in range(count)]

    def refuses(self, setup):
        if self.instead_of:
            other = ROWS[self.instead_of]
            failed = any("error" in block for block in setup.blocks(self.instead_of))
            return "" if failed or other.refuses(setup) else f"{self.instead_of} stands for it"
        before = itertools.takewhile(lambda name: name != self.name, ROWS)
        failed = [name for name in before if ROWS[name].safety and not lines_of(setup.blocks(name), name)]
        return f"{', '.join(failed)} did not pass" if self.waits and failed else ""

    def command(self, name, setup):
        devices = 1 if self.alone else self.gpus
        words = f'python() {{ {shlex.quote(sys.executable)} "$@"; }}'
        # Where CUDA loads all code at its start, that takes more.
        words += "; export XLA_CLIENT_MEM_FRACTION=${XLA_CLIENT_MEM_FRACTION:-0.9}"
        if setup.tiny:
            # Where other work keeps the cores busy, programs of two devices wait for each other for ever in
            # as few threads as there are cores: NPROC is how many XLA makes.
            words += "; export NPROC=16 JAX_PLATFORMS=cpu"
            words += f" XLA_FLAGS=--xla_force_host_platform_device_count={devices}"
        return ["bash", "-c", f"{words}; {self.shell(setup, self)}"]

    def found(self, setup, done):
        said = {name: said_by(setup, name, setup.blocks(name)) for name in ROWS}
        said[self.name] = said_by(setup, self.name, done)
        return measured({name: of for name, of in said.items() if of}, self.gpus) | {"spread": None}


def said_by(setup: Setup, name: str, done: list[dict]) -> list[dict]:
    """Returns what a row's processes printed; of one that did not end well, the cases that were measured."""
    cases = setup.kept(name) / "cases.json"
    return lines_of(done, name) or ([json.loads(cases.read_text())] if cases.exists() else [])


def python(script: str, *words: object) -> str:
    return shlex.join(["python", f"{blocks.HERE / script}.py", *map(str, words)])


def step(*more: str, words: Iterable[str] = (), environment: str = "") -> Callable:
    """Returns the command of a step that is timed. more: settings, with {gpus} for how many there are."""

    def command(setup: Setup, row: Overlap) -> str:
        own = [text.format(gpus=row.gpus, rows=2 * row.gpus) for text in more]
        timing = words or (setup.seconds(20, 40) if setup.tiny else ())
        return environment + python("measure/step", *setup.words(row, *own), "--keep-compiled", *timing)

    return command


def turns(*common: str, **contenders: str) -> Callable:
    """contenders: {name: settings, with commas between them}."""

    def command(setup: Setup, row: Overlap) -> str:
        own = [text.format(gpus=row.gpus, rows=2 * row.gpus) for text in common]
        named = [word for pair in contenders.items() for word in ("--contender", "=".join(pair))]
        # Contenders in turns see the same clocks after a short warm-up.
        brief = [*setup.seconds(12, 24), *(["--turn-seconds", "0.2"] if setup.tiny else [])]
        return python("measure/steps_in_turns", *setup.words(row, *own), *named, *brief)

    return command


def check(*shapes: str, repeats: int = 3) -> Callable:
    def command(setup: Setup, row: Overlap) -> str:
        axes = ["--axes", f"tensor={row.gpus}", *(["data=2,tensor=2"] if row.gpus == 4 else [])]
        words = ["--implementation", "ring", "--repeats", 1] if setup.tiny else ["--repeats", repeats]
        names = ("tiny_gather",) if setup.tiny else shapes
        return python("collective_matmul_check", *axes, "--shapes", *names, *words)

    return command


def bench(*directions: str, shapes: Iterable[str] = ISSUE, more: str = "", table: bool = False) -> Callable:
    """table: with the tiles that `tune` has kept beside its record, maybe on another machine."""

    def command(setup: Setup, row: Overlap) -> str:
        words = ["--devices", row.gpus, "--first-run-done", *(["--tiny"] if setup.tiny else more.split())]
        output = setup.kept(row.name) / "cases.json"
        words += ["--directions", *directions, "--output", output]
        tiles = setup.kept("tune") / TABLE_FILE.name
        take = f"if test -e {tiles}; then cp {tiles} {TABLE_FILE}; fi && " if table else ""
        return f"mkdir -p {output.parent} && {take}{python('collective_matmul', '--shapes', *shapes, *words)}"

    return command


def tune(*shapes: str) -> Callable:
    """Returns the command that tunes tiles and keeps the table, of an attempt that was cut short too."""

    def command(setup: Setup, row: Overlap) -> str:
        folder = setup.kept("tune")
        words = python(
            "tune_collective_matmul", "--devices", row.gpus, "--first-run-done", "--shapes", *shapes
        )
        return f"mkdir -p {folder} && trap 'cp {TABLE_FILE} {folder}' EXIT && {words}"

    return command


def traced(*more: str, base: Iterable[str] = ()) -> Callable:
    """base: of the mesh, in place of FSDP's."""

    def command(setup: Setup, row: Overlap) -> str:
        every = (*(base or FSDP), *more, *PROFILED)
        own = [text.format(gpus=row.gpus, rows=2 * row.gpus) for text in every]
        words = shlex.join(["python", "-m", "jaxthru.train", *setup.words(row, *own)])
        train = f"D=$(mktemp -d) && trap 'rm -rf $D' EXIT && {words} --run-dir $D/run >&2"
        return f"{train} && {python('measure/exposed_collectives')} $D/run/profile/20/production"

    return command


def fifty(*more: str) -> Callable:
    return lambda setup, row: step(*more, words=("--steps", *setup.steps(3, 50)))(setup, row)


def data(setup: Setup, row: Overlap) -> str:
    """Makes the token store, which what starts at the same time would all make."""
    store = [text.partition("=")[2] for text in setup.settings(row) if text.startswith("data.store=")]
    words = ["python", "-m", "jaxthru.data", "prepare", setup.mix, *(["--store", *store] if store else [])]
    return f"{shlex.join(words)} >&2 && echo '{{}}'"


def moved(*names: str) -> dict[str, str]:
    return {name: f"kernels.collective_matmul={name}" for name in names}


PROFILED = ("train.steps=30", "profile.at=20", "profile.steps=3", "evaluate.rows=0")
PROFILED += ("checkpoint.every=0", "checkpoint.last=false")
TENSOR, KEPT = ("mesh.fsdp=1", "mesh.tensor={gpus}"), "remat.keep_parameters=true"  # gathered once a step
FSDP, ONE = ("mesh.fsdp={gpus}", "train.rows={rows}", KEPT), ("mesh.fsdp=1", KEPT)
COPIES, COLLECTIVES = (f"mesh.transfers={way}" for way in ("copies", "collectives"))
NOISE = "{:g} × what another order of sums moves the losses"
TENSOR_BAR = (Bar("tensor", 1.08, "{:g} × the step without overlap"),)
FSDP_BAR = (Bar("fsdp", 0.97, "{:g} × one GPU's tokens per second, a GPU"),)


def made(name: str, shell: Callable, seconds: float, *bars: Bar, **more) -> dict[str, Overlap]:
    return {
        name: Overlap(name, "llama3_8b_8layer", "", bars, shell=shell, seconds=seconds, name=name, **more)
    }


# fmt: off
ROWS = (
    made("data", data, 15)
    | made("check_first", check("tiny_gather"), 30, safety=True, waits=True)
    | made("check_tiny", check("tiny"), 75, safety=True, waits=True)
    | made("forward", bench("forward"), 150, *kernels("forward"), waits=True)
    | made("tensor", turns(*TENSOR, **moved("none", "auto", "fused")), 230, *TENSOR_BAR, waits=True)
    | made("tensor_ring", turns(*TENSOR, **moved("none", "ring")), 160, *TENSOR_BAR, instead_of="tensor")
    | made("one_gpu", step(*ONE), 95, alone=True)
    | made("fsdp", turns(*FSDP, collectives=COLLECTIVES, copies=COPIES), 150)
    # Each alone and without pauses, as one_gpu is timed; as few blocks as NCCL needs for what it hides.
    | made("fsdp_few", step(*FSDP, COLLECTIVES, environment="NCCL_MAX_CTAS=8 "), 95)
    | made("fsdp_copies", step(*FSDP, COPIES), 95, *FSDP_BAR)
    | made("exposed", traced(COPIES), 90, Bar("exposed", 0.03, "{:.0%} exposed communication", most=True))
    | made("exposed_collectives", traced(COLLECTIVES), 90)
    # The second adds up gradients in another order, nothing else: how far apart that takes it is noise.
    | made("losses_one", fifty(*ONE), 65, gpus=1)
    | made("losses_noise", fifty(*ONE, "train.microbatches=2"), 65, gpus=1)
    | made("losses_tensor", fifty(*TENSOR, "kernels.collective_matmul=fused"), 55,
           Bar("losses_tensor", 2.0, NOISE, most=True), waits=True)
    | made("losses_ring", fifty(*TENSOR, "kernels.collective_matmul=ring"), 55,
           Bar("losses_ring", 2.0, NOISE, most=True))
    | made("backward", bench("backward"), 120, *kernels("backward"), waits=True)
    | made("tune", tune(*ISSUE), 330, waits=True)
    | made("tune_model", tune(*MODEL), 230, waits=True)
    | made("tuned", bench("forward", "backward", shapes=ISSUE + NEW, table=True), 300,
           *kernels("forward"), *kernels("backward"), waits=True)
    | made("check_all", check("all", repeats=100), 200, waits=True)
    | made("others", bench("forward", "backward", shapes=MODEL, table=True), 200,
           Bar("never_slower", 1.0, "{:g} × plain as dispatched, in every case, with noise"), waits=True)
    | made("tensor_more", turns(*TENSOR, **moved("none", "reference", "ring_bidirectional"),
                                ring_copied=f"kernels.collective_matmul=ring,{COPIES}"), 300)
    | made("adds", bench("forward", "backward", shapes=("gate", "scatter_6144", "down"), more="--adds"), 150,
           waits=True)
    | made("torch", bench("forward", more="--torch"), 240, waits=True)
)
# fmt: on
NOTES = """\
On two GPUs. A kernel's rate is that of the fused one over another's, in bursts after a rest, at the full
clock, and without a pause, at the power cap; `tuned` has both directions with the tiles that `tune` found.
"""
