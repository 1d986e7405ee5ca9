"""The rows of profiler.py: what runs, with what wrong with it, and beside what."""

import dataclasses

BIG = "llama3_8b_8layer"
SMALL = "model.layers=2 model.vocabulary=32768 remat.policy=none"
QUIET = "evaluate.rows=0 metrics.tensorboard=false checkpoint.every=0 checkpoint.last=false"


@dataclasses.dataclass(frozen=True)
class Row:
    """config: in configs/. settings: as `--set` takes them. cause: of profiler_causes.py, or `remat`, which
    is a setting. seconds: that it sleeps. one_batch: for all steps. against: the clean run's row. devices:
    GPUs, 0 is the CPU. closes: the ledger is held to its bars. split: and its products' rate taken apart.
    steps: the first that is profiled, how many, and in all. turns: more traces behind them, see
    `profiler_causes.Turns`. script: runs in place of training. most: seconds that it takes, mostly.
    """

    config: str = BIG
    settings: str = ""
    cause: str = "clean"
    seconds: float = 0.0
    one_batch: bool = True
    against: str = ""
    devices: int = 1
    closes: bool = False
    split: bool = False
    steps: tuple[int, int, int] = (20, 3, 45)
    turns: int = 0
    script: str = ""
    most: float = 90.0
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


LONG = (20, 5, 52)
CPU = Row("quickstart", devices=0, closes=True, one_batch=False, steps=(20, 10, 654), turns=60)
# Any variable of glibc's allocator keeps the run from setting it; this one is glibc's default.
GIVEN_BACK = {"MALLOC_PERTURB_": "0"}
ROWS = {
    "8layer_fsdp2": Row(settings="mesh.fsdp=2 train.rows=4", devices=2, closes=True, split=True, steps=LONG),
    "extra_all_gather": Row(
        settings="mesh.fsdp=2 train.rows=4", cause="gather", against="8layer_fsdp2", devices=2, steps=LONG
    ),
    "8layer": Row(settings="remat.policy=none", closes=True, split=True, steps=LONG),
    "clean": Row(settings=SMALL, split=True),
    "slow_loader": Row(settings=SMALL, cause="loader", seconds=0.4, against="clean", closes=True),
    "host_sync": Row(settings=SMALL, cause="sync", seconds=0.1, against="clean"),
    "float32_matmul": Row(settings=SMALL, cause="float32", against="clean"),
    "repeated_attention": Row(settings=f"{SMALL} remat.policy=full", cause="remat", against="clean"),
    "zero_operands": Row(settings=SMALL, cause="zeros", against="clean", split=True),
    "8layer_offload": Row(
        settings="offload.level=optimizer remat.policy=projections",
        closes=True,
        steps=(12, 5, 241),
        turns=20,
        most=300.0,
    ),
    "clock": Row(script="profiler_clock.py"),
    "clock_allocated_anew": Row(
        script="profiler_clock.py --only bf16", environment={"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    ),
    "off": Row(settings=SMALL, script="profiler_off.py"),
    "fp8_step": Row(settings=f"{SMALL} precision.matmul=fp8", split=True),
    "cpu_quickstart": CPU,
    "cpu_quickstart_given_back": dataclasses.replace(CPU, environment=GIVEN_BACK),
}

CAUSES = [name for name, row in ROWS.items() if row.against]
