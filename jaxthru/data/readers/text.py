"""Plain text: one document a file."""

from collections.abc import Iterator

from jaxthru.data.files import File
from jaxthru.data.readers.record import Damage, Document, Place, over_long
from jaxthru.data.readers.streams import READ_ERRORS, cannot_be_read, opened


def read(files: list[File], *, max_record_bytes: int) -> Iterator[Document | Damage]:
    """Yields the text of each file as it stands, but for a byte order mark at its beginning."""
    for file in files:
        content, whole = bytearray(), Place(str(file.path), "whole file")
        try:
            with opened(file.path) as stream:
                while len(content) <= max_record_bytes and (part := stream.read(1 << 20)):
                    content += part
            if len(content) > max_record_bytes:
                yield whole.damage(over_long(max_record_bytes))
            else:
                yield Document.of(content.decode("utf-8-sig"), whole)
        except UnicodeDecodeError as error:
            yield Place(str(file.path), f"byte {error.start}").damage("not UTF-8")
        except READ_ERRORS as error:
            yield Place(str(file.path), f"after byte {len(content)}").damage(cannot_be_read(error))
