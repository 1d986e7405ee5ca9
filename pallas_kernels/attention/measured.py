"""Which attention was measured to be the fastest, by the width of heads and lengths of rows and documents.

`TABLE` is written by scripts/bench/measure/attention_table.py. What lies far from all that was measured
is in no table, and `automatic` decides as it does without one.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

TABLE_FILE = Path(__file__).with_name("attention_table.json")
TABLE: dict[str, list[dict]] = json.loads(TABLE_FILE.read_text())
"""{compute capability, "9.0": the fields of each Point}"""

TOKENS = 32_768
"""That each point was measured with, in rows as long as its own."""

NEAR = 2.0
"""How many times as long or as short rows, and documents, may be as those of the point that stands for them.
Points are measured four times apart."""


@dataclasses.dataclass(frozen=True)
class Point:
    """What was measured at one place, forward and backward. documents: the mean tokens of one. milliseconds:
    of each implementation, the median of its rounds, with so many `heads` of queries. fastest: its name, None
    where none is by more than equal rounds differ."""

    head_dim: int
    sequence: int
    documents: float
    milliseconds: Mapping[str, float]
    fastest: str | None
    heads: int

    def seconds(self, name: str, heads: int, tokens: int) -> float:
        """Returns how long an implementation takes with so many heads of queries and tokens."""
        return self.milliseconds[name] / 1e3 * heads / self.heads * tokens / TOKENS

    def distance(self, sequence: int, documents: float) -> float:
        """Returns how many times as long or short the rows or documents are, whichever is the further off,
        as a logarithm."""
        pairs = (self.sequence, sequence), (self.documents, documents)
        return max(abs(math.log(ours / theirs)) for ours, theirs in pairs)

    def said(self, sequence: int, documents: float) -> str:
        """Returns why `fastest` is taken for such rows, as a part of a line."""
        order = sorted(self.milliseconds.items(), key=lambda item: item[1])
        times = ", ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in order)
        return (
            f"by the table: head_dim {self.head_dim}, rows of {sequence:,}, documents of about "
            f"{documents:,.0f} tokens (measured at {self.sequence:,} and {self.documents:,.0f}: {times})"
        )


def nearest(
    head_dim: int,
    sequence: int,
    documents: float,
    capability: tuple[int, int],
    table: Mapping[str, Sequence[Mapping]] | None = None,
) -> Point | None:
    """Returns the measured point that stands for rows of these documents, None where none is near.

    head_dim: which must be that of the point, for tiles and what a kernel can take depend on it. documents:
    the mean tokens of one. capability: the GPU's. table: by default `TABLE`.
    """
    rows = (TABLE if table is None else table).get(".".join(map(str, capability)), ())
    points = [point for row in rows if (point := Point(**row)).head_dim == head_dim]
    found = min(points, key=lambda point: point.distance(sequence, documents), default=None)
    near = found is not None and found.distance(sequence, documents) <= math.log(NEAR)
    return found if near else None
