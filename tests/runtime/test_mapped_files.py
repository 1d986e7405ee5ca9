"""A mapped file that is cut while it is read ends the process in one line, whoever reads it."""

import subprocess
import sys

import pytest

CUT = """
import os, sys, threading, zlib
from pathlib import Path
import numpy as np
from jaxthru.data.store.flat_file import map_array
from jaxthru.huggingface.safetensors import Reader

path, how = Path(sys.argv[1]), sys.argv[2]
kept = map_array(str(path.with_name("whole")), "<u2", 1 << 20)
if how == "weights":
    values = Reader(path)._bytes
else:
    values = map_array(str(path), "<u2", 1 << 20)
assert not values[-100:].any()
os.truncate(path, 1 << 20 if how == "half" else 0)
print("cut", flush=True)
read = {
    "copied": lambda: values.copy(),
    "half": lambda: values[:10].copy() + values[-10:].copy(),
    "checked": lambda: zlib.crc32(values),
    "in a thread": lambda: np.concatenate([values, values]),
    "weights": lambda: values.sum(),
}[how]
if how == "in a thread":
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
else:
    read()
print("read")
"""


@pytest.mark.parametrize("how", ["copied", "half", "checked", "in a thread", "weights"])
def test_a_file_that_is_cut_is_named(tmp_path, how):
    path, content = tmp_path / "train-00000.tokens", bytes(2 << 20)
    if how == "weights":
        header = b'{"w": {"dtype": "U8", "shape": [2097152], "data_offsets": [0, 2097152]}}'
        content = len(header).to_bytes(8, "little") + header + content
    path.write_bytes(content)
    (tmp_path / "whole").write_bytes(bytes(2 << 20))
    command = [sys.executable, "-c", CUT, str(path), how]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    left = 1 << 20 if how == "half" else 0
    assert (ran.returncode, ran.stdout) == (2, "cut\n"), ran
    said = f"jaxthru: {path}: was cut from {len(content)} to {left} bytes while it was read; "
    assert ran.stderr.startswith(said) and ran.stderr.count("\n") == 1


ELSEWHERE = """
import ctypes, mmap, os, sys, tempfile
from jaxthru.data.store.flat_file import map_array
if sys.argv[1] == "mapped":
    kept = map_array(sys.argv[2], "<u2", 1 << 20)
with tempfile.TemporaryFile() as file:  # of a library's own
    file.write(bytes(8192))
    file.flush()
    other = mmap.mmap(file.fileno(), 8192)
    os.ftruncate(file.fileno(), 0)
    other[:]
"""


@pytest.mark.parametrize(("mapped", "code"), [("mapped", 1), ("nothing", -7)])
def test_a_crash_for_another_reason_goes_on_or_is_told_apart(tmp_path, mapped, code):
    (tmp_path / "whole").write_bytes(bytes(2 << 20))
    command = [sys.executable, "-c", ELSEWHERE, mapped, str(tmp_path / "whole")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == code
    said = f"jaxthru: a disk gives the pages of a mapped file no more (SIGBUS): of {tmp_path}/whole, say\n"
    assert ran.stderr == (said if mapped == "mapped" else "")
