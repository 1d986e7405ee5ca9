"""Every reader on files changed at random, empty or huge: it never fails, and says what it has lost."""

from pathlib import Path

import pytest
from formats import KINDS, archive, array_record, compress, write
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import items

TEXTS = [f"document {number} " * 20 + "é\u2028" for number in range(7)]
PLAIN = [*KINDS, "docstrings"]
COMPRESSED = [(kind, suffix) for kind in ("text", "jsonl", "tar") for suffix in (".gz", ".zst")]


def write_one(folder: Path, kind: str, suffix: str, texts: list[str]) -> tuple[dict, Path]:
    """Writes texts, the first of them in the file whose path is returned, with the recipe's keys."""
    keys = write(folder, kind, texts)
    path = min(folder.iterdir())
    if suffix:
        path.with_name(path.name + suffix).write_bytes(compress(suffix, path.read_bytes()))
        path.unlink()
    return keys, path.with_name(path.name + suffix)


def change(content: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    content = bytearray(content)
    for what, where, other in changes:
        at = where % (len(content) + 1)
        if what == "flip" and at < len(content):
            content[at] ^= other[0] or 1
        elif what == "lose":
            del content[at : at + len(other)]
        elif what == "cut":
            del content[at:]
        elif what == "insert":
            content[at:at] = other
    return bytes(content)


@pytest.mark.parametrize(("kind", "suffix"), [*((kind, "") for kind in PLAIN), *COMPRESSED])
@settings(deadline=None, max_examples=40)
@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(["flip", "lose", "cut", "insert"]),
            st.integers(0, 2**16) | st.integers(-600, -1),  # indices stand at the end
            st.binary(min_size=1, max_size=20),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_a_changed_file_is_read_or_named(tmp_path_factory, kind, suffix, changes):
    folder = tmp_path_factory.mktemp("fuzz") / "corpus"
    folder.mkdir()
    keys, path = write_one(folder, kind, suffix, TEXTS)
    path.write_bytes(change(path.read_bytes(), changes))
    texts, damaged = items(folder, **keys)
    assert all(text.encode() for text in texts)
    assert {damage.file for damage in damaged} <= {str(path)}
    assert all(damage.reason and "\n" not in damage.reason for damage in damaged)
    if suffix or kind == "array_record":  # with checksums: nothing is lost or changed in silence
        assert damaged or not path.stat().st_size or sorted(texts) == sorted(TEXTS)
    if kind in ("text", "docstrings"):  # a file each
        assert len(texts) + len(damaged) >= len(TEXTS) - 1 and set(TEXTS[1:]) <= set(texts)


@pytest.mark.parametrize(("kind", "suffix"), [*((kind, "") for kind in PLAIN), *COMPRESSED])
def test_an_empty_file_costs_nothing_but_itself(folder, kind, suffix):
    keys, path = write_one(folder, kind, suffix, ["whole"])
    empty = path.with_name("empty" + "".join(path.suffixes))
    for content in (b"", compress(suffix, b"")):
        empty.write_bytes(content)
        texts, damaged = items(folder, **keys)
        assert texts == ["whole"]
        # A file that has no record is none; one that has lost its index or its end is damaged.
        assert [damage.file for damage in damaged] == [str(empty)] * kind.startswith(
            ("parquet", "tar", "array")
        )


def test_a_parquet_file_with_a_damaged_name_of_a_column_is_damaged(folder):
    path, pyarrow = folder / "a.parquet", pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": ["whole"], "another": ["x"]})
    pytest.importorskip("pyarrow.parquet").write_table(table, path, store_schema=False)
    content = path.read_bytes()
    assert b"another" in content
    path.write_bytes(content.replace(b"another", b"\xf4nother"))
    texts, [damage] = items(folder, format="parquet")
    assert not texts and damage.position == "whole file"
    assert damage.reason == "the name of a column is not UTF-8"


@pytest.mark.parametrize("kind", PLAIN)
def test_a_huge_document_is_one_document(folder, kind):
    huge = "é𝕌 x" * 400_000
    texts, damaged = items(folder, **write(folder, kind, ["before", huge, "after"]))
    assert sorted(texts) == sorted(["before", huge, "after"]) and not damaged


NO_TEXTS = {
    b'{"text": "broken': "not valid JSON",
    b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "not valid JSON",
    b'{"text": "x", "n": ' + b"1" * 5000 + b"}": "not valid JSON",
    '{"text": "x"}'.encode("utf-16"): "not UTF-8",
    b'{"text": "x"}'.replace(b"x", b"\xff"): "not UTF-8",
    b'{"text": "\\udc00"}': "not valid Unicode",
    **{
        content: "no text under 'text'"
        for content in (
            b"5",
            b"null",
            b'"text"',
            b"NaN",
            b'{"text": null}',
            b'{"text": ["x"]}',
            b'{"Text": "x"}',
        )
    },
}


@pytest.mark.parametrize("kind", ["jsonl", "tar", "array_record"])
def test_json_that_holds_no_text_costs_its_record(folder, kind):
    contents = [b'{"text": "first"}', *NO_TEXTS, b'{"text": "last"}']
    if kind == "jsonl":
        (folder / "a.jsonl").write_bytes(b"\n".join(contents))
    elif kind == "tar":
        members = [(f"{number}.json", content) for number, content in enumerate(contents)]
        (folder / "a.tar").write_bytes(archive(members))
    else:
        array_record(folder / "a.array_record", contents, group=4)
    texts, damaged = items(folder, format=kind)
    assert texts == ["first", "last"]
    assert [damage.reason.partition("; its keys")[0] for damage in damaged] == list(NO_TEXTS.values())
