"""From the blocks of a comparison to its table: medians, spreads, shares, and which ratios may be claimed."""

import itertools
import statistics
from collections.abc import Callable, Iterable
from typing import Any

Block = dict[str, Any]
"""{"contender", "round", "line": what its process printed} or, in place of the line, "error"."""

Row = dict[str, Any]
LEAST_SPREAD = 1e-3
"""Two blocks may happen to be equal, which does not mean that a third would be: of the A-A spreads on record
a quarter are below this. No claim rests on less."""


def device_kind(blocks: list[Block]) -> str:
    """Returns the GPU's name as the blocks tell it, empty if none has run."""
    return next((block["line"]["device"]["kind"] for block in blocks if "line" in block), "")


def ran(blocks: list[Block]) -> dict[str, tuple[list[dict], Row]]:
    """Returns {contender: what its blocks printed, and what a ratio has to know of them}, of those that ran:
    how many blocks, how many failed beside, and on which GPUs."""
    found = {}
    for name in dict.fromkeys(block["contender"] for block in blocks):
        own = [block for block in blocks if block["contender"] == name]
        if good := [block for block in own if "line" in block]:
            gpus = sorted({str(block.get("gpu")) for block in good})
            about = {"blocks": len(good), "failed": len(own) - len(good), "gpus": gpus}
            found[name] = [block["line"] for block in good], about
    return found


def rows(blocks: list[Block], precision: dict[str, str], flops: Callable, peak: float | None) -> dict:
    """Returns {contender: row}, averaged over its blocks.

    precision: bf16 or fp8 of each contender. flops: (tokens, attention span) -> needed in a step. peak: the
    data sheet's dense bf16 FLOP/s.
    """
    found = {}
    for name, (lines, about) in ran(blocks).items():
        rate = "tflops" if "tflops" in lines[0] else "tokens_per_second"
        rated = [line for line in lines if line.get(rate)]  # attention alone has no tokens
        row: Row = {
            "precision": precision.get(name),
            **about,
            "spread": spread([line[rate] for line in rated]),
            "step_milliseconds": 1e3 * _mean(_values(lines, "step_seconds")),  # the median
            "steps_timed": sum(line["steps_timed"] for line in lines),
            "sm_clock_mhz": _mean(_values(lines, "sm_clock_mhz")),
            "power_watts": _mean(_values(lines, "power_watts")),
            "peak_hbm_gib": _mean([peak / 2**30 for peak in _values(lines, "peak_hbm_bytes")]),
        }
        if rated:
            row[rate] = _mean([line[rate] for line in rated])
        if rated and rate == "tokens_per_second":
            row["mean_step_milliseconds"] = _mean([1e3 * _mean_seconds(line) for line in rated])
            row["tflops"] = _mean([_tflops(line, flops) for line in rated])
            row["mfu"] = row["tflops"] * 1e12 / peak if peak else None
        found[name] = row
    for row in found.values():
        ceiling = found.get(f"gemm_{row['precision']}", {}).get("tflops")
        row["share_of_gemm"] = row["tflops"] / ceiling if ceiling and "mfu" in row else None
    return found


def spread(rates: list[float]) -> float | None:
    """Returns the largest difference between two rates of one contender, over their mean: the A-A spread.
    None of one rate alone."""
    return (max(rates) - min(rates)) / _mean(rates) if len(rates) > 1 and _mean(rates) else None


def halves_apart(turns: list[list[float]], average: Callable = statistics.median) -> float:
    """Returns how far the averages of every other turn are apart, over that of all: the A-A spread where
    contenders take many short turns. turns: the seconds of each, two turns at least. average: what is made
    of seconds where a ratio is taken."""
    first, second, both = (average(list(itertools.chain(*of))) for of in (turns[::2], turns[1::2], turns))
    return round(abs(first - second) / both, 5)


def _tflops(line: dict, flops: Callable) -> float:
    tokens = line["tokens_per_step"]
    return flops(tokens, tokens * line["attention_span_per_token"]) / _mean_seconds(line) / 1e12


def _mean_seconds(line: dict) -> float:
    return line["tokens_per_step"] / line["tokens_per_second"]


def _values(lines: list[dict], key: str) -> list[float]:
    return [line[key] for line in lines if line.get(key) is not None]


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def ratio(own: Row, other: Row, of: str = "tokens_per_second") -> dict[str, Any]:
    """Returns the ratio of a number, and whether it may be claimed.

    It may if it differs from 1 by more than twice the larger A-A spread; never while a spread is unknown, nor
    with `doubts`: where blocks failed, or the two did not run on one GPU.
    """
    value = own[of] / other[of]
    spreads = [own["spread"], other["spread"]]
    bar = None if None in spreads else 2 * max(*spreads, LEAST_SPREAD)
    failed = sum(row.get("failed", 0) for row in (own, other))
    gpus = {gpu for row in (own, other) for gpu in row.get("gpus", ())}
    doubts = [
        *([f"{failed} blocks failed"] if failed else []),
        *(["different GPUs"] if len(gpus) > 1 else []),
    ]
    claimed = bar is not None and abs(value - 1) > bar and not doubts
    return {"ratio": value, "needed": bar, "claimed": claimed} | ({"doubts": doubts} if doubts else {})


def best_peer(found: dict[str, Row], peers: list[str], precision: str) -> str | None:
    """Returns the fastest of the peers of this precision."""
    rates = {
        name: row["tokens_per_second"]
        for name, row in found.items()
        if name in peers and row["precision"] == precision and "tokens_per_second" in row
    }
    return max(rates, key=rates.get, default=None)


def packed_saving(found: dict[str, Row], blocks: list[Block], layers: int) -> dict[str, float] | None:
    """Returns what packed rows save in a step, beside what the attention kernels alone predict."""
    names = ("jaxthru", "jaxthru_packed", "attention")
    if any(name not in found for name in names):
        return None
    lines = [block["line"] for block in blocks if block["contender"] == "attention" and "line" in block]
    causal, packed = (
        _mean([line[f"{kind}_milliseconds"] for line in lines]) for kind in ("causal", "packed")
    )
    measured = found[names[0]]["mean_step_milliseconds"] - found[names[1]]["mean_step_milliseconds"]
    predicted = layers * (causal - packed)
    return {
        "attention_causal_milliseconds_per_layer": causal,
        "attention_packed_milliseconds_per_layer": packed,
        "predicted_milliseconds": predicted,
        "measured_milliseconds": measured,
        "measured_over_predicted": measured / predicted,
        "rate_over_causal": ratio(found[names[1]], found[names[0]])["ratio"],
    }


def remarks(blocks: list[Block]) -> list[str]:
    """Returns what there is to say of blocks beside their rates: on which GPUs they ran, what went wrong."""
    told, machines = [], sorted({str(block["gpu"]) for block in blocks if "line" in block})
    if len(machines) > 1:
        told.append(f"These blocks ran on {len(machines)} different GPUs: {', '.join(machines)}.")
    errors = {block["contender"]: block["error"] for block in blocks if "error" in block}
    told += [f"{name} failed: {error}" for name, error in errors.items()]
    skipped = sorted(
        {one["contender"] for one in blocks if _some(one.get("line", {}).get("skipped_updates"))}
    )
    return told + [f"{name} skipped updates: a loss or a gradient was not finite." for name in skipped]


def _some(counts) -> bool:
    """Returns whether a number, or one of those in lists and dicts, is not 0."""
    if isinstance(counts, dict):
        counts = list(counts.values())
    return any(map(_some, counts)) if isinstance(counts, list) else bool(counts)


COLUMNS = {
    "tok/s": ("tokens_per_second", ",.0f"),
    "step ms": ("step_milliseconds", ".1f"),
    "TFLOP/s": ("tflops", ".0f"),
    "MFU": ("mfu", ".1%"),
    "of GEMM": ("share_of_gemm", ".0%"),
    "MHz": ("sm_clock_mhz", ".0f"),
    "W": ("power_watts", ".0f"),
    "GiB": ("peak_hbm_gib", ".1f"),
    "A-A": ("spread", ".2%"),
}
"""{heading: (number, format)}."""


def table(found: dict[str, Row], order: list[str], base: str, peers: list[str]) -> str:
    """Returns the comparison in Markdown. A ratio in bold is claimed; others are within the spread."""
    lines = []
    for name in order:
        row = found.get(name, {})
        if "tflops" not in row:
            continue
        steps = {} if "mfu" in row else {"step_milliseconds": None}  # a sustained product has none
        compared = [
            judged(ratio(row, found[other]))
            if other != name and all("tokens_per_second" in found.get(each, ()) for each in (name, other))
            else ""
            for other in (base, best_peer(found, peers, row["precision"]))
        ]
        lines.append([name, *cells(row | steps, COLUMNS), *compared])
    return markdown(["contender", *COLUMNS, f"/ {base}", "/ best peer"], lines)


def judged(of: dict[str, Any]) -> str:
    """Returns a ratio for people; in bold it is claimed."""
    return f"**{of['ratio']:.3f}**" if of["claimed"] else f"{of['ratio']:.3f}"


def cells(row: Row, columns: dict[str, tuple[str, str]]) -> list[str]:
    """Returns a row's numbers as a table shows them."""
    return [shown(row.get(of), form) for of, form in columns.values()]


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table."""
    head = list(head)
    cells = [f"| {' | '.join(each)} |" for each in (head, *rows)]
    return "\n".join([cells[0], "|" + "---|" * len(head), *cells[1:]])


def shown(value: float | None, form: str) -> str:
    """Returns a table's cell, empty for what is not known."""
    return "" if value is None else format(value, form)
