"""What docs/scale.md shows of what scale.py found: pictures and tables."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxthru.training.plot import Panel, Picture


def pictures(found: dict[str, Any], models: Sequence[str]) -> dict[str, Picture]:
    """Returns {file name: picture}: share of linear over devices, of each model, and the hash's slowdown."""
    drawn = {}
    for model in models:
        panels = []
        for batch in dict.fromkeys(row["batch"] for row in found["scaling"]):
            lines = {}
            for row in found["scaling"]:
                if (row["model"], row["batch"]) == (model, batch):
                    x = np.array([point["devices"] for point in row["points"]])
                    for key, said in (("share", ""), ("share_exposed", ", exposed")):
                        lines[row["fabric"] + said] = (x, np.array([point[key] for point in row["points"]]))
            panels.append(Panel(f"{model}, batch {batch}: share of linear, by H200s", lines, "x"))
        drawn[f"scale_{model}.svg"] = Picture(tuple(panels))
    lines = {}
    for model in models:
        for placement in ("packed", "random"):
            rows = [row for row in found["hash"] if (row["model"], row["placement"]) == (model, placement)]
            slow = np.array([row["seconds"] / row["perfect"] for row in rows])
            lines[f"{model}, {placement}"] = (np.array([row["qps"] for row in rows]), slow)
    title = "collectives over the network against a perfect spread, by queue pairs"
    return drawn | {"scale_hash.svg": Picture((Panel(title, lines, "x"),))}


def tables(found: dict[str, Any]) -> dict[str, str]:
    """Returns {name: a table of the page}."""
    head = "| model | batch | fabric | 80 % of linear, overlapped | exposed | fastest here | binds beyond |"
    scale = [head, "|---|---|---|--:|--:|--:|---|"]
    for row in found["scaling"]:
        end, last = row["ends"], max(row["points"], key=lambda point: point["tokens_per_second"])
        fastest = f"{last['devices']:,}: {last['tokens_per_second']:,.0f} tokens/s"
        ends = (f"{end[key]:,}" if end[key] else "none" for key in ("overlapped", "exposed"))
        cells = row["model"], f"{row['batch']} ({row['tokens_per_step']:,})", row["fabric"], *ends
        scale.append(f"| {' | '.join((*cells, fastest, end['binds'] or 'none yet'))} |")
    hashes = [
        "| model | mesh | hosts | hash | seconds a step | against a perfect spread | against 16 pairs |"
    ]
    hashes.append("|---|---|---|---|--:|--:|--:|")
    for row in found["hash"]:
        like = [
            other["seconds"]
            for other in found["hash"]
            if other["qps"] == 16 and all(other[key] == row[key] for key in ("model", "placement"))
        ]
        mesh = " × ".join(str(size) for size in row["mesh"].values())
        way = "5-tuple" if row["hash"] == "five_tuple" else f"E-ECMP, {row['qps']} pairs"
        ratios = (f"{row['seconds'] / of:.2f} ×" for of in (row["perfect"], like[0]))
        cells = row["model"], mesh, row["placement"], way, f"{row['seconds']:.3f}", *ratios
        hashes.append(f"| {' | '.join(cells)} |")
    steps = ["| model | hosts | queue pairs | links, s | exposed, s | step, s | most / mean uplink |"]
    steps.append("|---|---|--:|--:|--:|--:|--:|")
    for row in found["compiled"]:
        numbers = *(f"{row[key]:.3f}" for key in ("links", "exposed", "step")), f"{row['mmr']:.2f}"
        cells = row["model"], row["placement"], str(row["qps"]), *numbers
        steps.append(f"| {' | '.join(cells)} |")
    third = ["| fabric | published | ours | links alone | what binds |", "|---|--:|--:|--:|---|"]
    for row in found["table_iii"]:
        ours = f"{row['step']:.1f} s" if row["step"] else "not fitted"
        third.append(
            f"| {row['fabric']} | {row['published']:.1f} s | {ours} | {row['links']:.2f} s | {row['binds']} |"
        )
    named = {"scaling": scale, "hash": hashes, "compiled": steps, "table_iii": third}
    return {name: "\n".join(rows) for name, rows in named.items()} | {"bill": bill_table(found["bill"])}


def bill_table(found: dict[str, Any]) -> str:
    """Returns the table of costs."""
    table = ["| H200s | bound | share of linear | days | device-hours | J a token | MWh | dollars |"]
    table.append("|--:|---|--:|--:|--:|--:|--:|--:|")
    for row in found["rows"]:
        dollars = "your price" if row["dollars"] is None else f"{row['dollars']:,.0f}"
        table.append(
            f"| {row['devices']:,} | {row['bound']} | {row['share']:.0%} | {row['days']:,.0f} | "
            f"{row['device_hours'] / 1e6:.2f} M | {row['joules_per_token']:.3f} | {row['mwh']:,.0f} | "
            f"{dollars} |"
        )
    return "\n".join(table)
