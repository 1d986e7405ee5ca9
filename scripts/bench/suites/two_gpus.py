"""Two GPUs: what one GPU cannot show, the rows of most worth first, each held against what was predicted.

    python scripts/bench/suite.py two_gpus --list
    python scripts/bench/suite.py two_gpus --old build/old --commit HASH --output build/two --stop-after 560

Steps take turns in one process, so that all see the same clocks and no GPU rests: both commits', and single
GPUs, each at work on a share of the same rows. A row ends by its seconds, with as many turns as they allow.
Kernels that wait for their peers run where `check` has passed, with the tiles that `tune` and `tune_model`
have found in the same records. All variables that could bring in NVLink multicast are set for each process.

What to expect of 2 H200s, by arithmetic: matmuls hold 676 to 700 TFLOP/s at the power cap; 275 GB/s each way
by NCCL, 400 by TMA. A step of 8 layers of Llama 3 8B, two rows of 8,192 tokens on each GPU, 12 documents a
row, is 235 model TFLOP a GPU and took 397 ms alone; a token of Qwen3-30B-A3B is 19.8 GFLOP, of which its 12
layers ran 436 T a second, with nothing computed again.

    row            each way, a GPU and step                    in ms             ceiling           last
    fsdp           3 × 2.8 GB: gathered forward and backward,  3 × 10 behind     1.00 of one GPU   0.983
                   scattered; 2 × where kept                   397
    fsdp_1b        3 × 1.2 GB                                  3 × 4.5 behind    1.00              0.973
                                                               459
    fsdp_0_6b      3 × 0.6 GB                                  3 × 2.2 behind    1.00              1.013
                                                               329
    tensor         8 layers × (4 forward, 6 backward) × 67 MB  20, exposed 19    1.089 × plain     1.051
                                                               of 234 by plain
    tuned          33.5 or 67 MB, a gather's backward twice    84 or 168 by TMA  of each case, in its record
    experts_12     12 layers × 4 × 134 MB; of 74 steps 9       404 planned, of   0.97; 0.96 by     0.961,
                   move experts, 0.03 s each by one program    490 alone         0.1 s a move      0.02 s
                   a layer
    experts_       the same; no GPU waits for one with more    2 % exposed       0.97              0.968
      balanced     tokens
    experts_ways   the same as experts_12; in 1 part 15 ms     418 planned;      copies in 1 part  1.038
                   less for weights' gradients and 12 more     in 1 part 415;    1.025 × 2 parts
                   exposed; by copies own tokens stay, and     by copies 419,    by collectives
                   if they run at 400 GB/s and slow no         in 2 parts 426
                   product, 11 ms less
    experts_whole  48 layers × 6 × 134 MB; forward is          140 of 2,030      16,100 tokens/s,  16,882:
                   computed again, 865 TFLOP; 97 GiB of                          16 rows           2 moves,
                   state read and written, 43 ms; 129 GiB as                                       0.2 s
                   compiled, of which 30 are gradients; one
                   move in 12 steps, 0.15 s
    experts_skewed 0.6 × the experts' 89 TFLOP of a GPU more   107 on 478        1.00 of that      0.972

`tuned`, of the kernel in bursts over plain: bar (ceiling, of the last record): gather 28672 forward 1.08
(1.15), scatter 14336 forward 1.20 (1.32); backward 1.15: gather 14336 (1.23), gather 28672 (1.15), scatter
14336 (1.15). The last two leave the kernel nothing to lose: no tile can meet them. At the power cap joules
decide: what a wave of tiles reads differs by up to 1.3 times between the orders that are tried, and a cluster
of two reads a third less from the L2 cache; `tried` in the records of `tune` says what each takes.
"""

import dataclasses
import json
import shlex
import sys

import blocks
import harness
from suites import overlap
from suites.commits import FSDP, PAIRS, SLOWER, TENSOR, InTurns, both
from suites.experts_on_two import Experts, Skewed, on_two
from suites.overlap import Overlap, said_by
from suites.overlap_bars import kernels, measured
from suites.rows import AUTO, Bar, Block, Row, Setup, lines_of

from pallas_kernels.collective_matmul.shapes import GPU
from pallas_kernels.collective_matmul.tiles import TABLE_FILE

FABRIC = "infiniband_400g"  # of which two GPUs are one host's, joined by NVLink
EIGHT = ("llama3_8b_8layer", "remat.policy=projections model.loop=unroll")
COLLECTIVES = "mesh.transfers=collectives"  # where `auto` takes copies
RESIDENT = "offload.level=none"  # or where one GPU cannot hold it, it would be slower for its copies
MOE = "mesh.fsdp=1 mesh.expert=2 train.rows=16"
WAYS = {
    f"{way}_{chunks}": f"{MOE} mesh.transfers={way} mesh.expert_chunks={chunks}".replace(" ", ",")
    for way in ("collectives", "copies")
    for chunks in (2, 1)
}
COPIES = "mesh.transfers=copies"  # which `auto` takes where something else is left to it
WHOLE = f"{MOE} {COPIES} train.microbatches=1 offload.level=none offload.fraction=1.0 remat.policy=full"


@dataclasses.dataclass(frozen=True)
class Pairs(InTurns):
    """Steps in turns that end by `seconds`, with the tiles that were found before. ratios: (what, a, b), of
    contenders the rate of a over that of b; `alone@alone` is both GPUs together. gemm: whether the
    sustained product is measured beside it."""

    documents: int = 12
    warmup: float = 8.0
    timed: float = 10.0
    gpus: int = 2
    waits: bool = False
    gemm: bool = False
    ratios: tuple[tuple[str, str, str], ...] = ()

    @property
    def products(self):
        return super().products if self.gemm else ()

    def refuses(self, setup):
        return super().refuses(setup) or (unchecked(setup) if self.waits else "")

    def command(self, name, setup):
        words = [*super().command(name, setup), "--stop-after", f"{self.seconds - 15:g}"]
        return ["bash", "-c", f"{tuned(setup)}exec {shlex.join(on_two(setup, words, memory=0.9))}"]

    def found(self, setup, done):
        found = super().found(setup, done)
        of = found.get("contenders", {})
        for what, a, b in self.ratios:
            if {a, b} <= of.keys():
                found[what] = of[a]["tokens_per_second"] / of[b]["tokens_per_second"]
        return found


def tuned(setup: Setup) -> str:
    """Returns the beginning of a command line that takes the tiles found so far, maybe on another machine."""
    kept = shlex.quote(str(setup.kept("tune") / TABLE_FILE.name))
    return f"if test -e {kept}; then cp {kept} {TABLE_FILE}; fi && "


def unchecked(setup: Setup) -> str:
    """Returns why kernels that wait for their peers are not to run; empty where they may."""
    return "" if lines_of(setup.blocks("check"), "check") else "check did not pass"


@dataclasses.dataclass(frozen=True)
class Kernels(Overlap):
    """A row of `overlap` on this suite's records."""

    def refuses(self, setup):
        return unchecked(setup) if self.waits and not self.safety else ""

    def found(self, setup, done):
        said = said_by(setup, self.name, done)
        row, _, _ = self.name.partition("_")  # tuned_scatter is of what tuned is
        found = measured({row: said} if said else {}, self.gpus)
        return {what: value for what, value in found.items() if value is not None} | {"spread": None}


def searched(*cases: str, seconds: float) -> overlap.Callable:
    """Returns the command that tunes tiles and keeps the table, of an attempt that was cut short too. All
    rows that tune share one table."""

    def command(setup: Setup, row: Overlap) -> str:
        folder = setup.kept("tune")
        words = ["--devices", row.gpus, "--first-run-done", "--tried", "--stop-after", f"{seconds - 60:g}"]
        run = overlap.python("tune_collective_matmul", *words, "--cases", *cases)
        take = f"trap 'cp {TABLE_FILE} {folder}' EXIT"
        return f"mkdir -p {folder} && {tuned(setup)}{take} && {run}"

    return command


def torch(setup: Setup, row: Overlap) -> str:
    """PyTorch's matmuls over symmetric memory, which refuse to begin where there could be multicast."""
    shapes = {name: dataclasses.asdict(GPU[name]) for name in overlap.ISSUE}
    peer = str(blocks.HERE / "peers" / "torch_collective_matmul.py")
    words = [peer, "--devices", str(row.gpus), "--shapes", json.dumps(shapes)]
    off = "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 "
    return off + shlex.join([setup.torch_python, *words])


@dataclasses.dataclass(frozen=True)
class Predicted(Row):
    """What `plan network` and `plan limits` say of the rows before they run: no GPU, and minutes of a CPU."""

    seconds: float = 300.0
    gpus: int = 1
    named: bool = True
    products, reads, small = (), False, ""

    def wanted(self, done):
        return [Block(name, 1, self.seconds) for name in PREDICTED]

    def command(self, name, setup):
        plan, config, settings, words = PREDICTED[name]
        of = ["--config", config, *harness.set_words(settings.split()), "--fabric", FABRIC]
        script = [sys.executable, str(blocks.HERE / "measure" / "planned.py")]
        return ["env", "JAX_PLATFORMS=cpu", *script, *of, "--plan", plan, "--words", words]

    def check(self, setup):
        """Each block has settings of its own."""

    def found(self, setup, done):
        said = {name: lines_of(done, name) for name in PREDICTED}
        return {"spread": None} | {name: lines[0] for name, lines in said.items() if lines}


def plain(text: str) -> str:
    """Returns a contender's settings as words."""
    return f"{EIGHT[1]} {text.replace(',', ' ')}"


ON = "--devices 2 --segments"
PREDICTED = {
    "limits": ("limits", EIGHT[0], "train.rows=4", "--most 8"),
    "fsdp": ("network", EIGHT[0], plain(f"{FSDP},{COLLECTIVES}"), f"{ON} 12"),
    "fsdp_kept": ("network", EIGHT[0], plain(PAIRS["fsdp_kept"]), f"{ON} 12"),
    "tensor": ("network", EIGHT[0], plain(f"{TENSOR}=none"), f"{ON} 12"),
    "experts_12": ("network", "qwen3_30b_a3b_12layer", MOE, f"{ON} 32"),
    "experts_whole": ("network", "qwen3_30b_a3b", WHOLE, f"{ON} 32"),
}
"""{row: of `plan`, the command, the configuration, its settings, and options} of what is predicted of it."""
ALONE = "alone@alone=mesh.fsdp=1"
DEFAULT = tuple(f"fsdp{side}={FSDP}" for side in ("@old", ""))
SMALL = "mesh.fsdp=2,train.rows=32"
OF_ONE = Bar("of_one", 0.97, "{:.3g} × single GPUs at work at the same time, by default settings")
OVER_ALONE = {"of_one": "fsdp", "collectives": "collectives", "copies_kept": "fsdp_copies"}
RATIOS = tuple((what, name, "alone@alone") for what, name in OVER_ALONE.items())
# What a step of two rows spends most of its time in; and whose bars were missed, and can be met.
IN_A_STEP = tuple(
    f"{name}_{way}" for name in ("gate_up_apart", "down_two_rows") for way in ("forward", "backward")
)
MISSED = ("gate_up_forward", "down_forward", "gate_backward")
PRODUCTS = "--cap-rounds 2 --turns 8 --leave-out ring ring_bidirectional"
GATHERS, SCATTERS = overlap.ISSUE[:3], overlap.ISSUE[3:]


def of_overlap(name: str, shell, seconds: float, *bars: Bar, **more) -> dict[str, Kernels]:
    row = Kernels(name, EIGHT[0], "", bars, shell=shell, seconds=seconds, name=name, **more)
    return {name: row}


def after_tuning(name: str, shapes: tuple[str, ...], seconds: float) -> dict[str, Kernels]:
    """Returns the row of shapes with the tiles that were found, and their bars."""
    more = f"{PRODUCTS} --stop-after {seconds - 60:g}"
    shell = overlap.bench("forward", "backward", shapes=shapes, more=more, table=True)
    every = (*kernels("forward"), *kernels("backward"))
    bars = [bar for bar in every if bar.what.startswith(shapes)]
    return of_overlap(name, shell, seconds, *bars, waits=True)


OF_ONE_ALONE = Bar("of_one", 0.95, "{:.3g} × one GPU's tokens per second, a GPU")
EXPOSED = Bar("exposed", 0.03, "{:.0%} exposed transport", most=True)
# fmt: off
ROWS = (
    of_overlap("check", overlap.check("tiny", repeats=1), 75, safety=True, waits=True)
    | {"fsdp": Pairs("fsdp=2 of both commits, beside single GPUs", *EIGHT, (OF_ONE, *SLOWER), steps=5,
                     seconds=390, gemm=True, ratios=RATIOS,
                     contenders=(ALONE, *DEFAULT, f"collectives={FSDP},{COLLECTIVES}",
                                 *both("fsdp_kept", "fsdp_copies")))}
    | {f"fsdp_{name}": Pairs(f"{about}, fsdp=2, collectives and copies, beside single GPUs", config,
                             "data.sequence=2048", (OF_ONE,), steps=5, seconds=140, documents=3,
                             ratios=RATIOS[:2],
                             contenders=("alone@alone=mesh.fsdp=1,train.rows=16", f"fsdp={SMALL}",
                                         f"collectives={SMALL},{COLLECTIVES}"))
       for name, config, about in (("1b", "llama3_2_1b", "Llama-3.2-1B, 16 rows of 2,048 a GPU"),
                                   ("0_6b", "qwen3_0_6b", "Qwen3-0.6B, the same"))}
    | of_overlap("torch", torch, 90)
    | of_overlap("tune_model", searched(*IN_A_STEP, seconds=190), 190, waits=True)
    | {"tensor": Pairs("tensor=2 of both commits", *EIGHT,
                       (Bar("fused", 1.08, "{:.3g} × XLA's collectives"), *SLOWER), steps=9, seconds=190,
                       waits=True, ratios=(("fused", "tensor_fused", "tensor"),),
                       contenders=both("tensor", "tensor_fused"))}
    | of_overlap("tune", searched(*MISSED, seconds=160), 160, waits=True)
    | after_tuning("tuned", GATHERS, 300) | after_tuning("tuned_scatter", SCATTERS, 210)
    | {"experts_12": Experts("Qwen3-30B-A3B, 12 layers, expert=2", "qwen3_30b_a3b_12layer", common=AUTO,
                             settings=RESIDENT, bars=(OF_ONE_ALONE,), pair=MOE)}
    | {"experts_balanced": Experts("the same, all experts given as many tokens", "qwen3_30b_a3b_12layer",
                                   common=AUTO, settings=f"{RESIDENT} model.force_load_balancing=true",
                                   bars=(OF_ONE_ALONE,), pair=MOE)}
    | {"exposed": Kernels("the same, what its trace shows", "qwen3_30b_a3b_12layer", "", (EXPOSED,),
                          common=AUTO, shell=overlap.traced(base=MOE.split()), seconds=120, name="exposed")}
    | {"experts_skewed": Skewed("the same, a router that gives one GPU 1.6 times the mean",
                                "qwen3_30b_a3b_12layer", common=AUTO, pair=MOE, seconds=130,
                                bars=(Bar("over_predicted", 1.05, "{:.3g} × the busier GPU's predicted time",
                                          most=True),))}
    | {"experts_ways": Pairs("the same, how its tokens move, and in how many parts", "qwen3_30b_a3b_12layer",
                             f"{RESIDENT} remat.policy=none model.loop=unroll kernels.attention=triton",
                             steps=5, seconds=420,
                             ratios=tuple((name, name, "collectives_2") for name in list(WAYS)[1:]),
                             contenders=tuple(f"{name}={of}" for name, of in WAYS.items()))}
    # 98 %, for 3.5 GiB more than compiled were taken at 8 rows; leaves 2.8 for CUDA's context and NCCL.
    | {"experts_whole": Experts("Qwen3-30B-A3B whole, expert=2, resident", "qwen3_30b_a3b", common="",
                                bars=(Bar("of_a_gpu", 15_500, "{:,.0f} tokens/s a GPU"),), alone=False,
                                pair=WHOLE, smaller="train.rows=8", steps=(11, 12), seconds=300, memory=0.98)}
    | {"predicted": Predicted("what `plan network` says of them beforehand", "llama3_8b_8layer")}
)
# fmt: on
NOTES = """\
On two GPUs; `fsdp` and `tensor` need --old FOLDER, the other commit's files (git archive). `fsdp` is by
default settings, which are copies where `auto` takes them. `predicted` runs on a CPU, where it is named.
"""
