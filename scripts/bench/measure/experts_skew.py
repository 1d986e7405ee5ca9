"""Times steps of experts on several devices whose router favours one device, and prints one JSON line.

    python scripts/bench/measure/experts_skew.py --config configs/qwen3_30b_a3b_12layer.py --skew 1.6 \\
        --set mesh.fsdp=1 --set mesh.expert=2 --set train.rows=16 [--output FILE]

A bias on the router's choice of the first device's experts is bisected until that device is given `--skew`
times the mean of assignments, and until it is given as many as the others. Both take turns, with one program
and weights that stay as they are; nothing differs but the bias. No token may be dropped: every one is counted
at as many experts as it chooses.

`predicted_seconds` is the balanced step and what the busier device multiplies beyond the mean: 18 × tokens ×
top_k × embed × expert_mlp FLOPs of a layer over the devices, at --tflops, the rate of a whole layer of
experts on one H200 (docs/results.md); with a policy that computes hidden rows again, gate and up, 22.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import jax
import numpy as np
import turns
from commit_trees import Tree
from measure.steps_in_turns import Contender

from jaxthru.runtime import xla
from jaxthru.runtime.errors import require

STILL = ("optim.learning_rate=1e-12", "model.bias_rate=1e-30")  # a router has a bias where it may move
TOKENS = "expert_tokens"
HALVINGS, NEAR = 16, 0.005


def favoured(state: dict, devices: int, bias: float) -> dict:
    """Returns a state in which each router's choice has this bias for the experts of the first device."""

    def change(path: tuple, leaf: jax.Array) -> jax.Array:
        if [str(getattr(key, "key", key)) for key in path[-2:]] != ["router", "bias"]:
            return leaf
        values = np.zeros(leaf.shape, leaf.dtype)
        values[..., : leaf.shape[-1] // devices] = bias
        return jax.device_put(values, leaf.sharding)

    return state | {"params": jax.tree_util.tree_map_with_path(change, state["params"])}


def busiest(counts_LE: np.ndarray, devices: int) -> float:
    """Returns the assignments of the first device over the mean of all devices, in the mean of the layers."""
    per_device = counts_LE.reshape(len(counts_LE), devices, -1).sum(-1)
    return float((per_device[:, 0] / per_device.mean(-1)).mean())


def bias_for(wanted: float, try_bias) -> tuple[float, float]:
    """Returns the bias at which the first device has so many times the mean, and how many times it has.
    try_bias: a bias -> that."""
    low, high = -1.0, 1.0  # scores are shares of one: no token chooses otherwise beyond
    found = low, try_bias(low)
    for _ in range(HALVINGS):
        if abs(found[1] - wanted) < NEAR:
            break
        middle = (low + high) / 2
        got = try_bias(middle)
        found = min(found, (middle, got), key=lambda pair: abs(pair[1] - wanted))
        low, high = (middle, high) if got < wanted else (low, middle)
    return found


def run(arguments: argparse.Namespace) -> dict:
    """Returns the record. Raises InputError for what has no experts on several devices."""
    xla.configure()
    tree = Tree(harness.ROOT)
    built = tree.build(Path(arguments.config), [*arguments.overrides, *STILL], 0)
    devices, model = built.layout.mesh.shape["expert"], built.config.model
    require(devices > 1, f"mesh.expert = {devices}: is to be 2 or more, over which a router can be skewed")
    require(
        1.0 < arguments.skew < devices,
        f"--skew {arguments.skew}: must lie between 1 and mesh.expert = {devices}, where one device has all",
    )
    of = Contender(tree, [built], 0)
    states = of.first_states()

    def step(bias: float, steps: int) -> tuple[float, float, dict]:
        nonlocal states
        states = [favoured(states[0], devices, bias)]
        states, seconds, tokens, (told,) = of.turn(states, steps)
        counts, last = told[TOKENS], of.tokens[(of.taken - 1) % len(of.tokens)]
        dropped = last * model.top_k * len(counts) - int(counts.sum())
        require(dropped == 0, f"{dropped} assignments of {last} tokens were dropped")
        return seconds, tokens, told

    asked = {"balanced": 1.0, "skewed": arguments.skew}
    biases = {
        name: bias_for(wanted, lambda bias: busiest(step(bias, 1)[2][TOKENS], devices))
        for name, wanted in asked.items()
    }

    def turn(name: str) -> tuple[list[float], float, dict]:
        seconds, tokens, told = step(biases[name][0], arguments.steps)
        return [seconds] * arguments.steps, tokens, told

    runs = {name: lambda name=name: turn(name) for name in asked}
    taken = turns.steps_in_turns(runs, arguments.warmup_seconds, arguments.timed_seconds, devices)
    rows = {name: turns.rated(own) for name, own in taken.items()}
    for name, row in rows.items():
        shares = [busiest(each.last[TOKENS], devices) for each in taken[name]]
        row |= {"bias": biases[name][0], "busiest_device": round(float(np.mean(shares)), 4)}
    again = {"none": 18.0, "projections": 18.0}.get(built.config.remat.policy, 22.0)
    widths = model.embed * model.expert_mlp * model.top_k * model.layers
    mean_flops = again * rows["balanced"]["tokens_per_step"] * widths / built.layout.mesh.size
    more = rows["skewed"]["busiest_device"] - rows["balanced"]["busiest_device"]
    predicted = rows["balanced"]["step_seconds_mean"] + more * mean_flops / (1e12 * arguments.tflops)
    return {
        "contenders": rows,
        "remat": built.config.remat.policy,
        "predicted_seconds": round(predicted, 5),
        "over_predicted": round(rows["skewed"]["step_seconds_mean"] / predicted, 4),
        "dropped": 0,
    }


main = harness.program(
    __doc__,
    run,
    harness.option("--skew", type=float, default=1.6, help="the busier device's assignments over the mean"),
    harness.option("--tflops", type=float, default=498.0, help="of a whole layer of experts on one device"),
    harness.option("--steps", type=int, default=5, help="of a turn"),
    seconds=(10.0, 15.0),
)

if __name__ == "__main__":
    sys.exit(main())
