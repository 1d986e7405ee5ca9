"""Trains a mixture of experts in resident float32 and with offloaded 8-bit moments, and compares the losses.

    python scripts/bench/measure/experts_state_loss.py [--config FILE] [--set a.b=v ...] [--steps N]
        [--seeds N] [--stop-after SECONDS]

Both start each seed from the same parameters and take the same batches; the mean over seeds counts, beside
its standard error. `offloaded` has what configs/qwen3_30b_a3b.py has: exact masters in halves, 8-bit moments,
and the larger part of them on the host. Both clip by one rule, this step's own norm, or with --set
optim.clip_rule=previous that of the step before: that rule costs loss by itself. Seeds take turns, so that
--stop-after leaves whole pairs: no pair is begun that would not end by then. Without --config it is a mixture
of 1.1 B parameters, 0.4 B of them active, of OLMoE's make.

Expected on an H200: 2.4 GFLOP a token and 0.2 of attention, 8,192 tokens a step: 21 TFLOP, 0.09 s at 35 % of
the 690 TFLOP/s that large products sustain, and the host's 2.8 GB each way 0.06 s beside it. 2,400 steps of
0.11 s and two compilations of 40 s: 6 minutes.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import fp8_loss
import harness

from jaxthru import config as configuration
from jaxthru.build.compiled import build_step
from jaxthru.config import DataConfig, EvaluateConfig, OptimConfig, RunConfig, TrainConfig, moe
from jaxthru.data.loading.dataset import open_data
from jaxthru.models import family
from jaxthru.runtime import xla

STATES = {
    "float32": ("optim.state=float32", "offload.level=none"),
    "offloaded": ("optim.state=split_master_int8", "offload.level=optimizer", "offload.fraction=0.65"),
}


def config() -> RunConfig:
    """A shape of 0.4 B active parameters, whose experts have 2,048 tokens each."""
    return RunConfig(
        train=TrainConfig(rows=4),
        model=moe.Config(
            **{"vocabulary": 8192, "layers": 9, "embed": 2048, "max_sequence": 2048, "loop": "unroll"},
            **{"heads": 16, "kv_heads": 16, "head_dim": 128, "qk_norm": True, "qk_norm_together": True},
            **{"experts": 32, "top_k": 8, "expert_mlp": 512, "normalise": False},
            **{"aux_loss": 0.01, "router_z_loss": 0.001},
        ),
        data=DataConfig(mix="quickstart", sequence=2048),
        optim=OptimConfig(learning_rate=3e-4, warmup_ratio=0.1),
        evaluate=EvaluateConfig(rows=64),
    )


def measure(arguments) -> dict:
    began = time.monotonic()
    xla.configure()
    overrides = [*arguments.overrides, f"train.steps={arguments.steps}"]
    configs = {
        name: configuration.load(arguments.config, [*overrides, *keys]) for name, keys in STATES.items()
    }
    shape, found, longest = configs["float32"], {name: [] for name in STATES}, 0.0
    seconds = {name: [] for name in STATES}
    with open_data(shape.data) as data:
        built = {name: build_step(each, data) for name, each in configs.items()}
        evaluations = {name: each.evaluation() for name, each in built.items()}
        for seed in range(arguments.seeds):
            pair = time.monotonic()
            if seed and pair - began + longest > arguments.stop_after:
                print(f"stopped before seed {seed}", file=sys.stderr)
                break
            for name, each in built.items():
                print(f"{name}, seed {seed}", file=sys.stderr)
                run = time.monotonic()
                found[name].append(fp8_loss.run(each, evaluations[name], seed))
                seconds[name].append(round(time.monotonic() - run, 1))
            longest = max(longest, time.monotonic() - pair)
    count = family.module_of(shape.model)
    kept = ("held_out_loss", "skipped_updates")
    return {
        "states": STATES,
        "steps": arguments.steps,
        "seeds": len(found["float32"]),
        "tokens_per_step": shape.train.rows * shape.data.sequence,
        "parameters": count.parameters(shape.model),
        "active_parameters": count.matmul_parameters(shape.model),
        "offloaded_over_float32": fp8_loss.compare(found["float32"], found["offloaded"]),
        "means_of_20_steps": {name: fp8_loss.windows(runs).round(5).tolist() for name, runs in found.items()},
        **{key: {name: [run[key] for run in runs] for name, runs in found.items()} for key in kept},
        "seconds": seconds,
    }


main = harness.program(
    __doc__,
    measure,
    harness.option("--steps", type=int, default=300),
    harness.option("--seeds", type=int, default=4),
    harness.option("--stop-after", type=float, default=float("inf"), metavar="SECONDS"),
    config=__file__,
)


if __name__ == "__main__":
    sys.exit(main())
