"""Every reader on damaged and strange files: what is lost is exactly what is damaged, and is counted."""

import gzip
import json
import random
import tarfile
import time
from pathlib import Path

import pytest
from formats import KINDS, archive, array_record, compress, decompressed, write
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import items

from jaxthru.data.sources.documents import read
from jaxthru.data.sources.files import File, HashCache, collect
from jaxthru.data.sources.readers import array_record as record_reader
from jaxthru.data.sources.readers import parquet as parquet_reader
from jaxthru.data.sources.readers import text as text_reader
from jaxthru.data.sources.recipes import Recipe

STRANGE = [
    "a\u2028b\u2029c\x85d",
    "windows\r\nlines\r\n",
    "\ufeff\ufeffmarks",
    "nul\0",
    "𝕌𝕟𝕚",
    "é" * 3,
    "\r",
    " ",
]
"""Texts that are easily changed on the way. The first mark of order in a file belongs to the file."""


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text() | st.sampled_from(STRANGE), max_size=12))
def test_text_survives_as_it_is(tmp_path_factory, kind, texts):
    folder = tmp_path_factory.mktemp("fuzz") / "corpus"
    folder.mkdir()
    keys = write(folder, kind, [*texts, "last"])
    found, damaged = items(folder, **keys)
    assert not damaged
    expected = list(dict.fromkeys(text for text in [*texts, "last"] if text))  # no empty, no second of equals
    assert sorted(found) == sorted(expected) if kind == "text" else found == expected


@settings(max_examples=100, deadline=None)
@given(
    content=st.binary(max_size=1500), head=st.integers(0, 1500), kind=st.sampled_from(["tar", "array_record"])
)
def test_no_content_makes_a_reader_of_archives_fail(tmp_path_factory, content, head, kind):
    folder = tmp_path_factory.mktemp("fuzz") / "corpus"
    folder.mkdir()
    whole = archive([("a.txt", b"one"), ("b.txt", b"two")])
    (folder / "a.tar").write_bytes(whole[:head] + content)
    texts, damaged = items(folder, format=kind)
    assert set(texts) <= {"one", "two"} or content
    assert damaged or set(texts) == {"one", "two"}


LINES = [json.dumps({"text": f"document {number} " * 40}) for number in range(3000)]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_cut_archive_keeps_every_line_before_the_cut(folder, suffix, share):
    whole = compress(suffix, "\n".join(LINES).encode())
    cut = whole[: int(len(whole) * share)]
    (folder / f"a.jsonl{suffix}").write_bytes(cut)
    texts, [damage] = items(folder, format="jsonl")
    held = decompressed(suffix, cut).count(b"\n")
    assert held > 200 and texts == [json.loads(line)["text"] for line in LINES[:held]]
    assert damage.position == f"after line {len(texts)}" and "cannot be read from here on" in damage.reason


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_archive_cut_at_the_end_of_a_line_is_not_taken_for_whole(folder, suffix):
    if suffix == ".zst":
        compressor = pytest.importorskip("zstandard").ZstdCompressor().compressobj()
        content = compressor.compress(b'{"text": "one"}\n') + compressor.flush(1)  # a block, not the frame
    else:
        content = gzip.compress(b'{"text": "one"}\n')[:-8]
    (folder / f"a.jsonl{suffix}").write_bytes(content)
    texts, [damage] = items(folder, format="jsonl")
    assert texts == ["one"] and damage.position == "after line 1"
    (folder / f"a.jsonl{suffix}").write_bytes(b"")
    assert items(folder, format="jsonl") == ([], [])


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_text(folder, suffix):
    (folder / f"a.txt{suffix}").write_bytes(compress(suffix, b"one\r\n"))
    (folder / f"cut.txt{suffix}").write_bytes(compress(suffix, b"two\r\n" * 99)[:-3])
    texts, [damage] = items(folder)
    assert texts == ["one\r\n"] and Path(damage.file).name == f"cut.txt{suffix}"
    assert damage.position.startswith("after byte")


@pytest.mark.parametrize("kind", KINDS)
def test_an_over_long_record_costs_itself(folder, kind):
    keys = write(folder, kind, ["before", "x" * 5000, "after", "y" * 900])
    texts, [damage] = items(folder, **keys, max_record_bytes=1000)
    assert sorted(texts) == ["after", "before", "y" * 900]
    assert damage.reason == "longer than max_record_bytes = 1000"


def test_a_parquet_of_few_bytes_takes_no_memory(folder):
    """Rows that share one long text of a dictionary, and a row of its own: neither is ever decoded."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    long = pyarrow.array(["x" * 30_000_000, "short"])
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([1] + [0] * 300, pyarrow.int32()), long)
    parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet", compression="zstd")
    parquet.write_table(pyarrow.table({"text": ["y" * 30_000_000]}), folder / "b.parquet", compression="zstd")
    del texts, long
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10_000
    pool = pyarrow.default_memory_pool()
    before, began = pool.bytes_allocated(), time.process_time()
    found, damaged = items(folder, format="parquet", max_record_bytes=1_000_000)
    assert found == ["short"] and len(damaged) == 301
    assert {damage.reason for damage in damaged} == {"longer than max_record_bytes = 1000000"}
    assert pool.max_memory() - before < 400_000_000 and time.process_time() - began < 5


def test_a_row_group_of_parquet_is_not_held_whole(folder):
    """Texts that all differ: the library would collect them in a dictionary, and copy it for each batch."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"{number} " * 500_000 for number in range(60)]
    parquet.write_table(
        pyarrow.table({"text": texts}), folder / "a.parquet", use_dictionary=False, write_batch_size=1
    )
    size, pool = sum(map(len, texts)), pyarrow.default_memory_pool()
    before, taken = pool.bytes_allocated(), []
    recipe = Recipe.of(format="parquet", paths=(f"{folder}/*",))
    documents = read(collect("test", recipe, HashCache(folder), frozenset()), recipe)
    for document, text in zip(documents, texts, strict=True):
        assert document.text == text
        taken.append(pool.bytes_allocated() - before)
    assert max(taken) < size / 2


def test_a_row_group_of_parquet_that_is_too_long_throughout_is_not_decoded(folder, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = pyarrow.table({"text": [f"{number}" * 10_000_000 for number in range(9)]})
    parquet.write_table(texts, folder / "a.parquet", compression="zstd", use_dictionary=False)
    monkeypatch.setattr(parquet_reader, "_values", None)
    found, damaged = items(folder, format="parquet", max_record_bytes=1_000_000)
    assert not found
    assert [damage.position for damage in damaged] == [f"row {number}" for number in range(9)]


@pytest.mark.parametrize("length", [0, 1, 30, 5000, 3_000_000])
def test_the_size_of_a_dictionary_of_parquet_is_in_its_header(folder, length):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, table = folder / "a.parquet", pyarrow.table({"text": ["x" * length, "y" * length, "x" * length]})
    for use_dictionary in (True, False):
        parquet.write_table(table, path, use_dictionary=use_dictionary)
        column = parquet.read_metadata(path).row_group(0).column(0)
        distinct = len({"x" * length, "y" * length})
        expected = distinct * (length + 4) if use_dictionary else 0  # each after its length, an int32
        assert parquet_reader._dictionary_bytes(File(path, 0, ""), column) == expected


@pytest.mark.parametrize("size", [1, 3, 40])
def test_groups_of_an_array_record_are_found_by_their_headers(folder, size):
    module = pytest.importorskip("array_record.python.array_record_module")
    draw = random.Random(size)
    records = [draw.randbytes(draw.choice([0, 5, 900, 70_000, 200_000])) for _ in range(97)]
    writer = module.ArrayRecordWriter(str(folder / "a.array_record"), f"group_size:{size}")
    for record in records:
        writer.write(record)
    writer.close()
    [file] = collect("test", Recipe.of(paths=(f"{folder}/*",)), HashCache(folder / "none.json"), frozenset())
    groups = list(record_reader._groups(file, len(records)))
    assert [number for numbers, _ in groups for number in numbers] == list(range(97))
    assert [total for _, total in groups] == [
        sum(map(len, records[start : start + size])) for start in range(0, 97, size)
    ]


def test_an_over_long_record_of_an_array_record_is_not_read(folder, monkeypatch):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
    for text in (b"before", b"x" * 300_000_000, b"after"):
        writer.write(text)
    writer.close()
    read = []
    monkeypatch.setattr(record_reader, "_read", lambda reader, numbers: read.append(numbers) or iter(()))
    _, damaged = items(folder, format="array_record", text_key="")
    assert [damage.position for damage in damaged] == ["record 1"]
    assert read == [range(0, 1), range(2, 3)]


def test_over_long_docstrings(folder):
    (folder / "a.py").write_text('"""One."""\n')
    (folder / "b.py").write_text('"""Two."""\n' + "x = 1\n" * 999)
    texts, [damage] = items(folder, format="docstrings", max_record_bytes=1000)
    assert texts == ["One."] and damage.reason == "longer than max_record_bytes = 1000"


def test_what_is_too_long_is_not_read_whole(folder, monkeypatch):
    (folder / "a.txt").write_bytes(b"x" * 10_000_000)
    asked = []
    opened = text_reader.opened

    def counted(path):
        stream = opened(path)
        return type(
            "Stream",
            (),
            {
                "__enter__": lambda self: self,
                "__exit__": lambda *_: stream.close(),
                "read": lambda self, size: asked.append(size) or stream.read(size),
            },
        )()

    monkeypatch.setattr(text_reader, "opened", counted)
    assert len(items(folder, max_record_bytes=1000)[1]) == 1
    assert sum(asked) == 1 << 20


def member(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.linkname = kind, target
    return header


def test_unsafe_members_are_refused_one_record_each(folder):
    unsafe = [
        member("link.txt", tarfile.SYMTYPE, "/etc/passwd"),
        member("hard.txt", tarfile.LNKTYPE, "good.txt"),
        member("pipe.txt", tarfile.FIFOTYPE),
        member("disk.txt", tarfile.BLKTYPE),
        ("/etc/absolute.txt", b"absolute"),
        ("../up.txt", b"up"),
        ("a/../../up.txt", b"up"),
    ]
    parts = [("good.txt", b"good"), member("folder", tarfile.DIRTYPE)]
    parts += [
        part for number, bad in enumerate(unsafe) for part in (bad, (f"d/{number}.txt", b"%d" % number))
    ]
    both = [("s.txt", b"refused with its sample"), member("s.json", tarfile.SYMTYPE, "x")]
    (folder / "a.tar").write_bytes(archive([*parts, *both]))
    texts, damaged = items(folder, format="tar")
    assert texts == ["good", *map(str, range(len(unsafe)))]
    assert len(damaged) == len(unsafe) + 1
    assert all("unsafe member" in damage.reason for damage in damaged)
    assert damaged[0].position == "sample 'link' at byte 1536"


def test_samples_of_a_tar(folder):
    members = [
        ("a/1.cls", b"7"),
        ("a/1.txt", b"one"),
        ("a/1.json", b"{}"),
        ("a/2.json", b'{"text": "two"}'),
        ("a/3.cls", b"7"),  # no text
        ("a/4.txt", b"\xff"),
        ("a/5.json", b"{"),
        ("a/6.json", b'{"text": 5}'),
        ("a/7.txt", b""),
        ("a/8.meta.json", b'{"text": "elsewhere"}'),
        ("a/8.txt", b"eight"),
    ]
    (folder / "a.tar").write_bytes(archive(members))
    texts, damaged = items(folder, format="tar")
    assert texts == ["one", "two", "eight"]
    assert [(damage.position.split(" at ")[0], damage.reason) for damage in damaged] == [
        ("sample 'a/3'", "no member .txt or .json"),
        ("sample 'a/4'", "not UTF-8 from byte 0"),
        ("sample 'a/5'", "not valid JSON"),
        ("sample 'a/6'", "no text under 'text'"),
    ]
    assert items(folder, format="tar", extension=".meta.json")[0] == ["elsewhere"]


@pytest.mark.parametrize("size", [1, 512, 1023, 1024, 1700, 2048, 10_240, 30_000, 51_200])
def test_a_cut_tar_keeps_what_stands_before_the_cut(folder, size):
    whole = archive([(f"{number}.txt", b"%03d" % number * 100) for number in range(50)])  # 1024 bytes each
    (folder / "a.tar").write_bytes(whole[:size])
    texts, [damage] = items(folder, format="tar")
    held = size // 1024 + (size % 1024 >= 512 + 300)
    assert texts == [f"{number:03}" * 100 for number in range(held)]
    assert damage.position.startswith("after byte ")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("lost", [1, 9, 20_000])
def test_a_cut_compressed_tar(folder, suffix, lost):
    draw = random.Random(0)
    texts = [draw.randbytes(500).hex() for _ in range(300)]  # of 1,000 bytes, a member each of 1,536
    cut = compress(suffix, archive([(f"{n}.txt", text.encode()) for n, text in enumerate(texts)]))[:-lost]
    (folder / f"a.tar{suffix}").write_bytes(cut)
    found, [damage] = items(folder, format="tar")
    held = (len(decompressed(suffix, cut)) - 512 - 1000) // 1536 + 1  # up to the last whole text
    assert held > 250 and found == texts[:held] and "ended before the end" in damage.reason


@pytest.mark.parametrize("filled_up", [True, False])
def test_archives_that_were_joined_are_not_taken_for_one(folder, filled_up):
    """With or without the zeros that fill up the last 10 KiB, which not every program writes."""
    parts = [archive([(f"{number}.txt", b"%d" % number)]) for number in range(3)]
    parts = parts if filled_up else [part[: 4 * 512] for part in parts]
    (folder / "a.tar").write_bytes(b"".join(parts))
    texts, [damage] = items(folder, format="tar")
    assert texts == ["0"] and "after its end mark" in damage.reason


def test_a_damaged_header_in_a_tar_is_not_its_end(folder):
    whole = bytearray(archive([(f"{number}.txt", b"%d" % number * 100) for number in range(9)]))
    whole[4 * 1024 + 3] ^= 255
    (folder / "a.tar").write_bytes(whole)
    texts, [damage] = items(folder, format="tar")
    assert texts == [f"{number}" * 100 for number in range(4)]
    assert damage.reason.startswith("cannot be read from here on (bad checksum")


def test_parquet_loses_the_rows_of_a_damaged_group(folder):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"{number:04}" * 50 for number in range(1000)]
    table = pyarrow.table({"text": texts})
    parquet.write_table(
        table,
        folder / "a.parquet",
        row_group_size=100,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    content = bytearray((folder / "a.parquet").read_bytes())
    content[content.index(b"0345" * 50)] ^= 1
    (folder / "a.parquet").write_bytes(content)
    found, damaged = items(folder, format="parquet")
    assert found == texts[:300] + texts[400:]
    assert [damage.position for damage in damaged] == [f"row {number}" for number in range(300, 400)]
    (folder / "a.parquet").write_bytes(content[: len(content) // 2])
    found, [damage] = items(folder, format="parquet")
    assert not found and damage.position == "whole file"


def test_parquet_of_other_types(folder):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, values in {
        "numbers": [1, 2],
        "lists": [["a"], []],
        "bytes": [b"a", b"\xff"],
        "null": [None] * 2,
        "times": pyarrow.array([2**63 - 1], pyarrow.timestamp("us")),  # after the year 9999
        "spans": pyarrow.array([2**63 - 1], pyarrow.duration("s")),
    }.items():
        parquet.write_table(pyarrow.table({"text": values}), folder / f"{name}.parquet")
    parquet.write_table(
        pyarrow.table({"text": pyarrow.array(["x", "y", "x"]).dictionary_encode()}),
        folder / "dictionary.parquet",
    )
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), folder / "none.parquet")
    texts, damaged = items(folder, format="parquet")
    assert sorted(texts) == ["x", "y"] and len(damaged) == 10
    assert {damage.reason for damage in damaged} == {"no text in column 'text'"}


@pytest.mark.parametrize("group", [1, 8])
def test_array_record_loses_the_damaged_group(folder, group):
    draw = random.Random(0)  # what compresses well is soon all index
    records = [f"record {number} {draw.randbytes(200).hex()}".encode() for number in range(2000)]
    path = folder / "a.array_record"
    array_record(path, records, group)
    content = bytearray(path.read_bytes())
    for offset in range(8):
        content[len(content) // 2 + 77 + offset] ^= 255
    path.write_bytes(content)
    texts, damaged = items(folder, format="array_record", text_key="")
    lost = [int(damage.position.removeprefix("record ")) for damage in damaged]
    assert len(lost) == group and lost == list(range(lost[0], lost[0] + group)) and lost[0] % group == 0
    assert texts == [record.decode() for number, record in enumerate(records) if number not in lost]
    for other in (bytes(content[: len(content) // 2]), b"", b"x" * 100_000):
        path.write_bytes(other)
        texts, [damage] = items(folder, format="array_record", text_key="")
        assert not texts and damage.position == "whole file" and "cannot be read (" in damage.reason


def test_array_record_of_what_is_no_text(folder):
    array_record(folder / "a.array_record", [b"one", b"\xff", b'{"text": 5}', b'{"text": "two"}', b"", b"{"])
    texts, damaged = items(folder, format="array_record", text_key="text")
    assert texts == ["two"] and len(damaged) == 5
    texts, [damage] = items(folder, format="array_record", text_key="")
    assert len(texts) == 4 and damage.position == "record 1" and damage.reason == "not UTF-8 from byte 0"
