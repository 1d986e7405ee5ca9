"""Trains a mixture of experts and a dense model of equal active parameters on one text, and compares them.

    python scripts/bench/measure/experts_loss.py [--config FILE] [--dense FILE] [--set a.b=v ...] [--seeds N]

For several seeds, each of which gives both the same batches; the mean over seeds counts, beside its standard
error. Without files they are `quickstart_moe` and `quickstart`, for two CPU cores. Also says how many seconds
of a core a run took, without compiling. Prints the means of every 20 steps as they go by, and then one JSON
line.
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
from jaxthru.data.loading.dataset import open_data
from jaxthru.models import family


def runs(name: str, overrides: list[str], seeds: int) -> tuple[list[dict], dict]:
    """Returns what `fp8_loss.run` does of each seed, and facts about the model."""
    config, found = configuration.load(name, overrides), []
    count = family.module_of(config.model)
    with open_data(config.data) as data:
        built = build_step(config, data)
        evaluation = built.evaluation()
        for seed in range(seeds):
            print(f"{name}, seed {seed}", file=sys.stderr)
            begun = time.process_time()
            found.append(
                fp8_loss.run(built, evaluation, seed) | {"core_seconds": time.process_time() - begun}
            )
    facts = {
        "parameters": count.parameters(config.model),
        "active_parameters": count.matmul_parameters(config.model),
        "steps": config.train.steps,
        "tokens_per_step": config.train.rows * config.data.sequence,
    }
    return found, facts


def measure(arguments) -> dict:
    of = {"dense": arguments.dense, "experts": str(arguments.config)}
    made = {name: runs(file, arguments.overrides, arguments.seeds) for name, file in of.items()}
    results = {name: found for name, (found, _) in made.items()}
    kept = ("held_out_loss", "skipped_updates", "core_seconds")
    return {
        "configs": of,
        "seeds": arguments.seeds,
        "models": {name: facts for name, (_, facts) in made.items()},
        "experts_over_dense": fp8_loss.compare(results["dense"], results["experts"]),
        "means_of_20_steps": {
            name: fp8_loss.windows(found).round(5).tolist() for name, found in results.items()
        },
        **{key: {name: [run[key] for run in found] for name, found in results.items()} for key in kept},
    }


main = harness.program(
    __doc__,
    measure,
    harness.option("--dense", default="quickstart"),
    harness.option("--seeds", type=int, default=3),
    config="quickstart_moe",
)


if __name__ == "__main__":
    sys.exit(main())
