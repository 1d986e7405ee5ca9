"""Cores that a scheduler has withheld are not counted."""

import os
import subprocess
import sys

import pytest

from jaxthru.runtime import cores
from jaxthru.runtime.cores import usable_cores

PROGRAM = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from jaxthru.data.store import parallel_writer
from jaxthru.runtime.cores import usable_cores
print(usable_cores(), parallel_writer.THREADS)
"""


def test_there_are_some():
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="other systems cannot withhold any")
def test_withheld_cores_are_not_counted():
    assert subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True).stdout == b"1 1\n"


@pytest.mark.parametrize(
    ("quota", "counted"), [("max 100000", 64), ("800000 100000", 8), ("50000 100000", 1)]
)
def test_a_containers_share_is_counted(monkeypatch, tmp_path, quota, counted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert usable_cores() == counted
