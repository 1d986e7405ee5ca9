"""ArrayRecord, the record files of Grain: one document a record.

Its groups are chunks of the Riegeli format, in blocks of 64 KiB with a header of 24 bytes each. A chunk
begins with 40 bytes that say how many records it has and how many bytes they are once decompressed.
Source: doc/riegeli_records_file_format.md of google/riegeli.
"""

import dataclasses
import struct
from collections.abc import Iterator
from typing import BinaryIO

from jaxthru.data.sources import keyed
from jaxthru.data.sources.files import File
from jaxthru.data.sources.keyed import from_json
from jaxthru.data.sources.record import HARMLESS, Damage, Document, Place, from_bytes, over_long
from jaxthru.data.sources.streams import optional

RECORDS = 32
"""Records read at once."""
BLOCK, BLOCK_HEADER = 1 << 16, 24
CHUNK_HEADER = struct.Struct("<5Q")
"""Hash, bytes of data, their hash, kind and records, bytes decompressed."""
OF_RECORDS = b"rt"
"""The kinds of chunks that hold records."""


@dataclasses.dataclass(frozen=True)
class Options(keyed.Options):
    """text_key: the key of each record, a JSON object, that holds the text; "" if the record is the text."""


def read(files: list[File], options: Options) -> Iterator[Document | Damage]:
    """Yields the text of each record: all of it, or what its JSON holds if there is a `text_key`.

    The format has a checksum for each group of records: what fails is what is lost. A file that is cut off
    has lost its index, and so everything.
    """
    most = options.max_record_bytes
    for file in files:
        # It comes with Grain where it is made at all, so no extra has it.
        module = optional("array_record.python.array_record_module", file.path, "array-record")
        # It reads ahead in threads otherwise, and one damaged record then ends the whole file.
        reader = module.ArrayRecordReader(str(file.path), "readahead_buffer_size:0,max_parallelism:0")
        if not reader.ok():
            yield Place(str(file.path), "whole file").damage(_why_not(reader))
            continue
        for numbers, size in _groups(file, reader.num_records()):
            for number, content in _records(reader, numbers, size, most):
                place = Place(str(file.path), f"record {number}")
                if isinstance(content, str):
                    yield place.damage(content)
                elif content is None or len(content) > most:
                    yield place.damage(over_long(most))
                elif options.text_key or options.records != "text":
                    yield from_json(content, place, options)
                else:
                    yield from_bytes(content, place)
        reader.close()


def _groups(file: File, count: int) -> Iterator[tuple[range, int]]:
    """Yields the records of each group, and their bytes once decompressed, by the headers alone; 0 for the
    rest, where a header cannot be right."""
    first, at = 0, 0
    with file.path.open("rb") as stream:
        while first < count and at < file.size:
            header, after = _header(stream, at)
            if len(header) < CHUNK_HEADER.size:
                break
            _, data, _, kind, decoded = CHUNK_HEADER.unpack(header)
            records = kind >> 8
            if kind & 0xFF in OF_RECORDS and records:
                if first + records > count:
                    break
                yield range(first, first + records), decoded
                first += records
            at = max(_behind(after, data), at + records)
    if first < count:
        yield range(first, count), 0


def _header(stream: BinaryIO, at: int) -> tuple[bytes, int]:
    """Returns the header of the chunk at a place in the file, and the place behind it."""
    header = b""
    while len(header) < CHUNK_HEADER.size:
        at += BLOCK_HEADER * (at % BLOCK == 0)
        stream.seek(at)
        part = stream.read(min(CHUNK_HEADER.size - len(header), BLOCK - at % BLOCK))
        if not part:
            break
        header, at = header + part, at + len(part)
    return header, at


def _behind(at: int, size: int) -> int:
    """Returns the place behind so many bytes of a chunk, and behind the headers of the blocks between."""
    inside = at % BLOCK or BLOCK  # of this block, with its header
    if size <= BLOCK - inside:
        return at + size
    blocks, rest = divmod(size - (BLOCK - inside), BLOCK - BLOCK_HEADER)
    return at + (BLOCK - inside) + blocks * BLOCK + (BLOCK_HEADER + rest if rest else 0)


def _records(reader, numbers: range, size: int, most: int) -> Iterator[tuple[int, bytes | str | None]]:
    """Yields the number and content of each record of a group of so many bytes; in place of a damaged one, as
    a str, what is wrong; None, unread, where the group could only hold such as are longer than `most`."""
    if size > len(numbers) * most and (len(numbers) == 1 or size > HARMLESS):
        yield from ((number, None) for number in numbers)
        return
    for start in range(numbers.start, numbers.stop, RECORDS):
        yield from _read(reader, range(start, min(start + RECORDS, numbers.stop)))


def _read(reader, numbers: range) -> Iterator[tuple[int, bytes | str]]:
    try:
        yield from zip(numbers, reader.read(numbers.start, numbers.stop), strict=True)
        return
    except RuntimeError:
        pass
    for number in numbers:  # one by one, to lose no more than what is damaged
        try:
            yield number, reader.read([number])[0]
        except RuntimeError as error:
            yield number, f"cannot be read ({error})"


def _why_not(reader) -> str:
    """Returns what is wrong with a file that cannot be read: the library says it when asked for a record, if
    at all."""
    try:
        reader.read()
    except RuntimeError as error:
        if str(error):
            return f"cannot be read ({error})"
    return "cannot be read: cut off, or no ArrayRecord"
