"""scripts/faults.py, with a few cases of each; by hand it tries hundreds."""

import json
import subprocess
import sys

import pytest
from runs import ROOT


@pytest.mark.slow(minutes=1)
@pytest.mark.parametrize(
    ("what", "count", "more"),
    [
        ("endings", 2, ("--processes", "2")),
        ("checkpoints", 20, ()),
        ("inputs", 20, ()),
    ],
)
def test_nothing_is_lost(tmp_path, what, count, more):
    command = [sys.executable, str(ROOT / "scripts/faults.py"), what, "--count", str(count), *more]
    command += ["--output", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    print(done.stdout[-5000:])  # the seed
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["wrong"] == [] and f"seed {found['seed']}," in done.stdout
    if what == "endings":
        assert found["seconds"]["most"] < 30 and found["seconds"]["count"] >= count // 2
    else:
        assert found["found" if what == "checkpoints" else "refused"] == count
