"""What the rows of overlap.py have to show, and whether they do."""

import itertools
import statistics
from collections.abc import Callable

from pallas_kernels.collective_matmul.shapes import GPU, UNTUNED

Said = dict[str, list[dict] | None]
"""{row: what its processes printed; None if it has not run}."""

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
TENSOR, FSDP, EXPOSED, NOISE = 1.08, 0.97, 0.03, 2.0
EVERY = {f"{name}_{direction}" for name in GPU | UNTUNED for direction in ("forward", "backward")}
STEPS = 50  # of which the losses are compared
REGIMES = {"in_bursts": "in bursts", "contenders": "without a pause"}


def kernel(said: Said, case: str, other: str, regime: str) -> float | None:
    """Returns the rate of the fused kernel over another contender's; after tuning, if that has been done."""
    for row in ("tuned", *(("forward",) if case.endswith("forward") else ("backward",))):
        for line in said.get(row) or []:
            contenders = line["cases"].get(case, {}).get(regime, {})
            if "fused" in contenders and other in contenders:
                return contenders[other]["microseconds"] / contenders["fused"]["microseconds"]
    return None


def never_slower(said: Said) -> float | None:
    """Returns the least rate, over the plain form's, of what runs by `fused`, of all shapes once
    tuned; None while any is not measured and none is slower. A difference below twice the A-A spread is none.
    """
    found = {}
    for row in ("tuned", "others"):
        for line in said.get(row) or []:
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
    for row in ("tensor", "tensor_ring"):
        for line in said.get(row) or []:
            ratios = [of["ratio"] for name, of in line["contenders"].items() if name != "none"]
            return max(ratios, default=None)
    return None


def fsdp(said: Said, devices: int) -> float | None:
    """Returns tokens per second and GPU, of the fastest way to move parameters, over those of one GPU.

    Of the rows that are timed as one GPU is: those in turns rest between them, and clock higher after it.
    """
    alone = [line["tokens_per_second"] for line in said.get("one_gpu") or []]
    ways = [line for row in ("fsdp_few", "fsdp_copies") for line in said.get(row) or []]
    rates = [line["tokens_per_second"] for line in ways]
    return max(rates) / devices / statistics.fmean(alone) if alone and rates else None


def exposed(said: Said) -> float | None:
    shares = [
        device["exposed_collectives"]
        for line in said.get("exposed") or []
        for device in line["devices"].values()
    ]
    return max(shares, default=None)


def losses(said: Said, row: str) -> float | None:
    """Returns how far a run's losses are from one GPU's, over how far another order of sums moves those.

    By root mean square over the steps: the beginning of training is chaotic, and any one step may differ.
    """
    own, alone = said.get(row), said.get("losses_one")
    if not own or not alone:
        return None
    found, one, noise = (line["losses"][:STEPS] for line in (*own, *alone))
    apart = [
        statistics.fmean((a - b) ** 2 for a, b in zip(other, one, strict=True)) ** 0.5
        for other in (found, noise)
    ]
    return apart[0] / apart[1] if apart[1] else (float("inf") if apart[0] else 0.0)


def bars(said: Said, devices: int) -> list[tuple[str, float, str, float | None]]:
    """Returns (what, bar, "≥" or "≤", found) of each."""
    kernels = KERNELS if devices == 2 else dict.fromkeys(KERNELS, 1.0)
    against = [(case, bar, "plain", "plain") for case, bar in kernels.items()]
    for case in ("qkv_forward", "gate_forward", "gate_up_forward"):
        against.append((case, 1.0, "JAX's kernel", "jax"))
    rows = [
        (f"{case}, over {named}, {how}", bar, "≥", kernel(said, case, other, regime))
        for regime, how in REGIMES.items()
        for case, bar, named, other in against
    ]
    rows += [
        (f"all {len(EVERY)} cases as dispatched, over plain, with noise", 1.0, "≥", never_slower(said)),
        (f"step with tensor={devices}, over the unfused one", TENSOR, "≥", tensor(said)),
        (f"tokens/s per GPU with fsdp={devices}, over one GPU", FSDP, "≥", fsdp(said, devices)),
        (f"exposed communication with fsdp={devices}", EXPOSED, "≤", exposed(said)),
    ]
    for row, name in (("losses_tensor", "fused"), ("losses_ring", "ring")):
        rows.append((f"losses with tensor={devices}, {name}, over noise", NOISE, "≤", losses(said, row)))
    return rows


def table(said: Said, devices: int) -> str:
    """Returns the bars in Markdown."""
    meets: dict[str, Callable[[float, float], bool]] = {"≥": float.__ge__, "≤": float.__le__}
    lines = ["| what | bar | found | |", "|---|---|---|---|"]
    for what, bar, sign, found in bars(said, devices):
        mark = "not measured" if found is None else "met" if meets[sign](float(found), bar) else "**missed**"
        lines.append(f"| {what} | {sign} {bar:g} | {'' if found is None else f'{found:.3f}'} | {mark} |")
    return "\n".join(lines)
