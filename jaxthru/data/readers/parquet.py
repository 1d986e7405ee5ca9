"""Parquet: one document a row."""

from collections.abc import Iterator

from jaxthru.data.files import File
from jaxthru.data.mix import Recipe
from jaxthru.data.readers.record import KEYS_SHOWN, Damage, Document, Place, from_value, over_long
from jaxthru.data.readers.streams import optional

ROWS = 256
"""Rows decoded at once."""
HEADERS = 1 << 16
"""Bytes of a column of one row that are not its value, at most: pages' headers, with least and greatest."""


def read(files: list[File], recipe: Recipe) -> Iterator[Document | Damage]:
    """Yields the text of each row. What a damaged page holds is lost with the rest of its row group."""
    for file in files:
        pyarrow, parquet = optional("pyarrow", file.path), optional("pyarrow.parquet", file.path)
        optional("pyarrow.compute", file.path)
        whole = Place(str(file.path), "whole file")
        try:
            schema = parquet.read_metadata(file.path).schema
            columns = {column.path: column.physical_type for column in map(schema.column, range(len(schema)))}
            text = [recipe.text_key] if columns.get(recipe.text_key) == "BYTE_ARRAY" else []
            settings = {"page_checksum_verification": True, "read_dictionary": text}
            with parquet.ParquetFile(file.path, **settings) as table:
                if recipe.text_key not in table.schema_arrow.names:
                    names = ", ".join(map(repr, table.schema_arrow.names[:KEYS_SHOWN]))
                    yield whole.damage(f"no column {recipe.text_key!r}; it has {names}")
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
    metadata = table.metadata.row_group(group)
    columns = (metadata.column(number) for number in range(metadata.num_columns))
    size = max((one.total_uncompressed_size for one in columns if one.path_in_schema == key), default=0)
    if len(rows) == 1 and size - HEADERS > recipe.max_record_bytes:
        yield Place(path, f"row {row}").damage(over_long(recipe))
        return
    try:
        for batch in table.iter_batches(batch_size=ROWS, row_groups=[group], columns=[key]):
            for value in _values(batch.column(0), recipe.max_record_bytes, pyarrow):
                yield _cell(value, Place(path, f"row {row}"), recipe)
                row += 1
    except (pyarrow.ArrowException, OSError) as error:
        for lost in range(row, rows.stop):
            yield Damage(path, f"row {lost}", _reason(error))


def _values(column, most: int, pyarrow) -> Iterator:
    """Yields the values of a column, None for one longer than `most` bytes. Text comes with each value once,
    in a dictionary: a row takes no memory for a value that others have, too."""
    if not pyarrow.types.is_dictionary(column.type):
        yield from column
        return
    lengths = pyarrow.compute.binary_length(column.dictionary).to_pylist()
    for index in column.indices.to_pylist():
        if index is None:
            yield pyarrow.scalar(None)
        else:
            yield column.dictionary[index] if lengths[index] <= most else None


def _cell(value, place: Place, recipe: Recipe) -> Document | Damage:
    if value is None:
        return place.damage(over_long(recipe))
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return place.damage("not UTF-8")
    except (ValueError, OverflowError):  # a time that Python's own cannot hold
        text = None
    return from_value(text, place, f"no text in column {recipe.text_key!r}")


def _reason(error: Exception) -> str:
    return f"cannot be read ({str(error).partition(chr(10))[0]})"
