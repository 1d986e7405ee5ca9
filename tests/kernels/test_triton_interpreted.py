"""Attention's Triton kernels agree with the reference where there is no GPU: see triton_interpreted.py."""

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
    assert done.stdout.count("ok ") >= 13


@pytest.mark.parametrize("wrong", ["-1", "1", "unmasked"])
def test_a_window_off_by_one_and_a_mask_left_out_are_seen(wrong):
    done = run(wrong)
    assert done.returncode == 1 and "relative error above" in done.stderr, done.stdout + done.stderr
