"""A ledger as a run on two GPUs would give, by hand: what advice, comparison and report are tested with."""

import copy
import dataclasses
import functools
import math
from pathlib import Path

from jaxthru.models import facts as of_model
from jaxthru.models.family import from_plain
from jaxthru.profile.account.ledger import (
    LINES,
    Buffer,
    Clock,
    Collective,
    Device,
    DeviceStep,
    Kernel,
    Ledger,
    Line,
    Lint,
    Matmul,
    Memory,
    Run,
    Scope,
    Window,
)
from jaxthru.profile.read.facts import Facts

ROOT = Path(__file__).resolve().parents[2]
SECONDS = {
    "matmul": 0.330,
    "attention": 0.066,
    "other_kernels": 0.052,
    "exposed_communication": 0.018,
    "exposed_host_copies": 0.006,
    "data_wait": 0.012,
    "host_gap": 0.004,
    "dependency": 0.003,
}
MODEL_FLOPS = 2 * 0.215 * 989.5e12
SCOPE = "jit(train_step)/jvp(model)/layer/mlp/dot_general"


def ledger(*, noise: float = 0.004, **changes) -> Ledger:
    """Returns the ledger with the seconds of lines changed by name, and of matmul's parts."""
    ideal, recomputation, frequency, inefficiency = (
        changes.pop(name, seconds)
        for name, seconds in zip(
            ("ideal", "recomputation", "frequency", "inefficiency"), (0.215, 0.025, 0.048, 0.042), strict=True
        )
    )
    seconds = SECONDS | {"matmul": ideal + recomputation + frequency + inefficiency} | changes
    total = sum(seconds.values())
    lines = tuple(Line(name, seconds.get(name, 0.0), seconds.get(name, 0.0) / total) for name in LINES)
    return Ledger(
        Run("llama3_8b_8layer", "NVIDIA H200", 2, 1, "gpu", {"jax": "0.11.2"}, 32768.0, 1100.0),
        Window(20, 3, total, total * 0.995, 0.005, noise),
        lines,
        Matmul(
            MODEL_FLOPS * 1.12,
            MODEL_FLOPS,
            ideal,
            recomputation,
            frequency,
            inefficiency,
            1830.0,
            1980.0,
            ideal * (1 - 1830 / 1980),
            989.5e12,
        ),
        scopes(seconds),
        kernels(),
        (
            Collective("all-gather-start.3", "all-gather", 117e6, 34.0, 0.041, 0.012, 0.002, "/device:GPU:1"),
            Collective("reduce-scatter.7", "reduce-scatter", 234e6, 10.0, 0.020, 0.006, 0.001),
        ),
        tuple(device(f"/device:GPU:{number}", seconds, total) for number in range(2)),
        Clock(
            "cupti",
            1540.0,
            tuple((i * total / 100, 1540 + 60 * math.sin(i / 5)) for i in range(300)),
            tuple((i * total / 10, 690 + 8 * math.cos(i)) for i in range(30)),
            {"software power cap": 0.93},
        ),
        Memory(
            61_200_000_000,
            {"parameters": 11.2e9, "optimizer": 22.4e9, "gradients": 9.1e9, "activations": 14.6e9},
            (Buffer(2_101_346_304, "jvp(model)/head", "jaxthru/models/llama.py:210", "activations"),),
            tuple((i / 200, 33.6e9 + 27.6e9 * math.sin(math.pi * i / 200)) for i in range(201)),
            0,
        ),
        (Lint("copies", "model/layer/attention/transpose", "copy.12", 268e6, 0.0021, "copies 268 MB"),),
        model=facts(config()),
    )


def scopes(seconds: dict[str, float]) -> tuple[Scope, ...]:
    return (
        Scope("mlp", "forward", "matmul", seconds["matmul"] * 0.3),
        Scope("mlp", "backward", "matmul", seconds["matmul"] * 0.6),
        Scope("mlp", "recomputation", "matmul", seconds["matmul"] * 0.1),
        Scope("attention", "forward", "attention", seconds["attention"] * 0.3),
        Scope("attention", "backward", "attention", seconds["attention"] * 0.7),
        Scope("optimizer", "optimizer", "other_kernels", seconds["other_kernels"] * 0.4),
        Scope("norm", "forward", "other_kernels", seconds["other_kernels"] * 0.6),
    )


def kernels() -> tuple[Kernel, ...]:
    long = "nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_NNT_with_a_name_that_does_not_end_before_the_page_does"
    return (
        Kernel(long, "gemm_fusion_dot.12", "matmul", SCOPE, "layers.py:88", 64.0, 0.2, 3.8e12, 3e8, 7.1e14),
        Kernel("fmha_bwd", "custom-call.9", "attention", "model/layer/attention", None, 8.0, 0.045, 2e12),
        Kernel("loop_dynamic_update_slice_fusion", "dus.4", "other_kernels", "model", None, 24.0, 0.0157),
        *(
            Kernel(
                f"loop_fusion_{i}", f"fusion.{i}", "other_kernels", "model/layer/norm", None, 8.0, 1e-3 / i
            )
            for i in range(1, 40)
        ),
    )


def device(name: str, seconds: dict[str, float], total: float) -> Device:
    """Returns a device whose strip repeats a layer sixteen times, then the optimizer."""
    strip, at = [], 0.0
    for _ in range(16):
        for line, spent in seconds.items():
            strip.append((at, at + spent / 16, line))
            at += spent / 16
    steps = tuple(DeviceStep(20 + i, i * total, total, seconds) for i in range(3))
    return Device(name, steps, tuple(strip))


@functools.cache
def _tree() -> dict:
    from jaxthru import config as configuration

    chosen = ["remat.policy=projections", "model.loop=unroll", "offload.level=none"]
    return configuration.to_dict(configuration.load(ROOT / "configs" / "llama3_8b_8layer.py", chosen))


def config(**changes) -> dict:
    """Returns nested plain values of a configuration; changes: `remat__policy="full"`."""
    tree = copy.deepcopy(_tree())
    tree["train"]["rows"] = 4
    for key, value in changes.items():
        group, _, name = key.partition("__")
        assert name in tree[group], key
        tree[group][name] = value
    return tree


def facts(config: dict) -> Facts:
    """Returns what a run of this configuration writes down of its model."""
    return of_model.facts(from_plain(config["model"]), config["precision"]["compute"])


def with_lint(base: Ledger, rule: str, seconds: float | None, scope: str = "model/layer/mlp") -> Ledger:
    found = Lint(rule, scope, "dot.5", 1e8, seconds, f"{rule} in {scope}")
    return dataclasses.replace(base, lint=(*base.lint, found))


def slow() -> Ledger:
    """Returns the ledger of steps of seven times as long: seconds, written in milliseconds."""
    lines = {name: 7 * seconds for name, seconds in SECONDS.items() if name != "matmul"}
    found = ledger(**lines, ideal=1.5, recomputation=0.18, frequency=0.34, inefficiency=0.29)
    return dataclasses.replace(found, run=dataclasses.replace(found.run, tokens_per_step=7 * 32768.0))


def cpu() -> Ledger:
    """Returns the ledger of a run on a busy CPU: no peak, no clock, and copies whose seconds lie below the
    noise."""
    seconds = {"matmul": 2.4787, "attention": 0.4512, "other_kernels": 0.6933, "dependency": 0.0789}
    total = sum(seconds.values())
    scope = "jit(train_step)/while/body/eval_jaxpr/transpose(jvp(model))/layer/mlp/dot_general"
    longer = device("0", seconds, 1.0134 * total)
    spans = tuple((1.0134 * start, 1.0134 * end, line) for start, end, line in longer.strip)
    steps = (DeviceStep(16, 0.0, 0.9866 * total, seconds), DeviceStep(17, total, 1.0134 * total, seconds))
    return Ledger(
        Run("quickstart", "cpu", 1, 1, "cpu", {"jax": "0.11.2"}, 2048.0, 248.7),
        Window(16, 2, total, total / 1.156, 0.156, 0.32),
        tuple(Line(name, seconds.get(name, 0.0), seconds.get(name, 0.0) / total) for name in LINES),
        Matmul(38.7e9, 38.7e9),
        scopes(seconds),
        (
            Kernel("ynn_fusion.38", "f.38", "matmul", scope, "pallas_kernels/dot.py:8", 4.0, 0.61, 6.4e9),
            Kernel("copy.285", "copy.285", "other_kernels", scope, "optimizer.py:213", 3.0, 0.2911),
        ),
        devices=(dataclasses.replace(longer, steps=steps, strip=spans),),
        memory=Memory(None, {"loss": 134e6, "other": 153e6}, (), (), 0),
        lint=tuple(
            Lint("copies", scope, f"copy.{i}", 3e6, 0.0970, "copies f32[4,192,512]") for i in range(3)
        ),
        model=facts(config()),
    )
