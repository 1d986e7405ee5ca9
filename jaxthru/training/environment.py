"""What a run is started with: versions, devices, flags, the commit and the command."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jaxthru", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
FLAG_PREFIXES = ("XLA_", "LIBTPU_", "JAX_", "NCCL_", "NVSHMEM_", "TORCH_SYMM_")


def environment() -> dict[str, Any]:
    """Returns versions, devices, flags, the commit (null outside a git checkout) and the command line."""
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "versions": {package: version_of(package) for package in PACKAGES},
        "platform": platform.platform(),
        "backend": devices[0].client.platform_version,
        "devices": {"kind": devices[0].device_kind, "count": len(devices)},
        "processes": jax.process_count(),
        "flags": {key: os.environ[key] for key in sorted(os.environ) if key.startswith(FLAG_PREFIXES)},
        "commit": _commit(),
        "command": sys.orig_argv,
    }


def version_of(package: str) -> str | None:
    """Returns the version of a package, None of one that is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Returns the commit of jaxthru's own checkout; None without one, be it within another project's."""
    tree = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(tree), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return said[1] if said[0] == str(tree) else None
