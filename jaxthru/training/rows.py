"""Rows of metrics as lines of JSON: written at once, and read whatever a kill left behind them."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxthru.runtime.bucket import AnyPath
from jaxthru.runtime.errors import TrainingError, require

Row = dict[str, Any]


def append(path: Path, row: Row, fields: tuple[str, ...]) -> None:
    """Adds a row as a line: the fields, then what else it has. Raises TrainingError if it cannot be written,
    ValueError if it lacks one of the fields."""
    if missing := sorted(set(fields) - row.keys()):
        raise ValueError(f"{path.name}: missing fields {missing}")
    try:
        with path.open("a") as file:  # closed, so flushed, at once: a kill loses at most this line
            file.write(_line({field: row[field] for field in fields} | row))
    except OSError as error:
        raise TrainingError(f"{path}: cannot be written ({error.strerror})") from error


def _line(row: Row) -> str:
    return json.dumps(_plain(row), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Returns a value as JSON can hold it. NaN and infinity become null: JSON has neither."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # an array, or a scalar of NumPy's
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path, until: float = math.inf) -> list[tuple[bytes, Row]]:
    """Returns (line, row) of the rows up to step `until`. Behind them may stand anything: what a kill, a
    power cut or a full disk leaves. Raises InputError for a line among them that is no row."""
    kept, damaged = [], None
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is None:
            damaged = damaged or number
        elif row["step"] > until:
            break
        else:
            require(
                damaged is None,
                f"{path}: line {damaged} is damaged, and rows that are needed follow; remove that line "
                f"(`sed -i {damaged}d FILE`): nothing else depends on it",
            )
            kept.append((line, row))
    return kept


def every(path: Path) -> Iterator[Row]:
    """Yields the rows that a file holds, whatever stands between them; none if it cannot be read."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError:
        return
    for line in lines:
        if (row := _row(line)) is not None:
            yield row


def _row(line: bytes) -> Row | None:
    """Returns the row that a line holds, if it holds one."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def last(path: AnyPath) -> Row | None:
    """Returns the last whole row, looked for in the last lines alone: the file may be long."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
        lines = file.read().split(b"\n")
    return next((row for line in reversed(lines) if (row := _row(line))), None)
