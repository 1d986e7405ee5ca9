"""Files of every format that is read: `from formats import KINDS, write`."""

import gzip
import io
import json
import tarfile
import zlib
from pathlib import Path

import pytest


def compress(suffix: str, content: bytes) -> bytes:
    if suffix == ".zst":
        library = pytest.importorskip("zstandard")
        return library.ZstdCompressor(write_checksum=True).compress(content)
    return gzip.compress(content, mtime=0) if suffix == ".gz" else content


def decompressed(suffix: str, content: bytes) -> bytes:
    """Returns all that the library gives of compressed content, which may be cut off."""
    if suffix == ".zst":
        return pytest.importorskip("zstandard").ZstdDecompressor().decompressobj().decompress(content)
    return zlib.decompressobj(wbits=31).decompress(content)


def archive(members: list[tuple[str, bytes] | tarfile.TarInfo]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as file:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                file.addfile(member)
            else:
                header = tarfile.TarInfo(member[0])
                header.size = len(member[1])
                file.addfile(header, io.BytesIO(member[1]))
    return stream.getvalue()


def array_record(path: Path, records: list[bytes], group: int = 1) -> None:
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), f"group_size:{group}")
    for record in records:
        writer.write(record)
    writer.close()


def write(folder: Path, kind: str, texts: list[str]) -> dict:
    """Writes texts in a format, each byte as it is; returns the recipe's keys that read it."""
    contents = [text.encode() for text in texts]
    if kind == "text":
        for number, content in enumerate(contents):
            (folder / f"{number}.txt").write_bytes(b"\xef\xbb\xbf" + content)
        return {"format": "text"}
    if kind == "jsonl":
        lines = [json.dumps({"text": text}, ensure_ascii=len(text) % 2 == 0).encode() for text in texts]
        (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
        return {"format": "jsonl"}
    if kind == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet", row_group_size=3)
        return {"format": "parquet"}
    if kind == "tar":
        members = [(f"{n}.txt", b"\xef\xbb\xbf" + content) for n, content in enumerate(contents)]
        (folder / "a.tar").write_bytes(
            archive([m for pair in members for m in (pair, (pair[0][:-3] + "cls", b"3"))])
        )
        return {"format": "tar"}
    if kind == "docstrings":
        for number, content in enumerate(contents):
            (folder / f"{number}.py").write_bytes(b'"""' + content + b'"""\n')
        return {"format": "docstrings"}
    records = [b"\xef\xbb\xbf" + content for content in contents]
    if kind == "array_record of json":
        records = [json.dumps({"text": text}).encode() for text in texts]
    array_record(folder / "a.array_record", records, group=3)
    return {"format": "array_record", "text_key": "text" if kind.endswith("json") else ""}


KINDS = ["text", "jsonl", "parquet", "tar", "array_record", "array_record of json"]
