"""Ahead-of-time compilation for a GPU that is not here: JAX's CUDA plugin needs no driver for it.

What a compile of this kind leaves out is measuring: matmuls become cuBLAS calls, as most are on a GPU after
autotuning. Peaks then came within 0.5 % of those measured on H200s (docs/lab/memory.md).
"""

import dataclasses
import functools
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxthru.runtime import xla
from jaxthru.runtime.errors import InputError, did_you_mean, require


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU by its data sheet. memory: bytes that CUDA reports. bandwidth: bytes/s of HBM. clock: GHz."""

    name: str
    memory: int
    bandwidth: float
    cores: int = 132
    clock: float = 1.98
    capability: tuple[int, int] = (9, 0)

    def description(self) -> str:
        """Returns XLA's GpuTargetConfigProto as text."""
        major, minor = self.capability
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 << 10,
            "shared_memory_per_core": 228 << 10,
            "shared_memory_per_block_optin": 227 << 10,
            "threads_per_core_limit": 2048,
            "core_count": self.cores,
            "fpus_per_core": 128,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "memory_bandwidth": round(self.bandwidth),
            "l2_cache_size": 50 << 20,
            "clock_rate_ghz": self.clock,
            # XLA plans with 80 % of this, but in a run with its allocator's limit, which it therefore is.
            "device_memory_size": round(self.memory * xla.memory_fraction() / 0.8),
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
        }
        fields = " ".join(f"{name}: {value}" for name, value in device.items())
        compute = f"major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES"
        return (
            f"gpu_device_info {{ {fields} cuda_compute_capability {{ {compute} }} }} "
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 19 } runtime_version { major: 13 } '
            f'device_description_str: "{self.name}"'
        )


TARGETS = {
    "h200": Target("NVIDIA H200", round(139.8 * 2**30), 4.8e12),
    "h100": Target("NVIDIA H100 80GB HBM3", round(79.1 * 2**30), 3.35e12),
}


def target(name: str) -> Target:
    """Returns the GPU of this name. Raises InputError."""
    require(name in TARGETS, f"--device {name}: unknown{did_you_mean(name, list(TARGETS))}")
    return TARGETS[name]


def available() -> bool:
    """Says whether programs can be compiled for CUDA here: whether JAX's CUDA plugin is installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (13, 12))


def use_cpu(devices: int = 1) -> None:
    """Has this process trace on the CPU, as so many devices: the plugin describes devices to no other.

    Call it before the first device is touched. Raises InputError if it comes too late.
    """
    jax.config.update("jax_platforms", "cpu")
    try:
        if devices > 1:
            jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError as error:
        raise InputError(f"planning for {devices} devices: ask for them first ({error})") from error


@functools.cache
def _client(target: Target, devices: int, hosts: int = 1):
    """Returns a client that compiles for hosts with so many of these GPUs in all, and can do nothing else."""
    require(
        available(),
        "JAX's CUDA plugin is not installed: it compiles for a GPU, on a machine without one too; "
        'pip install "jaxthru[gpu]"',
    )
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(
            "", platform="cuda", target_config=target.description(), topology=f"{hosts}x1x{devices // hosts}"
        )
    except NotImplementedError as error:
        raise InputError(f"compiling for {target.name}: needs JAX_PLATFORMS=cpu ({error})") from error
    return described.devices[0].client, described.devices


OPTIONS = {
    # Nothing can be timed. Without a choice by timing, a Triton matmul has no tile sizes that are known to
    # fit and the compile fails; a cuBLAS call always does, with the workspace that it has on a GPU.
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_mock_custom_calls": True,  # stand-ins for kernels have nothing behind them
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program's memory. stats: XLA's sizes in bytes, as `compiled.memory_analysis()` has.
    dump: {file kind: text} of XLA's buffer assignment: `buffer-assignment`, `values`, `live-range`."""

    stats: object
    dump: dict[str, str]
    hlo: str


DUMPED = {
    "buffer-assignment": "*after_optimizations-buffer-assignment.txt",
    "values": "*after_optimizations-buffer-assignment-values.txt",
    "live-range": "*after_optimizations-live-range.txt",
}


def dump_options(directory: Path) -> dict[str, object]:
    """Returns compiler options that have XLA write its buffer assignment to `directory`."""
    return {"xla_dump_to": str(directory), "xla_dump_hlo_as_text": True}


def read_dump(directory: Path) -> dict[str, str]:
    """Returns the buffer assignment of the last program that was compiled into `directory`."""
    found = {kind: sorted(directory.glob(pattern)) for kind, pattern in DUMPED.items()}
    return {kind: paths[-1].read_text() for kind, paths in found.items() if paths}


def compile_for(
    lowered: jax.stages.Lowered,
    target: Target,
    devices: int = 1,
    hosts: int = 1,
    chosen: dict[str, Any] | None = None,
) -> Program:
    """Compiles a program for a GPU that need not be here, and returns what memory it takes there.

    lowered: by `lower`, for CUDA, on a mesh of as many CPU devices; so that memory kinds, which described
    devices lack, are kept. hosts: that have the devices, in equal parts. chosen: XLA's options, by default
    those of a plain step on so many devices. Raises InputError without JAX's CUDA plugin.
    """
    client, described = _client(target, devices, hosts)
    if chosen is None:
        chosen = xla.compiler_options("gpu", devices=devices, deterministic=False)
    from jax._src import compiler
    from jaxlib import xla_client

    with tempfile.TemporaryDirectory(prefix="jaxthru-plan-") as folder:
        options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=devices,
            device_assignment=np.arange(devices)[None],
            env_options_overrides=chosen | OPTIONS | dump_options(Path(folder)),
        )
        module = lowered.compiler_ir("stablehlo")
        program = client.compile(module, xla_client.DeviceList(tuple(described)), options)
        dump = read_dump(Path(folder))
    return Program(program.get_compiled_memory_stats(), dump, xla.text(program))


def lower(jitted, *arguments) -> jax.stages.Lowered:
    """Returns a jitted function of abstract arguments, which lie on CPU devices, lowered for CUDA."""
    return jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
