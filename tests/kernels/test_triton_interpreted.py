"""Triton kernels agree with their reference where there is no GPU: see triton_interpreted.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("triton_interpreted.py")

pytestmark = pytest.mark.compiles_for("triton")


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_kernels_agree_with_the_reference():
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok norm ") >= 24 and done.stdout.count("ok ") >= 34


@pytest.mark.parametrize("off", ["-1", "1", "residual"])
def test_a_window_off_by_one_is_seen(off):
    """And a residual stream whose gradient is lost."""
    done = run(off)
    assert done.returncode == 1 and "relative error above" in done.stderr, done.stdout + done.stderr
