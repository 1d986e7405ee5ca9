"""Triton kernels agree with the reference where there is no GPU: see triton_interpreted.py and its like."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ATTENTION, LOSSES = "triton_interpreted.py", "triton_interpreted_losses.py"
EXPERTS, CASTS = "triton_interpreted_experts.py", "triton_interpreted_casts.py"

pytestmark = [pytest.mark.compiles_for("triton"), pytest.mark.slow(minutes=0.15)]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(("script", "cases"), [(ATTENTION, 37), (LOSSES, 25), (EXPERTS, 25), (CASTS, 8)])
def test_kernels_agree_with_the_reference(script, cases):
    done = run(script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") >= cases


@pytest.mark.parametrize("wrong", ["-1", "1", "unmasked", "residual", "end", "lost"])
def test_a_wrong_kernel_is_seen(wrong):
    """A window off by one, a mask that is left out, a residual stream whose gradient is lost; a group's last
    row, and what its sum has beyond whole blocks."""
    done = run(EXPERTS if wrong in ("end", "lost") else ATTENTION, wrong)
    assert done.returncode == 1 and "relative error above" in done.stderr, done.stdout + done.stderr
