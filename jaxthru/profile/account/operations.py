"""The table of operations: a row for all that ran in the profiled steps, and for each idle interval.

The ledger's seconds by line, layer, kernel and collective are sums over this table. `ops.parquet` has it for
questions that the report does not answer (docs/profile.md).
"""

import logging
import operator
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxthru.profile.account.ledger import LINES
from jaxthru.profile.account.timeline import Ran, Window

log = logging.getLogger("jaxthru")


class Operations:
    """Of one pass. works: the instruction that each row ran, None where it is not known or the device was
    idle. began: whether it began within a step of the pass. columns: {name: array of [rows]}:

    device, step. start, end: ns on the trace's clock. module, instruction: of the HLO that launched it. name:
    the kernel's. line: of the ledger. layer, phase: see `ledger.Scope`. flops, bytes: of this one run, NaN
    where they are not known. exposed: ns of the device's time that it owns; over all rows they add up to the
    steps. owner: the line that owns the most of the time for which it ran: another one hides it.
    """

    def __init__(self, windows: Sequence[Window]):
        owned: dict[int, int] = Counter()
        for window in windows:
            for piece in window.intervals:
                if piece.owner is not None:
                    owned[id(window.ran[piece.owner])] += piece.end - piece.start
        rows, seen, start = [], set(), operator.attrgetter("event.start")
        for window in windows:
            first, last = (bisect_left(window.ran, at, key=start) for at in (window.start, window.end))
            owners = {piece.owner for piece in window.intervals if piece.owner is not None}
            # Of a step that is not in the pass, and still at work in this one.
            before = [at for at in sorted(owners) if at < first and id(window.ran[at]) not in seen]
            for at in (*before, *range(first, last)):
                one = window.ran[at]
                rows.append((at >= first, one.work, window.device, window.step, *_row(one, owned[id(one)])))
                seen.add(id(one))
            for begun, end, line, owner in window.intervals:
                if owner is None:
                    idle = begun, end, "", "", "", line, "", "", np.nan, np.nan, end - begun
                    rows.append((False, None, window.device, window.step, *idle))
        began, self.works, *columns = zip(*rows, strict=True)
        self.began = np.array(began, bool)
        self.columns = {
            name: np.array(values, object if isinstance(values[0], str) else None)
            for name, values in zip(NAMES, columns, strict=True)
        }
        self.columns["owner"] = self._owners(windows)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    @property
    def seconds(self) -> np.ndarray:
        """How long each took, also where it ran beside others."""
        return (self["end"] - self["start"]) / 1e9

    def grouped(self, keys: Iterable[Hashable], where: np.ndarray) -> dict[Hashable, np.ndarray]:
        """Returns the rows of each key, of those rows that are asked for, in their order. keys: of all."""
        found = defaultdict(list)
        for row, (key, wanted) in enumerate(zip(keys, where, strict=True)):
            if wanted:
                found[key].append(row)
        return {key: np.array(rows) for key, rows in found.items()}

    def by(self, *names: str) -> Iterable[tuple]:
        """Returns the values of these columns, row by row."""
        return zip(*(self[name].tolist() for name in names), strict=True)

    def _owners(self, windows: Sequence[Window]) -> np.ndarray:
        owner = self["line"].copy()
        for device in {window.device for window in windows}:
            pieces = [piece for window in windows if window.device == device for piece in window.intervals]
            edges = np.array([(piece.start, piece.end) for piece in pieces])
            first, lines = edges.min(), np.array([piece.line for piece in pieces])
            rows = np.flatnonzero(self["device"] == device)
            start, end = (self[name][rows] - first for name in ("start", "end"))
            shares = []
            for line in LINES:
                own = np.where(lines == line, edges[:, 1] - edges[:, 0], 0)
                until = np.cumsum(own)  # the line's time until the end of each piece
                curve = (edges - first).ravel(), np.column_stack([until - own, until]).ravel()
                shares.append(np.interp(end, *curve) - np.interp(start, *curve))
            most = np.array(LINES, object)[np.argmax(shares, axis=0)]
            owner[rows] = np.where(np.max(shares, axis=0) > 0, most, owner[rows])
        return owner


NAMES = (
    *("device", "step", "start", "end", "module", "instruction", "name", "line", "layer", "phase"),
    *("flops", "bytes", "exposed"),
)


def _row(one: Ran, owned: int) -> tuple:
    event, work = one.event, one.work
    layer, phase = (work.layer, work.phase) if work else ("other", "other")
    flops = (work and work.flops) or np.nan
    size = float(work.bytes) if work else event.bytes or np.nan
    return (
        *(event.start, event.end, event.module, event.hlo, event.name, one.line, layer, phase),
        *(flops, size, owned),
    )


def write(path: Path, passes: Mapping[str, Operations]) -> None:
    """Writes the tables of all passes as one, whose first column names the pass; says so where it cannot."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        log.info('%s: not written: needs pyarrow, pip install "jaxthru[formats]"', path)
        return
    tables = [
        pyarrow.table(
            {"pass": [name] * len(found.works)}
            | {column: pyarrow.array(of, from_pandas=True) for column, of in found.columns.items()}
        )
        for name, found in passes.items()
    ]
    pyarrow.parquet.write_table(pyarrow.concat_tables(tables), path)
