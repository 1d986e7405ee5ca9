"""ArrayRecord, the record files of Grain: one document a record."""

from collections.abc import Iterator

from jaxthru.data.files import File
from jaxthru.data.mix import Recipe
from jaxthru.data.readers.record import Damage, Document, Place, from_bytes, from_json, over_long
from jaxthru.data.readers.streams import optional

RECORDS = 32
"""Records read at once."""


def read(files: list[File], recipe: Recipe) -> Iterator[Document | Damage]:
    """Yields the text of each record: all of it, or what its JSON holds if the recipe has a `text_key`.

    The format has a checksum for each group of records: what fails is what is lost. A file that is cut off
    has lost its index, and so everything.
    """
    for file in files:
        module = optional("array_record.python.array_record_module", file.path)
        # It reads ahead in threads otherwise, and one damaged record then ends the whole file.
        reader = module.ArrayRecordReader(str(file.path), "readahead_buffer_size:0,max_parallelism:0")
        if not reader.ok():
            yield Place(str(file.path), "whole file").damage(_why_not(reader))
            continue
        count = reader.num_records()
        for start in range(0, count, RECORDS):
            for number, content in _records(reader, range(start, min(start + RECORDS, count))):
                place = Place(str(file.path), f"record {number}")
                if isinstance(content, str):
                    yield place.damage(content)
                elif len(content) > recipe.max_record_bytes:
                    yield place.damage(over_long(recipe))
                elif recipe.text_key:
                    yield from_json(content, place, recipe)
                else:
                    yield from_bytes(content, place)
        reader.close()


def _records(reader, numbers: range) -> Iterator[tuple[int, bytes | str]]:
    """Yields the number and content of each record; in place of a damaged one, as a str, what is wrong."""
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
    """Returns what is wrong with a file that cannot be read: the library says it when asked for a record."""
    try:
        reader.read()
    except RuntimeError as error:
        return f"cannot be read ({error})"
    return "cannot be read"
