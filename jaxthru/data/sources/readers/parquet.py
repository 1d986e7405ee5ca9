"""Parquet: one document a row."""

import contextlib
import re
from collections.abc import Iterator

from jaxthru.data.sources.chat.records import KEYS, from_record
from jaxthru.data.sources.files import File
from jaxthru.data.sources.keyed import KeyedOptions as Options
from jaxthru.data.sources.record import HARMLESS, KEYS_SHOWN, Damage, Document, Place, from_value, over_long
from jaxthru.data.sources.streams import optional

ROWS = 16
"""Rows decoded at once: each may be as long as a page."""
INDICES = 1 << 16
"""Rows decoded at once where they are places in a dictionary."""
HEADERS = 1 << 16
"""Bytes of a column of one row that are not its value, at most: pages' headers, with least and greatest."""
DICTIONARY = re.compile(rb"\x15\x04\x15([\x80-\xff]*[\x00-\x7f])", re.DOTALL)
"""How the header of a dictionary page begins: its kind, and its bytes once decompressed, as a varint. Source:
parquet.thrift of apache/parquet-format, in Thrift's compact protocol."""


def read(files: list[File], options: Options) -> Iterator[Document | Damage]:
    """Yields the text of each row. What a damaged page holds is lost with the rest of its row group."""
    text_key = options.text_key
    for file in files:
        pyarrow, parquet = optional("pyarrow", file.path), optional("pyarrow.parquet", file.path)
        whole = Place(str(file.path), "whole file")
        try:
            with parquet.ParquetFile(file.path, page_checksum_verification=True) as table:
                names = table.schema_arrow.names
                wanted = (text_key,) if options.records == "text" else KEYS[options.records]
                columns = [name for name in wanted if name in names]
                if not columns:
                    said = " or ".join(map(repr, wanted))
                    yield whole.damage(f"no column {said}; it has {', '.join(map(repr, names[:KEYS_SHOWN]))}")
                    continue
                row = 0
                for group in range(table.num_row_groups):
                    rows = range(row, row + table.metadata.row_group(group).num_rows)
                    if options.records == "text":
                        yield from _group(table, group, rows, file, text_key, options.max_record_bytes)
                    else:
                        yield from _records(table, group, rows, file, columns, options)
                    row = rows.stop
        except (pyarrow.ArrowException, OSError) as error:
            yield whole.damage(_reason(error))
        except UnicodeDecodeError:  # of the values each says so for its row
            yield whole.damage("the name of a column is not UTF-8")


def _records(
    table, group: int, rows: range, file: File, columns: list[str], options: Options
) -> Iterator[Document | Damage]:
    """Yields the conversation, or pair, of each row of a row group."""
    row, path, most = rows.start, str(file.path), options.max_record_bytes
    metadata = table.metadata.row_group(group)
    parts = (metadata.column(number) for number in range(metadata.num_columns))
    size = sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] in columns)
    if size > len(rows) * (most + HEADERS * len(columns)) and (len(rows) == 1 or size > HARMLESS):
        yield from (Damage(path, f"row {number}", over_long(most)) for number in rows)
        return
    pyarrow = optional("pyarrow", file.path)
    try:
        for batch in table.iter_batches(batch_size=ROWS, row_groups=[group], columns=columns):
            for at in range(len(batch)):
                place = Place(path, f"row {row}")
                if batch.slice(at, 1).nbytes > most:
                    yield place.damage(over_long(most))
                else:
                    yield _record(batch, at, place, options)
                row += 1
    except (pyarrow.ArrowException, OSError) as error:
        for lost in range(row, rows.stop):
            yield Damage(path, f"row {lost}", _reason(error))


def _record(batch, at: int, place: Place, options: Options) -> Document | Damage:
    try:
        values = {name: column[at].as_py() for name, column in zip(batch.schema.names, batch, strict=True)}
    except UnicodeDecodeError:
        return place.damage("not UTF-8")
    except (ValueError, OverflowError):  # a time that Python's own cannot hold
        return place.damage("holds a value that is no text")
    return from_record(values, place, options.records)


def _group(
    table, group: int, rows: range, file: File, text_key: str, most: int
) -> Iterator[Document | Damage]:
    row, path = rows.start, str(file.path)
    metadata = table.metadata.row_group(group)
    columns = (metadata.column(number) for number in range(metadata.num_columns))
    column = next((one for one in columns if one.path_in_schema == text_key), None)  # None: nested
    size = column.total_uncompressed_size if column else 0
    if size > len(rows) * (most + HEADERS) and (len(rows) == 1 or size > HARMLESS):
        yield from (Damage(path, f"row {number}", over_long(most)) for number in rows)
        return
    pyarrow = optional("pyarrow", file.path)
    try:
        for value in _values(table, group, column, file, text_key, most):
            yield _cell(value, Place(path, f"row {row}"), text_key, most)
            row += 1
    except (pyarrow.ArrowException, OSError) as error:
        for lost in range(row, rows.stop):
            yield Damage(path, f"row {lost}", _reason(error))


def _values(table, group: int, column, file: File, text_key: str, most: int) -> Iterator:
    """Yields the values of a row group, None for a text that is too long.

    A dictionary holds a value once, and decoded each row that has it takes memory for its own: where one may
    be too long, rows stay places in the dictionary. Elsewhere they do not, for the library makes one of all
    other values too, and so holds the whole row group.
    """
    pyarrow, parquet = optional("pyarrow", file.path), optional("pyarrow.parquet", file.path)
    count, batches = ROWS, contextlib.nullcontext(table)
    if column and column.physical_type == "BYTE_ARRAY" and _dictionary_bytes(file, column) > most:
        keys = {"page_checksum_verification": True, "read_dictionary": [text_key]}
        count, batches = INDICES, parquet.ParquetFile(file.path, **keys)
    with batches as opened:
        for batch in opened.iter_batches(batch_size=count, row_groups=[group], columns=[text_key]):
            values = batch.column(0)
            encoded = pyarrow.types.is_dictionary(values.type)
            texts = values.dictionary if encoded else values
            if not (pyarrow.types.is_string(texts.type) or pyarrow.types.is_large_string(texts.type)):
                yield from values
                continue
            lengths = optional("pyarrow.compute", file.path).binary_length(texts).to_pylist()
            for place in values.indices.to_pylist() if encoded else range(len(values)):
                if place is None or lengths[place] is None:
                    yield pyarrow.scalar(None)
                else:
                    yield texts[place] if lengths[place] <= most else None


def _dictionary_bytes(file: File, column) -> int:
    """Returns the bytes of a column's dictionary page, decompressed; 0 if it begins with none."""
    with file.path.open("rb") as stream:
        stream.seek(column.dictionary_page_offset or column.data_page_offset)
        header = DICTIONARY.match(stream.read(16))
    number = header[1] if header else b""
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(number)) >> 1


def _cell(value, place: Place, text_key: str, most: int) -> Document | Damage:
    if value is None:
        return place.damage(over_long(most))
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return place.damage("not UTF-8")
    except (ValueError, OverflowError):  # a time that Python's own cannot hold
        text = None
    return from_value(text, place, f"no text in column {text_key!r}")


def _reason(error: Exception) -> str:
    return f"cannot be read ({str(error).partition(chr(10))[0]})"
