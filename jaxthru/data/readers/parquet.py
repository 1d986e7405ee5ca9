"""Parquet: one document a row."""

from collections.abc import Iterator

from jaxthru.data.files import File
from jaxthru.data.mix import Recipe
from jaxthru.data.readers.record import Damage, Document, Place, from_value, over_long
from jaxthru.data.readers.streams import optional

ROWS = 256
"""Rows decoded at once."""


def read(files: list[File], recipe: Recipe) -> Iterator[Document | Damage]:
    """Yields the text of each row. What a damaged page holds is lost with the rest of its row group."""
    for file in files:
        pyarrow, parquet = optional("pyarrow", file.path), optional("pyarrow.parquet", file.path)
        whole = Place(str(file.path), "whole file")
        try:
            with parquet.ParquetFile(file.path, page_checksum_verification=True) as table:
                if recipe.text_key not in table.schema_arrow.names:
                    yield whole.damage(f"no column {recipe.text_key!r}")
                    continue
                row = 0
                for group in range(table.num_row_groups):
                    rows = range(row, row + table.metadata.row_group(group).num_rows)
                    yield from _group(table, group, rows, str(file.path), recipe, pyarrow)
                    row = rows.stop
        except (pyarrow.ArrowException, OSError) as error:
            yield whole.damage(_reason(error))


def _group(table, group: int, rows: range, path: str, recipe: Recipe, pyarrow) -> Iterator[Document | Damage]:
    row, key = rows.start, recipe.text_key
    try:
        for batch in table.iter_batches(batch_size=ROWS, row_groups=[group], columns=[key]):
            for value in batch.column(0):
                yield _cell(value, Place(path, f"row {row}"), recipe)
                row += 1
    except (pyarrow.ArrowException, OSError) as error:
        for lost in range(row, rows.stop):
            yield Damage(path, f"row {lost}", _reason(error))


def _cell(value, place: Place, recipe: Recipe) -> Document | Damage:
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return place.damage("not UTF-8")
    except (ValueError, OverflowError):  # a time that Python's own cannot hold
        text = None
    item = from_value(text, place, f"no text in column {recipe.text_key!r}")
    if isinstance(item, Document) and len(item.text.encode()) > recipe.max_record_bytes:
        return place.damage(over_long(recipe))
    return item


def _reason(error: Exception) -> str:
    return f"cannot be read ({str(error).partition(chr(10))[0]})"
