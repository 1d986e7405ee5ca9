"""Plain text: one document a file."""

from collections.abc import Iterator

from jaxthru.data.sources.files import File
from jaxthru.data.sources.record import Damage, Document, Options, Place, over_long
from jaxthru.data.sources.streams import READ_ERRORS, cannot_be_read, opened


def read(files: list[File], options: Options) -> Iterator[Document | Damage]:
    """Yields the text of each file as it stands, but for a byte order mark at its beginning."""
    most = options.max_record_bytes
    for file in files:
        content, whole = bytearray(), Place(str(file.path), "whole file")
        try:
            with opened(file.path) as stream:
                while len(content) <= most and (part := stream.read(1 << 20)):
                    content += part
            if len(content) > most:
                yield whole.damage(over_long(most))
            else:
                yield Document.of(content.decode("utf-8-sig"), whole)
        except UnicodeDecodeError as error:
            yield Place(str(file.path), f"byte {error.start}").damage("not UTF-8")
        except READ_ERRORS as error:
            yield Place(str(file.path), f"after byte {len(content)}").damage(cannot_be_read(error))
