"""The launchers all start the one command, and GPU ones leave NVLink multicast alone."""

import subprocess
from pathlib import Path

import pytest

LAUNCHERS = sorted((Path(__file__).parent.parent / "scripts/launch").iterdir())
NO_MULTICAST = ("NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST")


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.name)
def test_launcher(path):
    text = path.read_text()
    assert "jaxthru.train" in text
    if "tpu" not in path.name:
        assert all(name in text for name in NO_MULTICAST)
    if path.suffix == ".sh":
        subprocess.run(["bash", "-n", str(path)], check=True)
