import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxthru.runtime import atomic
from jaxthru.runtime.atomic import remove_partials, write_atomically
from jaxthru.runtime.errors import InputError

KILLED = """
import os, pathlib, sys
from jaxthru.runtime.atomic import write_atomically
os.fsync = lambda _: os._exit(9)
write_atomically(pathlib.Path(sys.argv[1]) / "a.txt", "half")
"""


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "b"):
        assert subprocess.run([sys.executable, "-c", KILLED, str(folder)]).returncode == 9
    write_atomically(tmp_path / "b" / "whole.txt", "whole")
    host = atomic.socket.gethostname()
    running = tmp_path / f"c.txt.{'0' * 32}.{os.getpid()}@{host}.partial"
    elsewhere = tmp_path / f"d.txt.{'0' * 32}.1@another-host.partial"
    others = {tmp_path / "film.mkv.partial", tmp_path / "b" / "e.txt.0.1@another-host.partial"}
    for path in (running, elsewhere, *others):
        path.write_text("not yet whole")
    assert len(list(tmp_path.rglob("*.partial"))) == 6

    def refused(path, missing_ok):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        remove_partials(tmp_path)
    remove_partials(tmp_path)
    assert set(tmp_path.rglob("*.partial")) == {running, elsewhere} | others
    monkeypatch.setattr(atomic, "STALE_SECONDS", -1)
    remove_partials(tmp_path)
    assert set(tmp_path.rglob("*.partial")) == {running} | others
    assert (tmp_path / "b" / "whole.txt").read_text() == "whole"


def test_a_written_file_outlasts_a_loss_of_power_with_its_name(tmp_path, monkeypatch):
    synced = []
    name_of = lambda file: str(Path(f"/proc/self/fd/{file}").readlink())  # noqa: E731
    monkeypatch.setattr(atomic.os, "fsync", lambda file: synced.append(name_of(file)))
    write_atomically(tmp_path / "a.txt", "text")
    assert len(synced) == 2 and synced[1] == str(tmp_path) and atomic.PARTIAL.search(synced[0])


def test_a_read_only_file_system_is_one_line(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError(30, "Read-only file system")  # Linux says so of an unlink even where no file is

    monkeypatch.setattr(atomic.Path, "open", refused)
    monkeypatch.setattr(atomic.Path, "unlink", refused)
    with pytest.raises(InputError, match=r"a.txt: cannot be written \(Read-only file system\)"):
        write_atomically(tmp_path / "a.txt", "text")
