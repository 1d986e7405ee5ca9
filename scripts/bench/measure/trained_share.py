"""Times steps whose masks leave shares of the tokens, with the LM head on all tokens and on those alone.

    python scripts/bench/measure/trained_share.py --config configs/llama3_2_1b.py [--shares 1 0.5 0.2]

`all@S` computes the head on all tokens, `trained@S` on the trained ones, of the same batches: random tokens,
of which a share S is trained on, in runs of 64. All take turns in one process on one state, so that they see
the same clocks; the ratios are of tokens per second, of `trained@S` to `all@S`. Data that says of no token
that it is not trained on runs the program of `all`, so `trained@1` over `all@1` is what asking would cost it.

What is expected: the head's three products are 2·D·V of a step's 2 × matmul parameters, 21% for Llama 3.2 1B
and 23% for 8 layers of Llama 3 8B. A share S of its tokens is computed in whole chunks (2,048 of 32,768 or of
16,384 tokens), so at 0.2 a quarter is left: 1.19 × and 1.21 × if the head is as fast as the rest, less a sort
of the tokens and two gathers of hidden vectors, below 1 ms.
"""

import argparse
import functools
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import comparison
import harness
import jax
import numpy as np
import turns
from commit_trees import Tree, random_data
from measure.steps_in_turns import Contender, peak

from jaxthru import config as configuration
from jaxthru.build.compiled import Build, build_step
from jaxthru.runtime.errors import require

RUN = 64  # tokens in a row that are trained on, or not
HEADS = {"all": False, "trained": True}


def built(config: configuration.RunConfig, documents: int, masked: bool) -> Build:
    """Returns the step of a configuration. masked: whether its data says what is trained on."""
    data = types.SimpleNamespace(**vars(random_data(config, documents)) | {"masked": masked})
    return build_step(config, data)


def with_share(batch: dict[str, np.ndarray], share: float, seed: int) -> dict[str, np.ndarray]:
    """Returns a batch of which so much is trained on, in each row as many whole runs."""
    rows, sequence = batch["tokens"].shape
    runs = math.ceil(sequence / RUN)
    places = np.random.default_rng(seed).permuted(np.tile(np.arange(runs), (rows, 1)), axis=1)
    mask = np.repeat(places < math.ceil(share * runs), RUN, axis=1)[:, :sequence]
    return batch | {"loss_mask": mask.astype(np.float32)}


def placed(step: Contender, share: float) -> list:
    """Returns a contender's batches with such masks, on the devices."""
    rows = step.builds[0].config.train.rows
    batches = (jax.device_get(parts[0]) for parts in step.placed)
    return [[step.builds[0].place(with_share(each, share, at), rows)] for at, each in enumerate(batches)]


def contenders(arguments: argparse.Namespace) -> Iterator[tuple[str, Contender]]:
    """Yields `all@S` and `trained@S` of each share."""
    settings = ["train.steps=1000000", *arguments.overrides]
    config = configuration.load(arguments.config, settings)
    tree = Tree(harness.ROOT)
    for head, masked in HEADS.items():
        build = built(config, arguments.documents, masked)
        for share in arguments.shares:
            step = Contender(tree, [build], arguments.documents)
            step.placed = placed(step, share)
            yield f"{head}@{share:g}", step


def measure(arguments: argparse.Namespace) -> dict:
    """Returns the record of all contenders. Raises InputError."""
    require(all(0 < share <= 1 for share in arguments.shares), "--shares: each above 0 and at most 1")
    made = dict(contenders(arguments))
    state, usual = next(iter(made.values())).first_states(), {}
    for name, step in made.items():
        state, *_ = step.turn(state, 1)
        state, usual[name], *_ = step.turn(state, 2)

    def run(name: str) -> tuple[list[float], float, list]:
        nonlocal state
        count = max(2, math.ceil(arguments.turn_seconds / usual[name]))
        state, seconds, tokens, last = made[name].turn(state, count)
        return [seconds] * count, tokens, last

    gpus = next(iter(made.values())).builds[0].layout.mesh.size
    how = arguments.warmup_seconds, arguments.timed_seconds, gpus
    taken = turns.steps_in_turns({name: functools.partial(run, name) for name in made}, *how, backwards=True)
    rows = {name: turns.rated(own) for name, own in taken.items()}
    for name, row in rows.items():
        last = taken[name][-1].last[0]
        trained = float(np.sum(last["source_tokens"])) / int(last["tokens"])
        row |= {"trained_share": round(trained, 4), "peak_hbm_bytes": peak(made[name].builds[0])}
    return {"documents": arguments.documents, "contenders": rows, "ratios": ratios(rows, arguments.shares)}


def ratios(rows: dict[str, dict], shares: list[float]) -> dict[str, dict]:
    """Returns of each share what the head on trained tokens alone gains."""
    pairs = {f"{share:g}": (rows[f"trained@{share:g}"], rows[f"all@{share:g}"]) for share in shares}
    return {share: comparison.ratio(*pair) for share, pair in pairs.items()}


main = harness.program(
    __doc__,
    measure,
    harness.option("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.2], metavar="S"),
    harness.option("--documents", type=int, default=8, help="of random tokens in a row"),
    harness.option("--turn-seconds", type=float, default=4.0),
    seconds=(20.0, 20.0),
)

if __name__ == "__main__":
    sys.exit(main())
