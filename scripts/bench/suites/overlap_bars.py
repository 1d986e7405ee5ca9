"""What the bars of overlapped collectives are about, found in what the rows' processes printed."""

import itertools
import statistics

from suites.rows import Bar

from pallas_kernels.collective_matmul.shapes import GPU, UNTUNED

Said = dict[str, list[dict]]
"""{row: what its processes printed}, without those that have not run."""

# Of a fused kernel's rate over that of XLA's collective and product, on 2 H200s.
KERNELS = {
    "qkv_forward": 1.40,
    "gate_forward": 1.20,
    "gate_up_forward": 1.08,
    "scatter_6144_forward": 1.35,
    "down_forward": 1.20,
    "qkv_backward": 1.15,
    "gate_backward": 1.15,
    "gate_up_backward": 1.15,
    "scatter_6144_backward": 1.15,
    "down_backward": 1.15,
}
EVERY = {f"{name}_{direction}" for name in GPU | UNTUNED for direction in ("forward", "backward")}
STEPS = 50  # of which the losses are compared
REGIMES = {"in_bursts": "in bursts", "contenders": "without a pause"}
AGAINST = {"plain": "plain", "jax": "JAX's kernel"}
OF_JAX = ("qkv_forward", "gate_forward", "gate_up_forward")


def kernel(said: Said, case: str, other: str, regime: str) -> float | None:
    """Returns the rate of the fused kernel over another contender's; after tuning, if that has been done."""
    for row in ("tuned", "forward" if case.endswith("forward") else "backward"):
        for line in said.get(row, []):
            contenders = line["cases"].get(case, {}).get(regime, {})
            if "fused" in contenders and other in contenders:
                return contenders[other]["microseconds"] / contenders["fused"]["microseconds"]
    return None


def never_slower(said: Said) -> float | None:
    """Returns the least rate, over the plain form's, of what runs by `fused`, of all shapes once
    tuned; None while any is not measured and none is slower. A difference below twice the A-A spread is none.
    """
    found = {}
    for line in (line for row in ("tuned", "others") for line in said.get(row, [])):
        for (case, of), regime in itertools.product(line["cases"].items(), REGIMES):
            both = [of.get(regime, {}).get(name) for name in ("plain", "dispatched")]
            if all(both):
                plain, dispatched = (one["microseconds"] for one in both)
                found[case, regime] = plain / dispatched + 2 * max(one["a_a_spread"] for one in both)
    least = min(found.values(), default=1.0)
    every = set(itertools.product(EVERY, REGIMES))
    return least if found.keys() >= every or least < 1.0 else None


def tensor(said: Said) -> float | None:
    """Returns the rate of the fastest overlapped step over the plain one's."""
    for line in said.get("tensor") or said.get("tensor_ring") or []:
        ratios = [of["ratio"] for name, of in line["contenders"].items() if name != "none"]
        return max(ratios, default=None)
    return None


def fsdp(said: Said, gpus: int) -> float | None:
    """Returns tokens per second and GPU, of the fastest way to move parameters, over those of one GPU.

    Of the rows that are timed as one GPU is: those in turns rest between them, and clock higher after it.
    """
    alone = [line["tokens_per_second"] for line in said.get("one_gpu", [])]
    ways = [line for row in ("fsdp_few", "fsdp_copies") for line in said.get(row, [])]
    rates = [line["tokens_per_second"] for line in ways]
    return max(rates) / gpus / statistics.fmean(alone) if alone and rates else None


def exposed(said: Said) -> float | None:
    lines = said.get("exposed", [])
    shares = [device["exposed_collectives"] for line in lines for device in line["devices"].values()]
    return max(shares, default=None)


def losses(said: Said, row: str) -> float | None:
    """Returns how far a run's losses are from one GPU's, over how far another order of sums moves those.

    By root mean square over the steps: the beginning of training is chaotic, and any one step may differ.
    """
    three = (*said.get(row, []), *said.get("losses_one", []), *said.get("losses_noise", []))
    if len(three) < 3:
        return None
    found, one, noise = (line["losses"][:STEPS] for line in three)
    apart = [
        statistics.fmean((a - b) ** 2 for a, b in zip(other, one, strict=True)) ** 0.5
        for other in (found, noise)
    ]
    return apart[0] / apart[1] if apart[1] else (float("inf") if apart[0] else 0.0)


def over(case: str, other: str, regime: str) -> str:
    """Returns the key of what a kernel's bar is about."""
    return f"{case}, over {AGAINST[other]}, {REGIMES[regime]}"


def measured(said: Said, gpus: int) -> dict[str, float | None]:
    """Returns all that a bar is about, None where it was not measured."""
    found = {
        over(case, other, regime): kernel(said, case, other, regime)
        for regime in REGIMES
        for other, cases in (("plain", KERNELS), ("jax", OF_JAX))
        for case in cases
    }
    return found | {
        "never_slower": never_slower(said),
        "tensor": tensor(said),
        "fsdp": fsdp(said, gpus),
        "exposed": exposed(said),
        "losses_tensor": losses(said, "losses_tensor"),
        "losses_ring": losses(said, "losses_ring"),
    }


def kernels(direction: str) -> tuple[Bar, ...]:
    """Returns the bars of all kernels of a direction."""
    of = [(case, "plain", bar) for case, bar in KERNELS.items()] + [(case, "jax", 1.0) for case in OF_JAX]
    wanted = [
        (over(case, other, regime), bar) for regime in REGIMES for case, other, bar in of if direction in case
    ]
    return tuple(Bar(what, bar, f"{{:g}} × {what}") for what, bar in wanted)
