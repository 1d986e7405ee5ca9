"""XLA's settings: the one place that knows flags, the compilation cache and what must stay switched off."""

import contextlib
import functools
import hashlib
import mmap
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental.compilation_cache import compilation_cache

from jaxthru.runtime.distributed import is_primary
from jaxthru.runtime.errors import InputError, require

SUPPORTED_JAX = ((0, 11, 2), (0, 13, 0))
"""First version supported, first that is not. JAX 0.11.0 computes silently wrong gradients with offloaded
scan residuals."""

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""NVLink multicast can take a host's GPUs out of service; these keep every library here from using it."""

MULTICAST_FLAGS = re.compile(r"user_buffers|symmetric|collective_kernels|one_shot_kernel")
"""Options of XLA that may lead to it: memory that is registered with NCCL's multicast, and XLA's own kernels,
which take multimem instructions where there are. A mode may be `symmetric`, too."""

NO_COLLECTIVE_KERNELS = {"xla_gpu_experimental_use_collective_kernels": ""}
"""XLA's own kernels for small sums over GPUs are on by default; NCCL makes them here, as all others."""

SMALLEST_GAP_FIRST = {"xla_gpu_enable_allocator_spatial_partitioning": "false"}
"""The allocator otherwise fills any gap that arrays have left before it begins on what lies behind all of
them. A batch that is placed while a step has its temporaries lies right behind them; the next step's metrics
then take the first bytes of the temporaries' gap, which they no longer fit, however much is free behind the
batch. So Qwen3-30B-A3B ran out of memory in its third step over two H200s: 41 GiB were wanted, 44 free. With
this off, a small array takes the smallest gap that holds it. Memory for collectives of its own, of which
nothing here has any, then comes from another allocator."""

OWN_FLAGS = tuple(f"--{name}={value}" for name, value in (NO_COLLECTIVE_KERNELS | SMALLEST_GAP_FIRST).items())
"""What `configure` adds to XLA_FLAGS where those do not name it: for all programs of a process, a notebook's
and a sampler's too. Steps and evaluations are compiled without collective kernels besides: XLA reads its
flags once, and may have done so before."""

MEMORY_FRACTION = 0.96
"""A training job owns its GPU; JAX's default leaves a quarter of the memory unused. What is left here, 5.6
GiB of an H200's 140, is for CUDA's context and the libraries' own workspaces."""


def configure(writes_to_peers: bool = False) -> None:
    """Sets up XLA for this process. Call it before the first device is touched.

    writes_to_peers: kernels will address other GPUs' memory. CUDA then loads all code when it starts: at a
    first launch, as it does otherwise, loading may wait for running kernels to end, and one that waits for a
    peer whose kernel is yet to be loaded never does.

    No program of this process uses XLA's own collective kernels, see `OWN_FLAGS`.

    Compiled programs and autotuning results are kept for the next start, in JAX_COMPILATION_CACHE_DIR or
    ~/.cache/jaxthru/xla. Raises InputError for a JAX that is not supported, and for a flag in XLA_FLAGS that
    is unknown (XLA would abort the process) or that could make collectives use multicast.
    """
    first, end = SUPPORTED_JAX
    version = tuple(int(part) for part in re.findall(r"\d+", jax.__version__)[:3])
    require(
        first <= version < end,
        f"jax {jax.__version__}: supported is jax>={'.'.join(map(str, first))},<{end[0]}.{end[1]}",
    )
    os.environ.update(NO_MULTICAST)
    if writes_to_peers:
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # its old name; JAX refuses both at once
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))
    flags = given_flags()
    check_flags(flags)
    ours = (own for own in OWN_FLAGS if own.partition("=")[0] not in flags)
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *ours])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # small ones add up to seconds too
    _count_compilations()
    if jax.config.jax_compilation_cache_dir is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        keep_compiled(home / "jaxthru" / "xla" / processor())


def memory_fraction() -> float:
    """Returns the share of a device's memory that JAX takes, or would take, in this process."""
    names = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
    return float(next((os.environ[name] for name in names if name in os.environ), MEMORY_FRACTION))


_compilations = {"asked": 0, "found": 0}


@functools.cache
def _count_compilations() -> None:
    def asked(event: str, seconds: float, **_) -> None:
        _compilations["asked"] += event == "/jax/core/compile/backend_compile_duration"

    def found(event: str, **_) -> None:
        _compilations["found"] += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_duration_secs_listener(asked)
    jax.monitoring.register_event_listener(found)


def compilations() -> tuple[int, int]:
    """Returns how many programs this process has compiled, and how many it found in the cache instead."""
    return _compilations["asked"] - _compilations["found"], _compilations["found"]


def processor() -> str:
    """Returns a short name for this kind of processor. Programs compiled for one may crash on another, and
    the nodes of a cluster share home directories."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def keep_compiled(directory: Path) -> None:
    """Keeps compiled programs, and on a GPU the results of autotuning, in `directory` from here on. What
    lies there is run: it must be the user's own, and never be handed on, as a run directory may be."""
    compilation_cache.reset_cache()  # it may have been opened elsewhere already
    jax.config.update("jax_compilation_cache_dir", str(directory))


@contextlib.contextmanager
def nothing_kept(anew: bool = True) -> Iterator[None]:
    """Compiles anew what is compiled within, and keeps it only in memory. anew: False changes nothing."""
    if not anew:
        yield
        return
    kept = jax.config.jax_enable_compilation_cache
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
        compilation_cache.reset_cache()


def without_graphs(platform: str) -> dict[str, Any]:
    """Returns the options for compiling a program without CUDA graphs: a trace can then name its kernels,
    which all bear the graph's name within one."""
    return {"xla_gpu_enable_command_buffer": ""} if platform in ("gpu", "cuda", "rocm") else {}


def untuned(platform: str) -> dict[str, Any]:
    """Returns the options for compiling a program that runs once. Else XLA times several kernels for each of
    its fusions: for the draws of a 1B's parameters that took a minute on an H200, and now takes three
    seconds."""
    return {"xla_gpu_autotune_level": 0} if platform in ("gpu", "cuda", "rocm") else {}


def for_peers(platform: str) -> dict[str, Any]:
    """Returns the options for compiling a program with kernels that write into peers' memory.

    They get their peers' addresses anew at each call, so they, custom calls, are no part of a CUDA graph: XLA
    updates one where this device's buffers have moved, not where only a peer's have, and a stale address
    corrupts memory in silence. And they wait for their peers, so nothing else that does may run beside them:
    a collective that holds streaming multiprocessors of one device, while such a kernel holds all of
    another's, would hang both. Collectives therefore run in line, each device's in the same order as its
    kernels.
    """
    if platform not in ("gpu", "cuda", "rocm"):
        return {}
    return {
        **NO_COLLECTIVE_KERNELS,
        **SHORT_GRAPHS,
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN",
        "xla_gpu_disable_async_collectives": "ALLCOLLECTIVES",
    }


def for_matmuls(platform: str, loops: bool = False) -> dict[str, Any]:
    """Returns the options for compiling a program with large matmuls: none off a GPU, nor any that XLA_FLAGS
    names. loops: over layers, see `STACKED_BY_COPY`.

    By default XLA wraps each matmul for Triton, compiles and times it in many tiles beside cuBLAS's; where
    cuBLAS's is taken, as of large ones it is, nothing is left in the wrap for it to add as it writes. On an
    H200, without Triton's: the step of Llama-3.2-1B compiled in 15 s in place of 29, and made 1.9% more
    tokens a second, once each; that of 8 layers of Llama 3 8B in float8 had taken 128 s to compile.
    """
    if platform not in ("gpu", "cuda", "rocm"):
        return {}
    options = _unless_given({"xla_gpu_enable_triton_gemm": False})
    return options | _unless_given(STACKED_BY_COPY) if loops else options


def _unless_given(options: dict[str, Any]) -> dict[str, Any]:
    """Returns options, or none of them where XLA_FLAGS speaks of one."""
    flags = given_flags()
    return {} if any(name in flags for name in options) else options


SHORT_GRAPHS = {"xla_gpu_graph_min_graph_size": 1}
"""Collectives cut a step into pieces, of which many are shorter than XLA makes CUDA graphs of (5 commands).
Outside of one it fills what cuDNN's attention backward writes to, and its workspace, with zeros before each
call: 17 GB and 4 ms for two rows of 8,192 tokens with up to 32 documents each."""

COPIED_PERMUTES = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
"""Permutes between GPUs of one process are copies by their copy engines, and take no multiprocessors from
what runs beside them; NCCL's kernels do. Between processes they stay NCCL's."""

FENCED = {
    "xla_gpu_experimental_scheduler_memory_fencing_threshold_bytes": 64 << 20,
    "xla_gpu_experimental_scheduler_memory_fencing_slack_windows": 8,
}
"""A large array outlives its last use, in the order that takes least memory, by eight collectives at most.

XLA's scheduler puts off what no collective waits for, and none does for gradients of experts that one device
alone has: all layers' came last, and what they are made of stayed until then (its pull request 45929; for
what that took of Qwen3-30B-A3B see docs/lab/parallelism.md)."""

STACKED_BY_COPY = {"xla_gpu_enable_dynamic_slice_fusion": False}
"""A loop over layers copies what it keeps for the backward pass into its stacks. XLA would have the matmul
write there, and make it once more for what else reads its result (docs/lab/kernels.md)."""


def given_flags() -> str:
    """Returns the flags of XLA_FLAGS, or of the file that it names: for XLA, whatever begins with no dashes.
    Raises InputError for a file that cannot be read, where XLA would abort the process."""
    given = os.environ.get("XLA_FLAGS", "")
    if not given or given.lstrip().startswith("--"):
        return given
    try:
        return Path(given).read_text()
    except OSError as error:
        raise InputError(
            f"XLA_FLAGS = {given}: no file of flags ({error.strerror}), and no flag, which begins with --"
        ) from error


def check_flags(flags: str) -> None:
    """Raises InputError for the first flag of `flags` that is unknown here or forbidden."""
    names = re.findall(r"--(xla_\w+)(=\S*)?", flags)
    for name, value in names:
        on = MULTICAST_FLAGS.search(name) and value.lower() not in ("=false", "=0", "=")
        if on or (name.endswith("_mode") and "symmetric" in value.lower()):
            raise InputError(f"XLA_FLAGS has --{name}: it may use NVLink multicast; take it out")
    if not names:
        return
    library = Path(jaxlib.__file__).parent / "libjax_common.so"
    if not library.exists():
        return
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:
        for name, _ in names:
            # A flag's name stands in the library as a whole string, which ends with a zero byte.
            known = binary.find(name.encode() + b"\0") >= 0
            require(known, f"XLA_FLAGS has --{name}: unknown to jaxlib {jaxlib.__version__}")


def text(program: Any) -> str:
    """Returns a loaded executable's HLO (`jax.stages.Compiled.runtime_executable`).

    XLA's text leaves out what an asynchronous instruction wraps, by whose name a GPU's trace knows it. Behind
    each module these follow, as `// %all-gather-start wraps %all-gather.1`.
    """
    return "\n\n".join("\n".join((module.to_string(), *_wraps(module))) for module in program.hlo_modules())


def _wraps(module: Any) -> Iterator[str]:
    for computation in module.computations():
        for instruction in computation.instructions():
            if instruction.opcode.name == "kAsyncStart":
                yield f"// %{instruction.name} wraps %{instruction.async_wrapped_root().name}"


def compiler_options(
    platform: str,
    devices: int,
    deterministic: bool,
    *,
    writes_to_peers: bool = False,
    copies: bool = False,
    experts: bool = False,
    loops: bool = False,
    autotuned: Path | None = None,
) -> dict[str, Any]:
    """Returns the options for compiling the step on `platform`, each kept for a reason.

    devices: that share the step. deterministic: bit-exact repeats on a GPU; a CPU gives them always.
    writes_to_peers: has kernels that address other GPUs' memory, for which see `for_peers`. copies: permutes
    are to be copies, see `COPIED_PERMUTES`. experts: are divided over devices, see `FENCED`. loops: over
    layers, see `STACKED_BY_COPY`. autotuned: the folder that the results of autotuning come from and go to,
    as text; compile within `nothing_kept`, as a program found compiled may be tuned otherwise.
    """
    options: dict[str, Any] = {}
    if platform not in ("gpu", "cuda", "rocm"):
        return options
    if devices > 1:
        # Starts collectives early and awaits them late. XLA does so by itself where it knows their cost, on
        # Hopper (the same program with and without), and nowhere else: see docs/lab/parallelism.md.
        options["xla_gpu_enable_latency_hiding_scheduler"] = True
        options |= SHORT_GRAPHS | NO_COLLECTIVE_KERNELS
    if copies:
        options |= COPIED_PERMUTES
    if experts:
        options |= _unless_given(FENCED)
    options |= for_matmuls(platform, loops)
    if deterministic:
        options["xla_gpu_deterministic_ops"] = True
    if autotuned:
        mode = "UPDATE" if is_primary() else "READ"
        if is_primary():
            autotuned.mkdir(parents=True, exist_ok=True)
        options["xla_gpu_per_fusion_autotune_cache_dir"] = str(autotuned.absolute())
        options["xla_gpu_experimental_autotune_cache_mode"] = f"AUTOTUNE_CACHE_MODE_{mode}"
    if writes_to_peers:
        options |= for_peers(platform)
    return options
