"""WebDataset archives (.tar, also .tar.gz, .tgz and .tar.zst): one document a sample.

A sample is a run of members whose names are equal up to the first dot of their last part: `a/1.txt` and
`a/1.meta.json` are one sample, with the extensions `txt` and `meta.json`. Nothing is ever unpacked to disk;
a member that could not be unpacked safely is refused all the same, for its archive is not what it seems.
"""

import dataclasses
import tarfile
from collections.abc import Iterator
from types import SimpleNamespace

from jaxthru.data.sources import keyed
from jaxthru.data.sources.files import File
from jaxthru.data.sources.keyed import from_json
from jaxthru.data.sources.record import Damage, Document, Place, from_bytes, over_long
from jaxthru.data.sources.streams import READ_ERRORS, cannot_be_read, opened

HEADER_BYTES = 1 << 20
"""Extended headers hold long names: a larger one is damage, or meant to fill memory."""


@dataclasses.dataclass(frozen=True)
class Options(keyed.Options):
    """extension: of the member of a sample that holds the text (JSON if it ends in `json`); "" is `txt`, or
    else `json`; of records that are no text, `json`. text_key: the key of such a JSON object that holds the
    text."""

    extension: str = ""


def read(files: list[File], options: Options) -> Iterator[Document | Damage]:
    """Yields the text of each sample: of its member with this `extension`; if "", `txt` or `json`."""
    usual = ("txt", "json") if options.records == "text" else ("json",)
    wanted = (options.extension.removeprefix("."),) if options.extension else usual
    for file in files:
        path, end, sample = str(file.path), 0, None
        try:
            with opened(file.path) as stream:
                # read1: read would lose what stands before the damage.
                parts = SimpleNamespace(read=stream.read1)
                with tarfile.open(fileobj=parts, mode="r|", tarinfo=_Header) as archive:
                    while (member := archive.next()) is not None:
                        archive.members = []  # which would remember the whole archive
                        end = member.offset
                        if member.isdir():
                            continue
                        key, kind = _split(member.name)
                        if sample is None or key != sample.key or kind in sample.extensions:
                            if sample is not None:
                                yield sample.item()
                            place = Place(path, f"sample {key!r} at byte {end}")
                            sample = _Sample(key, place, wanted, options)
                        sample.add(archive, member, kind)
                    _check_end(archive)
            if sample is not None:
                yield sample.item()
        except (tarfile.TarError, ValueError, RecursionError, *READ_ERRORS) as error:
            if sample is not None and sample.is_decided():
                yield sample.item()
            yield Place(path, f"after byte {end}").damage(cannot_be_read(error))


def _check_end(archive: tarfile.TarFile) -> None:
    """Reads on to the end of the file, where compressed ones have their checksum."""
    while rest := archive.fileobj.read(1 << 20):  # by way of what the archive has read ahead
        if rest.strip(b"\0"):
            raise tarfile.ReadError("has content after its end mark, as archives have that were joined")


class _Sample:
    """The members of one key so far."""

    def __init__(self, key: str, place: Place, wanted: tuple[str, ...], options: Options):
        self.key, self.place, self.wanted, self.options = key, place, wanted, options
        self.extensions: set[str] = set()
        self.contents: dict[str, bytes] = {}
        self.refused = ""

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo, extension: str) -> None:
        """Takes note of a member, and reads it if it may hold the text."""
        self.extensions.add(extension)
        if not member.isreg():
            self.refused = f"unsafe member {member.name!r}: not a plain file"
        elif member.name.startswith("/") or ".." in member.name.split("/"):
            self.refused = f"unsafe member {member.name!r}: its path leads out of the archive"
        elif extension in self.wanted:
            if member.size > self.options.max_record_bytes:
                self.refused = over_long(self.options.max_record_bytes)
            else:
                self.contents[extension] = archive.extractfile(member).read()

    def is_decided(self) -> bool:
        """Says whether the sample is a document, or damage of its own, even if the archive ends here."""
        return bool(self.contents or self.refused)

    def item(self) -> Document | Damage:
        """Returns the sample's document."""
        if self.refused:
            return self.place.damage(self.refused)
        for extension in self.wanted:
            if extension in self.contents:
                content = self.contents[extension]
                if extension.endswith("json") or self.options.records != "text":
                    return from_json(content, self.place, self.options)
                return from_bytes(content, self.place)
        return self.place.damage(f"no member .{' or .'.join(self.wanted)}")


class _Header(tarfile.TarInfo):
    """tarfile takes a damaged header for the end of the archive: this one does not."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> tarfile.TarInfo:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # the mark that ends an archive
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError("ends without its end mark" if not buf else str(error)) from error
        if header.size < 0 or (not header.isreg() and header.size > HEADER_BYTES):
            raise tarfile.ReadError(f"header of {header.size} bytes")
        return header


def _split(name: str) -> tuple[str, str]:
    """Returns the key and the extension of a member's name."""
    folder, slash, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return folder + slash + stem, extension
