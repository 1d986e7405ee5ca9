"""Trains a configuration with precision.matmul = compute and fp8, for several seeds, and compares the losses.

    python scripts/bench/measure/fp8_loss.py [--config FILE] [--set a.b=v ...] [--steps N] [--seeds N]
    python scripts/bench/measure/fp8_loss.py --set precision.matmul=fp8 \\
        --key optim.state --values float32 split_master_float32

With `--key lora.base` it is the frozen base of adapters that is kept in the one or the other; with --values,
what any key is in turn.

The two runs of a seed start from the same parameters and take the same batches. The beginning of training is
chaotic: what one pair of runs differs by says little, so that the mean over seeds counts, beside its standard
error. Without --config it is a Llama of 0.4 B parameters. Prints the means of every 20 steps as they go by,
and then one JSON line.

Log (H200, the default shape, one seed): at a learning rate of 6e-4 fp8 was 0.85 % above compute after 100
steps, where two compute runs whose learning rates differ by 0.2 % were 0.68 % apart; before its backward sums
were float32, 1.9 %. At 3e-4 it was 1.3 % below over the last 50 of 300 steps, a lead won between steps 20 and
40, where two compute runs (0.1 %) stayed within 0.3 %. A model of 19 M on a CPU: 0.03 % after 120 steps. So
one pair decides nothing.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import jax
import numpy as np

from jaxthru import config as configuration
from jaxthru.build.compiled import Build, build_step
from jaxthru.config import DataConfig, EvaluateConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from jaxthru.data.loading.dataset import open_data
from jaxthru.data.loading.state import DataState
from jaxthru.training.evaluate import Evaluation

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
        optim=OptimConfig(learning_rate=3e-4, warmup_ratio=0.1),
        evaluate=EvaluateConfig(rows=64),
    )


def run(built: Build, evaluation: Evaluation, seed: int) -> dict:
    """Trains from a seed; returns the loss of every step, the held-out loss and how many updates were
    skipped."""
    train = dataclasses.replace(built.config.train, seed=seed)
    built = dataclasses.replace(built, config=dataclasses.replace(built.config, train=train))
    state, metrics, data = built.first_state(), [], built.data
    with built.batches(DataState(0, ((0, data.mixture),), data.keys)) as batches:
        for batch in batches:
            state, latest = built.compiled(state, batch)
            metrics.append({name: latest[name] for name in ("loss", "skipped")})
            if len(metrics) % WINDOW == 0:
                metrics[-WINDOW:] = jax.device_get(metrics[-WINDOW:])
                mean = np.mean([values["loss"] for values in metrics[-WINDOW:]])
                print(f"{len(metrics):5} {mean:.5f}", file=sys.stderr, flush=True)
    metrics, state = jax.device_get(metrics), built.compiled.settled(state)
    return {
        "losses": [float(values["loss"]) for values in metrics],
        "held_out_loss": evaluation(train.steps, state["params"])["loss"],
        "skipped_updates": int(metrics[-1]["skipped"]),
    }


def windows(runs: list[dict]) -> np.ndarray:
    """Returns float64 [seeds, windows], the mean losses of every WINDOW steps."""
    losses = np.array([run["losses"] for run in runs])
    whole = losses.shape[1] // WINDOW * WINDOW
    return losses[:, :whole].reshape(len(runs), -1, WINDOW).mean(axis=2)


def mean_and_error(values: np.ndarray) -> dict:
    """Returns the mean over seeds and its standard error, None for one seed."""
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else None
    return {
        "mean": float(f"{values.mean():.3e}"),
        "standard_error": error and float(f"{error:.2e}"),
        "by_seed": [float(f"{value:.3e}") for value in values],
    }


def compare(first: list[dict], second: list[dict]) -> dict:
    """Returns how far the second losses are from the first, seed by seed, as parts of the first."""

    def differences(number: Callable[[dict], float]) -> np.ndarray:
        return np.array([number(b) / number(a) - 1 for a, b in zip(first, second, strict=True)])

    curves = windows(second).mean(axis=0) / windows(first).mean(axis=0) - 1
    return {
        "all_steps": mean_and_error(differences(lambda run: np.mean(run["losses"]))),
        "last_50_steps": mean_and_error(differences(lambda run: np.mean(run["losses"][-50:]))),
        "held_out": mean_and_error(differences(lambda run: run["held_out_loss"])),
        "curve_of_20_step_means": [float(f"{part:.2e}") for part in curves],
    }


def measure(arguments) -> dict:
    overrides, results = [*arguments.overrides, f"train.steps={arguments.steps}"], {}
    first, second = arguments.values
    for value in arguments.values:
        config = configuration.load(arguments.config, [*overrides, f"{arguments.key}={value}"])
        with open_data(config.data) as data:
            built = build_step(config, data)
            evaluation = built.evaluation()
            results[value] = []
            for seed in range(arguments.seeds):
                print(f"{value}, seed {seed}", file=sys.stderr)
                results[value].append(run(built, evaluation, seed))
    kept = ("held_out_loss", "skipped_updates")
    return {
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "key": arguments.key,
        "rows": config.train.rows,
        "sequence": config.data.sequence,
        f"{second}_over_{first}": compare(results[first], results[second]),
        "means_of_20_steps": {name: windows(runs).round(5).tolist() for name, runs in results.items()},
        **{key: {name: [run[key] for run in runs] for name, runs in results.items()} for key in kept},
    }


main = harness.program(
    __doc__,
    measure,
    harness.option("--steps", type=int, default=300),
    harness.option("--seeds", type=int, default=4),
    harness.option("--key", default="precision.matmul", help="what is one and the other in turn"),
    harness.option("--values", nargs=2, default=("compute", "fp8"), metavar=("FIRST", "SECOND")),
    config=__file__,
)


if __name__ == "__main__":
    sys.exit(main())
