"""A run's rows as columns: NumPy arrays by name, and a table where they are looked at."""

import math
import shutil
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import numpy as np

from jaxthru.runtime.errors import InputError, did_you_mean

Row = dict[str, Any]
SHOWN = 5
"""So many of the first and of the last rows are shown."""


class Table:
    """Columns of the same length. `table["loss"]` is a NumPy array [rows], and `len(table)` counts the rows.

    columns: the names. A column is int64 if all of its values are whole numbers, float64 with NaN for what is
    unknown if they are numbers, otherwise it holds objects. A group of values by name is a column for each:
    `loss_by_source.prose`.
    """

    def __init__(self, rows: Sequence[Row], fields: Sequence[str] = ()):
        """fields: columns that there are in any case."""
        flat = [_flat(row) for row in rows]
        groups = {name for row in rows for name, value in row.items() if isinstance(value, dict)}
        names = dict.fromkeys((*fields, *(name for row in flat for name in row)))
        names = [name for name in names if name not in groups]
        self._columns = {name: _column([row.get(name) for row in flat]) for name in names}
        self._rows = len(rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in the order of the file."""
        return tuple(self._columns)

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a column. Raises KeyError, with the nearest name."""
        if name not in self._columns:
            raise KeyError(f"no column {name!r}{did_you_mean(name, self.columns)}")
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return self._rows

    def to_pandas(self) -> Any:
        """Returns the table as a pandas.DataFrame. Raises InputError without the package pandas."""
        try:
            import pandas
        except ImportError as error:
            raise InputError("to_pandas: needs the package pandas (pip install pandas)") from error
        return pandas.DataFrame(self._columns)

    def __repr__(self) -> str:
        width = shutil.get_terminal_size((100, 24)).columns
        columns, used, left_out = [], 0, []
        for name, cells in sorted(self._cells(), key=lambda column: "." in column[0]):  # groups come last
            wide = max(map(len, cells)) + 2
            if left_out or used + wide > width:
                left_out.append(name)
                continue
            used += wide
            columns.append([cell.rjust(wide) for cell in cells])
        lines = ["".join(cells).rstrip() for cells in zip(*columns, strict=True)]
        return "\n".join([*lines, self._size(left_out)])

    def _repr_html_(self) -> str:
        """Returns the same for a notebook, with all columns of which anything is known."""
        head, *body = [*zip(*(cells for _, cells in self._cells()), strict=True)] or [()]
        rows = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
        rows += ["".join(f"<td>{escape(cell)}</td>" for cell in cells) for cells in body]
        table = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table>{table}</table><p>{escape(self._size([]))}</p>"

    def _cells(self) -> Iterator[tuple[str, list[str]]]:
        """Yields the name and the cells of each column that has a value, the name first."""
        rows = range(self._rows)
        short = self._rows > 2 * SHOWN
        first, last = (rows[:SHOWN], rows[-SHOWN:]) if short else (rows, range(0))
        for name, column in self._columns.items():
            if any(_known(value) for value in column):
                above, below = ([_text(column[row]) for row in part] for part in (first, last))
                yield name, [name, *above, *["..."] * short, *below]

    def _size(self, left_out: list[str]) -> str:
        size = f"{self._rows:,} rows, {len(self._columns)} columns"
        unknown = [name for name in self._columns if not any(_known(value) for value in self._columns[name])]
        for what, names in (("not shown", left_out), ("unknown", unknown)):
            size += f"; {what}: {', '.join(names)}" if names else ""
        return size


def _flat(row: Row) -> Row:
    flat = {}
    for name, value in row.items():
        flat |= (
            {f"{name}.{key}": item for key, item in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return flat


def _column(values: list[Any]) -> np.ndarray:
    if all(isinstance(value, bool) for value in values):
        return np.array(values, bool)
    if all(type(value) is int for value in values):
        return np.array(values, np.int64)
    if all(value is None or isinstance(value, int | float) for value in values):
        return np.array([math.nan if value is None else value for value in values], np.float64)
    column = np.empty(len(values), object)  # lists of one length would become a second dim
    column[:] = values
    return column


def _known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _text(value: Any) -> str:
    if not _known(value):
        return "-"
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
