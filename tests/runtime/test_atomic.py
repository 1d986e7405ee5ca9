import os
import subprocess
import sys

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
    running = tmp_path / f"c.txt.0.{os.getpid()}@{host}.partial"
    elsewhere = tmp_path / "d.txt.0.1@another-host.partial"
    for path in (running, elsewhere):
        path.write_text("not yet whole")
    assert len(list(tmp_path.rglob("*.partial"))) == 4
    remove_partials(tmp_path)
    assert set(tmp_path.rglob("*.partial")) == {running, elsewhere}
    monkeypatch.setattr(atomic, "STALE_SECONDS", -1)
    remove_partials(tmp_path)
    assert set(tmp_path.rglob("*.partial")) == {running}
    assert (tmp_path / "b" / "whole.txt").read_text() == "whole"


def test_a_read_only_file_system_is_one_line(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError(30, "Read-only file system")  # Linux says so of an unlink even where no file is

    monkeypatch.setattr(atomic.Path, "open", refused)
    monkeypatch.setattr(atomic.Path, "unlink", refused)
    with pytest.raises(InputError, match=r"a.txt: cannot be written \(Read-only file system\)"):
        write_atomically(tmp_path / "a.txt", "text")
