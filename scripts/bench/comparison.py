"""From the blocks of a comparison to its table: medians, spreads, shares, and which ratios may be claimed."""

import itertools
import statistics
from collections.abc import Callable
from typing import Any

Block = dict[str, Any]
"""{"contender", "round", "line": what its process printed} or, in place of the line, "error"."""

Row = dict[str, Any]


def device_kind(blocks: list[Block]) -> str:
    """Returns the GPU's name as the blocks tell it, empty if none has run."""
    return next((block["line"]["device"]["kind"] for block in blocks if "line" in block), "")


def rows(blocks: list[Block], precision: dict[str, str], flops: Callable, peak: float | None) -> dict:
    """Returns {contender: row}, averaged over its blocks.

    precision: bf16 or fp8 of each contender. flops: (tokens, attention span) -> needed in a step. peak: the
    data sheet's dense bf16 FLOP/s.
    """
    lines: dict[str, list[dict]] = {}
    for block in blocks:
        if "line" in block:
            lines.setdefault(block["contender"], []).append(block["line"])
    found = {}
    for name, of_blocks in lines.items():
        gemm, plain = "tflops" in of_blocks[0], "tokens_per_second" in of_blocks[0]
        rates = [line["tflops"] if gemm else line["tokens_per_second"] for line in of_blocks]
        row: Row = {
            "precision": precision.get(name),
            "blocks": len(of_blocks),
            "spread": spread(rates),
            "step_milliseconds": 1e3 * _mean(_values(of_blocks, "step_seconds")),  # the median
            "steps_timed": sum(line["steps_timed"] for line in of_blocks),
            "sm_clock_mhz": _mean(_values(of_blocks, "sm_clock_mhz")),
            "power_watts": _mean(_values(of_blocks, "power_watts")),
            "peak_hbm_gib": _mean([peak / 2**30 for peak in _values(of_blocks, "peak_hbm_bytes")]),
        }
        if gemm:
            row["tflops"] = _mean(rates)
        elif plain and rates[0]:
            row["tokens_per_second"] = _mean(rates)
            row["mean_step_milliseconds"] = _mean([1e3 * _mean_seconds(line) for line in of_blocks])
            row["tflops"] = _mean([_tflops(line, flops) for line in of_blocks])
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


def ratio(own: Row, other: Row) -> dict[str, Any]:
    """Returns the ratio of tokens per second, and whether it may be claimed.

    It may if it differs from 1 by more than twice the larger A-A spread; never while a spread is unknown.
    """
    value = own["tokens_per_second"] / other["tokens_per_second"]
    spreads = [own["spread"], other["spread"]]
    bar = None if None in spreads else 2 * max(spreads)
    return {"ratio": value, "needed": bar, "claimed": bar is not None and abs(value - 1) > bar}


def best_peer(found: dict[str, Row], peers: list[str], precision: str) -> str | None:
    """Returns the fastest of the peers of this precision."""
    able = [name for name in peers if name in found and found[name]["precision"] == precision]
    return max(able, key=lambda name: found[name]["tokens_per_second"], default=None)


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
    skipped = sorted({one["contender"] for one in blocks if one.get("line", {}).get("skipped_updates")})
    return told + [f"{name} skipped updates: a loss or a gradient was not finite." for name in skipped]


def table(found: dict[str, Row], order: list[str], base: str, peers: list[str]) -> str:
    """Returns the comparison in Markdown. A ratio in bold is claimed; others are within the spread."""
    head = ("contender", "tok/s", "step ms", "TFLOP/s", "MFU", "of GEMM", "MHz", "W", "GiB", "A-A")
    head += (f"/ {base}", "/ best peer")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in order:
        row = found.get(name, {})
        if "tflops" not in row:
            continue
        cells = [
            name,
            shown(row.get("tokens_per_second"), ",.0f"),
            shown(row["step_milliseconds"] if "mfu" in row else None, ".1f"),
            shown(row.get("tflops"), ".0f"),
            shown(row.get("mfu"), ".1%"),
            shown(row["share_of_gemm"], ".0%"),
            shown(row["sm_clock_mhz"], ".0f"),
            shown(row["power_watts"], ".0f"),
            shown(row["peak_hbm_gib"], ".1f"),
            shown(row["spread"], ".2%"),
        ]
        best = best_peer(found, peers, row["precision"])
        for other in (base, best):
            comparable = other in found and other != name and "tokens_per_second" in row
            compared = ratio(row, found[other]) if comparable else None
            mark = "**" if compared and compared["claimed"] else ""
            cells.append(f"{mark}{compared['ratio']:.3f}{mark}" if compared else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(value: float | None, form: str) -> str:
    """Returns a table's cell, empty for what is not known."""
    return "" if value is None else format(value, form)
