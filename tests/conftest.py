"""Strict settings for every test: eight CPU devices, no silent promotion of dtypes or ranks."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Runs before any test module imports JAX. GPU tests alone see a GPU."""
    marks = config.option.markexpr
    if "gpu" not in marks.replace("not gpu", ""):
        os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
