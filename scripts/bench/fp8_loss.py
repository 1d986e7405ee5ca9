"""Trains a configuration twice, with precision.matmul = compute and fp8, and compares the losses.

    python scripts/bench/fp8_loss.py [--config FILE] [--set a.b=v ...] [--steps 300] [--output FILE]

Both runs start from the same parameters and take the same batches. Without --config it is a Llama of 0.4 B
parameters. Prints the means of every 20 steps as they go by, and then one JSON line.
"""

import argparse
import json
import sys
from pathlib import Path

import jax
import numpy as np

from jaxthru import config as configuration
from jaxthru.config import RunConfig
from jaxthru.data.loader import Data, DataConfig, open_data
from jaxthru.data.state import DataState
from jaxthru.models.llama import ModelConfig
from jaxthru.optim.optimizer import OptimConfig
from jaxthru.runtime.errors import InputError
from jaxthru.train import build
from jaxthru.training.evaluate import EvaluateConfig
from jaxthru.training.run_directory import environment
from jaxthru.training.step import TrainConfig

WINDOW = 20


def config() -> RunConfig:
    """A shape large enough for float8 to matter and small enough for an H200 to train in a minute."""
    return RunConfig(
        train=TrainConfig(rows=8),
        model=ModelConfig(
            vocabulary=8192,
            layers=8,
            embed=2048,
            heads=16,
            kv_heads=4,
            head_dim=128,
            mlp=5632,
            max_sequence=2048,
            loop="unroll",
        ),
        data=DataConfig(mix="quickstart", sequence=2048),
        optim=OptimConfig(learning_rate=6e-4),
        evaluate=EvaluateConfig(rows=64),
    )


def losses(config: RunConfig, data: Data) -> tuple[list[float], float | None, int]:
    """Returns the loss of every step, the held-out loss after the last, and how many updates were skipped."""
    built = build(config, data)
    batches = built.batches(DataState(0, ((0, data.weights),), data.keys))
    state, metrics = built.first_state(), []
    for batch in batches:
        state, latest = built.compiled(state, batch)
        metrics.append({name: latest[name] for name in ("loss", "skipped")})
        if len(metrics) % WINDOW == 0:
            metrics[-WINDOW:] = jax.device_get(metrics[-WINDOW:])
            mean = np.mean([values["loss"] for values in metrics[-WINDOW:]])
            print(f"{config.precision.matmul:8} {len(metrics):5} {mean:.5f}", file=sys.stderr, flush=True)
    metrics = jax.device_get(metrics)
    evaluation = built.evaluation()
    last = config.train.steps
    held_out = evaluation(last, state["params"])["loss"] if evaluation.due(last, last=True) else None
    return [float(values["loss"]) for values in metrics], held_out, int(metrics[-1]["skipped"])


def compare(plain: list[float], float8: list[float]) -> dict:
    """Returns how far the losses in float8 are from the others, as parts of those."""
    one, other = np.asarray(plain), np.asarray(float8)
    late = min(50, len(one))
    count = len(one) // WINDOW
    means = [losses[: count * WINDOW].reshape(count, WINDOW).mean(axis=1) for losses in (one, other)]
    relative = (other - one) / one
    return {
        "relative_difference_last_50": float(f"{relative[-late:].mean():.3e}"),
        "mean_absolute_relative_difference_last_50": float(f"{np.abs(relative[-late:]).mean():.3e}"),
        "largest_relative_difference_of_20_step_means": float(
            f"{np.abs(means[1] / means[0] - 1).max(initial=0):.3e}"
        ),
        "means_of_20_steps": {
            "compute": [round(float(loss), 5) for loss in means[0]],
            "fp8": [round(float(loss), 5) for loss in means[1]],
        },
        "loss": {"compute": [plain[0], plain[-1]], "fp8": [float8[0], float8[-1]]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=__file__, help="default: a Llama of 0.4 B parameters")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="GROUP.KEY=VALUE")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    overrides = [*arguments.overrides, f"train.steps={arguments.steps}"]
    results = {}
    try:
        for matmul in ("compute", "fp8"):
            chosen = configuration.load(arguments.config, [*overrides, f"precision.matmul={matmul}"])
            results[matmul] = losses(chosen, open_data(chosen.data))
    except InputError as error:
        print(f"fp8_loss: {error}", file=sys.stderr)
        return 2
    where = environment()
    line = {
        "benchmark": "fp8_loss",
        "config": Path(arguments.config).stem,
        "set": arguments.overrides,
        "steps": arguments.steps,
        "rows": chosen.train.rows,
        "sequence": chosen.data.sequence,
        **compare(results["compute"][0], results["fp8"][0]),
        "held_out_loss": {matmul: result[1] for matmul, result in results.items()},
        "skipped_updates": {matmul: result[2] for matmul, result in results.items()},
        "device": where["devices"],
        "versions": where["versions"] | {"python": where["python"], "backend": where["backend"]},
        "commit": where["commit"],
        "command": " ".join(["python", *sys.argv]),
    }
    print(json.dumps(line), flush=True)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(line, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
