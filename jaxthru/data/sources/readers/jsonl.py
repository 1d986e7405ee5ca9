"""JSON lines: one document a line."""

from collections.abc import Iterator
from typing import BinaryIO

from jaxthru.data.sources.files import File
from jaxthru.data.sources.keyed import KeyedOptions as Options
from jaxthru.data.sources.keyed import from_json
from jaxthru.data.sources.record import Damage, Document, Place, over_long
from jaxthru.data.sources.streams import READ_ERRORS, cannot_be_read, opened


def read(files: list[File], options: Options) -> Iterator[Document | Damage]:
    """Yields the text of each line that is not blank. Only `\\n` ends a line: JSON may hold U+2028."""
    for file in files:
        path, number = str(file.path), 0
        try:
            with opened(file.path) as stream:
                for number, line in enumerate(_lines(stream, options.max_record_bytes), start=1):
                    place = Place(path, f"line {number}")
                    if line is None:
                        yield place.damage(over_long(options.max_record_bytes))
                    elif line.strip():
                        yield from_json(line, place, options)
        except READ_ERRORS as error:
            yield Place(path, f"after line {number}").damage(cannot_be_read(error))


def _lines(stream: BinaryIO, limit: int) -> Iterator[bytes | None]:
    """Yields the lines, and None for each that is longer than `limit` bytes, which memory need not hold."""
    while line := stream.readline(limit + 1):
        if len(line) <= limit or line.endswith(b"\n"):
            yield line
            continue
        while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
            pass
        yield None
