"""Which implementation of packed attention is faster where: the points of the table that `auto` follows."""

import dataclasses
import sys

import blocks
from suites.rows import Bar, Block, Row, lines_of

AGREE = (Bar("wrong", 0, "{:.0f} points whose two differ, or of which one cannot run", most=True),)


@dataclasses.dataclass(frozen=True)
class Points(Row):
    """The points of one width of heads and length of rows, in a process of their own. seconds: about."""

    head_dim: int = 64
    sequence: int = 2048
    seconds: float = 75.0
    products = ()

    def wanted(self, done):
        return [Block("points", 1, self.seconds)]

    def refuses(self, setup):
        return "its kernels are of NVIDIA GPUs" if setup.tiny else ""

    def command(self, name, setup):
        where = ["--head-dim", str(self.head_dim), "--sequence", str(self.sequence)]
        return [sys.executable, str(blocks.HERE / "measure" / "attention_table.py"), *where]

    def found(self, setup, done):
        for line in lines_of(done, "points"):
            spreads = [spread for point in line["results"] for spread in point["spread"].values()]
            return {"wrong": line["wrong"], "spread": max(spreads, default=None), "points": line["results"]}
        return {}

    def details(self, found):
        lines = ["| documents of about | cuDNN, ms | Triton, ms |", "|---|---|---|"]
        for point in found.get("points", []):
            both = [point["milliseconds"].get(name, "") for name in ("cudnn_packed", "triton")]
            lines.append(f"| {point['documents']:,.0f} | {both[0]} | {both[1]} |")
        return "\n".join(lines)


ROWS = {
    f"{head_dim}_{sequence}": Points(
        f"heads of {head_dim}, rows of {sequence:,}",
        "quickstart",
        bars=AGREE,
        head_dim=head_dim,
        sequence=sequence,
    )
    for head_dim in (64, 128)
    for sequence in (2048, 8192, 32_768)
}
NOTES = """\
Forward and backward on 32,768 tokens, three rounds in turns. `python scripts/bench/measure/attention_table.py
--table RECORD ...` writes the table that `kernels.attention=auto` follows from the rows' records.
"""
