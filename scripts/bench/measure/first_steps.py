"""Starts the training command, and sees its first steps or its refusal: prints one JSON line.

    python scripts/bench/measure/first_steps.py --config FILE [--set a.b=v ...] --steps N

With --steps 0 the configuration is to be refused: with exit code 2 and one line, and before data is prepared,
which for this is given a folder of its own. Else the run is ended after N steps, so that it saves nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
from measure import starts

LIMIT = 400.0  # seconds of a refusal, which compiles nothing


def refusal(words: list[str], folder: Path) -> dict:
    """Returns how a configuration was refused."""
    store = folder / "store"
    command = [sys.executable, "-m", "jaxthru.train", *words, "--set", f"data.store={store}"]
    command += ["--run-dir", str(folder / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    said = [line for line in ended.stderr.splitlines() if line.strip()]
    prepared = store.exists() or any("preparing data" in line for line in said)
    refused = said[-1] if ended.returncode == 2 and said else None
    return {
        "exit_code": ended.returncode,
        "refused": refused,
        "lines": len(said),
        "data_prepared": prepared,
        "as_it_should": refused is not None and not prepared,
    }


def first_steps(words: list[str], folder: Path, steps: int) -> dict:
    """Returns the first steps of a run. Exits if it ends before."""
    run = folder / "run"
    seconds, rows = starts.start(words, dict(os.environ), run, steps)
    chosen = json.loads((run / "choices.json").read_text())
    where = json.loads((run / "environment.json").read_text())
    losses = [row["loss"] for row in rows[:steps]]
    finite = all(loss is not None and loss == loss and abs(loss) < float("inf") for loss in losses)
    return {
        "seconds_to_first_step": round(seconds, 1),
        "step_seconds": [row["step_seconds"] for row in rows[:steps]],
        "losses": losses,
        "hbm_peak_bytes": rows[-1].get("hbm_peak_bytes"),
        "chosen": {each["key"]: each["chosen"] for each in chosen},
        "as_it_should": len(losses) == steps and finite,
        "device": where["devices"],
        "versions": where["versions"],
    }


def measure(arguments) -> dict:
    words = ["--config", arguments.config, *harness.set_words(arguments.overrides)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return first_steps(words, folder, arguments.steps) if arguments.steps else refusal(words, folder)


steps = harness.option("--steps", type=int, required=True, help="0: it is to be refused")
main = harness.program(__doc__, measure, steps, elsewhere=True)


if __name__ == "__main__":
    sys.exit(main())
