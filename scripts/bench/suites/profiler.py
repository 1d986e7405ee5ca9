"""Is the profiler right? Its ledger and the loop's clock, planted causes, clocks, and its own cost."""

import dataclasses
import os
import sys

import blocks
from measure import profiler as measured
from suites.rows import Bar, Block, Row, lines_of

QUIET = "evaluate.rows=0 metrics.tensorboard=false checkpoint.every=0 checkpoint.last=false"
SMALL = "model.layers=2 model.vocabulary=32768 remat.policy=none"
# Any variable of glibc's allocator keeps the run from setting it; this one is glibc's default.
GIVEN_BACK = {"MALLOC_PERTURB_": "0"}
LONG = (20, 5, 52)
TINY = {
    "levers.py": "--size 256 --warmup-seconds 0 --timed-seconds 0.2",
    "profiler_off.py": "--steps 6 --rounds 1",
}


def share(what: str, said: str) -> Bar:
    return Bar(what, measured.BARS[what], said, most=True)


CLOSES = (
    share("unclassified", "{:.0%} unclassified kernels"),
    share("other_idle", "{:.0%} other idle"),
    share("same_steps", "{:.0%} between the ledger and the loop's clock in the same steps"),
    share("closure", "{:.0%} between the ledger and steps that were not profiled"),
    share("matmul_flops", "{:.0%} between the products' FLOPs in the HLO and those needed"),
    share("attention_flops", "{:.0%} between attention's"),
    share("peak_memory", "{:.0%} between memory by category and the runtime's peak"),
    share("parse_seconds", "{:g} s of python -m jaxthru.profile on two cores"),
    share("parse_gib", "{:g} GiB of it"),
)
SPLIT = (share("factors", "{:.0%} between the products' rate and the peak times its factors"),)
CAUSE = (
    Bar("named", 1, "{:g} cause named first"),
    share("planted", "{:.0%} between its size and the planted"),
)
OFF = (Bar("beyond_noise", 0, "{:.1%} beyond twice the A-A spread", most=True),)


@dataclasses.dataclass(frozen=True)
class Profiled(Row):
    """A run that is profiled. cause: of measure/planted.py, or `remat`, which is a setting. seconds: that it
    sleeps. one_batch: for all steps. against: the clean run's row. closes: the ledger is held to its bars.
    split: and its products' rate taken apart. steps: the first that is profiled, how many, and in all. turns:
    more traces behind them, see `planted.Turns`. script: runs in place of training, with words. most: seconds
    that it takes."""

    name: str = ""
    cause: str = "clean"
    seconds: float = 0.0
    one_batch: bool = True
    against: str = ""
    steps: tuple[int, int, int] = (20, 3, 45)
    turns: int = 0
    script: str = ""
    words: str = ""
    most: float = 120.0
    environment: str = ""
    common: str = ""
    products = ()

    def wanted(self, done):
        return [Block(self.name, 1, self.most)]

    def refuses(self, setup):
        if self.against and not lines_of(setup.blocks(self.against), self.against):
            return f"it is compared with {self.against}, which has not run"
        return ""

    def command(self, name, setup):
        at, steps, total = (5, 2, 16) if setup.tiny else self.steps
        timed = [f"profile.at={at}", f"profile.steps={steps}", f"train.steps={total}"]
        config = setup.words(self, *QUIET.split(), *([] if self.script else timed))
        several = f"--xla_force_host_platform_device_count={self.gpus}"
        flags = f"XLA_FLAGS={os.environ.get('XLA_FLAGS', '')} {several}"
        on = self.environment.split() + (["JAX_PLATFORMS=cpu", flags] if setup.tiny else [])
        script = str(blocks.HERE / "measure" / (self.script or "profiled_run.py"))
        command = [*(["env", *on] if on else []), sys.executable, script]
        if self.script:
            own = [] if self.script == "levers.py" else config
            return [*command, *self.words.split(), *own, *(TINY[self.script].split() if setup.tiny else [])]
        options = {"--cause": "clean" if self.cause == "remat" else self.cause, "--gpus": self.gpus}
        options |= {"--seconds": f"{self.seconds:g}", "--turns": 0 if setup.tiny else self.turns}
        given = {"--one-batch": self.one_batch, "--closes": CLOSES[0] in self.bars}
        given |= {"--split": SPLIT[0] in self.bars}
        words = [str(word) for pair in options.items() for word in pair]
        return [*command, str(setup.kept(name)), *words, *(name for name, on in given.items() if on), *config]

    def found(self, setup, done):
        found = {"spread": None}
        for line in lines_of(done, self.name):
            found |= {name: size(bar) for name, bar in line.get("closure", {}).get("bars", {}).items()}
            found |= {"factors": size(line.get("split", {}).get("factors", {}))}
            if "levers" in line:
                levers = [size(of.get("product", {})) for of in line["levers"].values()]
                found["factors"] = None if None in levers else max(levers, default=None)
            if "off" in line:
                found["beyond_noise"] = max(0.0, abs(line["off"]["change"]) - line["off"]["bar"])
            clean = [of for of in lines_of(setup.blocks(self.against), self.against)] if self.against else []
            if clean:
                found |= self.compared(setup, clean[0], line)
        return found

    def compared(self, setup, clean: dict, planted: dict) -> dict:
        """Returns what the comparison with the clean run names. Both runs have their folders still."""
        runs = [measured.opened(setup.kept(name)) for name in (self.against, self.name)]
        of = (("clean", clean), ("planted", planted))
        gemms = {which: {"mhz": None} | line.get("gemm", {}) for which, line in of}
        compared = measured.cause(self.cause, *runs, gemms)
        return {"named": int(compared["named"]), "planted": size(compared["size"]), "compared": compared}


def size(bar: dict) -> float | None:
    """Returns how far from zero a figure is, None where it was not measured."""
    found = bar.get("found")
    return None if found is None else abs(found)


def rows(**named: Profiled) -> dict[str, Profiled]:
    """Returns rows by name. Those of BIG have the policy and the unrolled layers that all were read with."""
    big = {"common": "remat.policy=projections model.loop=unroll"}
    more = {name: big if row.config == BIG[1] else {} for name, row in named.items()}
    return {
        name: dataclasses.replace(row, name=name, about=name, **more[name]) for name, row in named.items()
    }


BIG = ("", "llama3_8b_8layer")
FSDP = "mesh.fsdp=2 train.rows=4"
CPU = Profiled("", "quickstart", "", CLOSES, one_batch=False, steps=(20, 10, 654), turns=60, named=True)
CPU = dataclasses.replace(CPU, environment="JAX_PLATFORMS=cpu")
# fmt: off
ROWS = rows(**{
    "8layer": Profiled(*BIG, "remat.policy=none", CLOSES + SPLIT, steps=LONG),
    "clean": Profiled(*BIG, SMALL, SPLIT),
    "slow_loader": Profiled(*BIG, SMALL, CAUSE + CLOSES, cause="loader", seconds=0.4, against="clean"),
    "host_sync": Profiled(*BIG, SMALL, CAUSE, cause="sync", seconds=0.1, against="clean"),
    "float32_matmul": Profiled(*BIG, SMALL, CAUSE, cause="float32", against="clean"),
    "repeated_attention": Profiled(*BIG, f"{SMALL} remat.policy=full", CAUSE, cause="remat", against="clean"),
    "zero_operands": Profiled(*BIG, SMALL, CAUSE + SPLIT, cause="zeros", against="clean"),
    "8layer_offload": Profiled(*BIG, "offload.level=optimizer remat.policy=projections", CLOSES,
                               steps=(12, 5, 241), turns=20, most=330),
    "clock": Profiled(*BIG, "", SPLIT, script="levers.py"),
    "clock_allocated_anew": Profiled(*BIG, "", SPLIT, script="levers.py", words="--only bf16",
                                     environment="XLA_PYTHON_CLIENT_ALLOCATOR=platform"),
    "off": Profiled(*BIG, SMALL, OFF, script="profiler_off.py"),
    "fp8_step": Profiled(*BIG, f"{SMALL} precision.matmul=fp8", SPLIT),
    "8layer_fsdp2": Profiled(*BIG, FSDP, CLOSES + SPLIT, steps=LONG, gpus=2),
    "extra_all_gather": Profiled(*BIG, FSDP, CAUSE, cause="gather", against="8layer_fsdp2", steps=LONG,
                                 gpus=2),
    "cpu_quickstart": CPU,
    "cpu_quickstart_given_back": dataclasses.replace(
        CPU, environment=f"{CPU.environment} MALLOC_PERTURB_={GIVEN_BACK['MALLOC_PERTURB_']}"),
})
# fmt: on
NOTES = """\
Planted causes have the 8B shape with 2 layers; the clean run is theirs in common, but for the gather's, which
is the 8-layer run on two GPUs. All steps of a run take one batch, but for the CPU's. Beside a row's record
lies the run, with its ledger.json and report.html; a cause is compared when its row runs, so the clean run's
has to be there before. Rows of the CPU run when named, alone.
"""
