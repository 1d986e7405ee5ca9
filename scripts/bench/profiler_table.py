"""What profiler.py prints of its record."""

from typing import Any

from comparison import shown

MARKS = {True: "met", False: "**missed**", None: "not measured"}


def table(record: dict[str, Any]) -> str:
    """Returns all that has a bar, in Markdown."""
    lines = ["| row | what | found | bar | |", "|" + "---|" * 5]

    def add(row: str, what: str, of: dict) -> None:
        lines.append(
            f"| {row} | {what} | {shown(of['found'], '.4g')} | {of['bar']:.4g} | {MARKS[of['met']]} |"
        )

    for name, row in record["rows"].items():
        for word in ("error", "skipped"):
            if word in row:
                lines.append(f"| {name} | {word}: {row[word][:160].replace('|', ' ')} | | | |")
        for what, of in row.get("closure", {}).get("bars", {}).items():
            add(name, what.replace("_", " "), of)
        if "factors" in row.get("split", {}):
            clock = row["split"]["clock"]
            power = f"{shown(clock['mhz'], '.0f')} MHz, {shown(clock['watts'], '.0f')} W"
            said = ", ".join([power, *clock["cap_reasons"]])
            add(name, f"product of factors, less 1 ({said})", row["split"]["factors"])
        compared = row.get("compared", {})
        if "size" in compared:
            top = compared["top"]["name"] if compared["top"] else "nothing"
            add(name, f"{top} named for {compared['expected']}; its size, less 1", compared["size"])
        for lever, of in row.get("levers", {}).items():
            rate = (
                f"{of['tflops']:,.0f} TFLOP/s, {shown(of.get('mhz'), '.0f')} MHz"
                if "tflops" in of
                else "failed"
            )
            lines.append(f"| {name} | {lever}: {of['what']} | {rate} | | |")
            if "product" in of:
                add(name, f"{lever}: product of factors, less 1", of["product"])
        if "off" in row:
            add(name, "step with hooks, less 1", row["off"] | {"found": row["off"]["change"]})
    causes = record.get("causes", {})
    return "\n".join([*lines, "", f"Planted causes: {causes.get('met')} of {causes.get('of')}."])
