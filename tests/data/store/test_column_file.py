"""Columns kept beside a store: made once, by whoever needs them, and never silently wrong."""

import contextlib
import errno
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxthru.data.store import column_file as module
from jaxthru.data.store.column_file import BLOCK, ColumnFile, keep, verify_columns
from jaxthru.runtime.errors import InputError

COUNT = 3 * BLOCK // 8 + 5


class Made:
    """Two columns, of which the second takes less than it might; counts how often they are made."""

    def __init__(self):
        self.times = 0

    def __call__(self, writer):
        self.times += 1
        writer.add("numbers", "<i8", COUNT)
        writer.add("small", "<u2", 1000)
        for begin in range(0, COUNT, 1000):  # in turns, over the borders of blocks
            writer.write("numbers", np.arange(begin, min(begin + 1000, COUNT)))
            writer.write("small", np.array([begin // 1000]))
        return {"told": 7}


def check(found: ColumnFile):
    assert found.facts == {"told": 7}
    assert found.read("numbers", 0, COUNT).tolist() == list(range(COUNT))
    assert found.read("small", 1, 3).tolist() == [1, 2]
    assert len(found.views()["small"]) == -(-COUNT // 1000)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "store" / "train.split-8.columns"


def test_it_is_made_once_and_read_where_it_is_asked_for(path):
    make = Made()
    check(keep(str(path), "one", make))
    found = keep(str(path), "one", make)
    assert make.times == 1 and found.path == str(path) and not found._maps
    blocks = found.unverified
    assert found.read("numbers", 10, 12).tolist() == [10, 11] and found.unverified == blocks - 1
    check(found)
    assert found.unverified == 0
    verify_columns(path.parent)


@pytest.mark.parametrize("harm", ["other", "older", "header", "short", "empty", "long"])
def test_what_is_not_whole_or_of_something_else_is_made_anew(path, harm, monkeypatch):
    make = Made()
    keep(str(path), "one", make)
    content = bytearray(path.read_bytes())
    if harm == "header":
        content[40] ^= 1
    if harm == "older":
        monkeypatch.setattr(module, "VERSION", 2)
    cut = {"short": content[:-1], "empty": b"", "long": content + b"\0"}.get(harm, content)
    path.write_bytes(cut)
    if harm in ("header", "short", "empty", "long"):
        with pytest.raises(InputError, match=r"split-8\.columns: is damaged or cut short; delete it"):
            verify_columns(path.parent)
    check(keep(str(path), "two" if harm == "other" else "one", make))
    assert make.times == 2
    verify_columns(path.parent)


@pytest.mark.parametrize("place", ["block", "checksums"])
def test_damage_is_named_when_it_is_first_read(path, place):
    keep(str(path), "one", Made())
    content = bytearray(path.read_bytes())
    content[module.HEADER + BLOCK + 8 if place == "block" else -1] ^= 1
    path.write_bytes(content)
    found = keep(str(path), "one", Made())
    said = r"block 1 of its numbers is damaged" if place == "block" else "is damaged or cut short"
    if place == "block":
        assert found.read("numbers", 0, BLOCK // 8)[5] == 5
    for read in (
        lambda: found.read("numbers", BLOCK // 8, BLOCK // 8 + 2),
        lambda: verify_columns(path.parent),
    ):
        with pytest.raises(InputError, match=rf"train\.split-8\.columns: {said}; delete it: it is made anew"):
            read()


@pytest.mark.parametrize("small", [1 << 20, 0])
def test_where_nothing_can_be_written_it_is_made_for_this_process_alone(path, monkeypatch, small):
    """In memory if it is small, else in a file that has no name."""

    @contextlib.contextmanager
    def refused(target, sync):
        error = OSError(errno.EROFS, "Read-only file system")
        raise InputError(f"{target}: cannot be written") from error
        yield

    monkeypatch.setattr(module, "written_atomically", refused)
    monkeypatch.setattr(module, "SMALL", small)
    found = keep(str(path), "one", Made())
    assert found.path is None and not path.exists()
    check(found)


def test_what_is_no_file_is_left_where_it_is(path):
    (path / "within").mkdir(parents=True)
    found = keep(str(path), "one", Made())
    assert found.path is None and [*path.iterdir()] == [path / "within"]
    check(found)


def test_one_that_another_replaces_at_once_is_made_for_this_process_alone(path, monkeypatch):
    """As two versions do that make a file of the same name."""
    write = module.written_atomically

    @contextlib.contextmanager
    def replaced(target, sync):
        with write(target, sync) as stream:
            yield stream
        target.unlink()

    monkeypatch.setattr(module, "written_atomically", replaced)
    found = keep(str(path), "one", Made())
    assert found.path is None
    check(found)


def test_a_limit_of_files_is_not_taken_for_damage(path, monkeypatch):
    found = keep(str(path), "one", Made())

    def refused(*arguments, **options):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("mmap.mmap", refused)
    with pytest.raises(InputError, match=r"cannot be opened .* raise the limit of open files, `ulimit -n`$"):
        found.views()
    monkeypatch.undo()
    path.unlink()
    with pytest.raises(InputError, match=r"no such file; the next start makes it$"):
        found.views()


def test_what_is_wrong_with_the_store_is_not_taken_for_a_full_disk(path):
    def make(writer):
        raise InputError("train-00000.offsets: block 0 is damaged")

    with pytest.raises(InputError, match="offsets: block 0 is damaged"):
        keep(str(path), "one", make)
    assert not list(path.parent.iterdir())


def test_several_at_once_write_the_same_bytes(path):
    program = f"""if True:
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_column_file import Made, check, keep
        sys.stdin.read()
        check(keep({str(path)!r}, "one", Made()))
    """
    children = [subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) for _ in range(3)]
    for child in children:
        child.stdin.close()
    assert [child.wait() for child in children] == [0, 0, 0]
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    check(keep(str(path), "one", None))
