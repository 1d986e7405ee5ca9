"""What the data benchmark compares, the bars that it is held to, and its table."""

import statistics

import data_peers

GROUPS = ("packed", "heavy", "slow", "peers")
SOURCES = (5, 35, 306)
PACKERS = ("grain", "grain-first-fit", "grain-concat-split")
HEAVY = tuple(
    f"heavy/grain-{way}{reading}"
    for way in ("iterators", "map-mix")
    for reading in ("", "-short-4", "-short")
)
PEERS = tuple(data_peers.NEEDS)
NAMES = (
    *(f"packed/{number}/{who}" for number in SOURCES for who in ("jaxthru", "jaxthru-best-fit", *PACKERS)),
    *(*HEAVY, "heavy/jaxthru", "heavy/jaxthru-mapped"),
    *(f"slow/{who}" for who in ("jaxthru", "grain", "grain-mp-prefetch", "grain-mp-slow")),
    *("peers/jaxthru", *PEERS),
)
RATE, SAMPLES, PRIVATE = "tokens_per_second", "samples_per_second", "private_mb"
RATIOS = (
    *((f"packed/{n}/jaxthru", f"packed/{n}/{who}", RATE, None) for n in SOURCES for who in PACKERS),
    ("packed/306/jaxthru", "packed/5/jaxthru", RATE, None),
    *((f"packed/{n}/jaxthru-best-fit", f"packed/{n}/grain-first-fit", RATE, None) for n in SOURCES),
    *((who, "heavy/jaxthru", PRIVATE, 13.5 if who == "heavy/grain-iterators" else None) for who in HEAVY),
    ("heavy/grain-iterators", "heavy/jaxthru-mapped", PRIVATE, None),
    ("slow/jaxthru", "slow/grain", SAMPLES, 1.8),
    ("slow/jaxthru", "slow/grain-mp-prefetch", SAMPLES, 1.3),
    ("slow/jaxthru", "slow/grain-mp-slow", SAMPLES, None),
    *(("peers/jaxthru", who, RATE, None) for who in PEERS),
)
"""(a, b, of what, bar): a's value over b's."""
BAR_TOKENS = 100e6
COLUMNS = ("M tokens/s", "per CPU second", "bytes/token", "samples/s", "private MB", "threads", "processes")
UNEQUAL = 0.05
"""Rates of samples, or of tokens, that differ by more are not equal."""


def medians(rounds: list[dict[str, dict]]) -> dict[str, dict]:
    """Returns of each contender the median of each of its numbers, and their spread in what is compared."""
    found = {}
    for name in rounds[0]:
        lines = [turn[name] for turn in rounds if name in turn]
        good = [line for line in lines if "error" not in line]
        if not good:
            found[name] = lines[-1]
            continue
        numbers = [key for key, value in good[0].items() if not isinstance(value, list)]
        found[name] = good[0] | {key: statistics.median(line[key] for line in good) for key in numbers}
        rates = [line[SAMPLES] for line in good]
        found[name] |= {"rounds": len(good), "samples_per_second_all": rates}
    return found


def compare(found: dict[str, dict]) -> list[dict]:
    """Returns the ratios whose two sides were measured."""
    ratios = []
    for one, other, key, bar in RATIOS:
        if key in found.get(one, ()) and key in found.get(other, ()):
            ratio = found[one][key] / found[other][key]
            unequal = max(abs(found[one][rate] / found[other][rate] - 1) for rate in (SAMPLES, RATE))
            line = {"ratio": ratio, "of": key, "a": one, "b": other, "bar": bar}
            if key == PRIVATE:
                line["rates_equal"] = unequal <= UNEQUAL
            if bar is not None:  # memory is compared at equal rates alone
                line["met"] = ratio >= bar and line.get("rates_equal", True)
            ratios.append(line)
    for number in SOURCES:
        name = f"packed/{number}/jaxthru"
        if RATE in found.get(name, ()):
            ratio = found[name][RATE] / BAR_TOKENS
            line = {"ratio": ratio, "of": RATE, "a": name, "b": f"{BAR_TOKENS:.0e}", "bar": 1.0}
            ratios.append(line | {"met": ratio >= 1})
    return ratios


def table(found: dict[str, dict], ratios: list[dict]) -> str:
    """Returns both as Markdown."""
    lines = [f"| contender | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, line in found.items():
        if "error" in line:
            lines.append(f"| {name} | {line['error']} " + "| " * len(COLUMNS) + "|")
            continue
        held = [f"{line[key]:,.0f}" if key in line else "" for key in ("private_mb", "threads", "processes")]
        rates = [line["tokens_per_second"] / 1e6, line["tokens_per_cpu_second"] / 1e6]
        wide = line["bytes_per_token"]
        rates = f"{rates[0]:.2f} | {rates[1]:.2f} | {wide:.0f} | {line['samples_per_second']:,.0f}"
        lines.append(f"| {name} | {rates} | {' | '.join(held)} |")
    lines += ["", "| ratio | of | value | bar | |", "|---|---|---|---|---|"]
    for line in ratios:
        notes = [{True: "met", False: "missed"}.get(line.get("met"), "")]
        notes += ["rates differ"] * (not line.get("rates_equal", True))
        bar = "" if line["bar"] is None else line["bar"]
        lines.append(
            f"| {line['a']} : {line['b']} | {line['of']} | {line['ratio']:.2f} | {bar} | {', '.join(notes)} |"
        )
    return "\n".join(lines)
