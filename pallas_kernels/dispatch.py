"""The choice of an implementation by capability, the same for every operation.

An implementation refuses by raising `Unsupported` while it is traced, from static facts alone: platform,
dtypes, shapes, compute capability, installed libraries. So a choice is made once per compilation and costs a
step nothing.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import jax

logger = logging.getLogger("jaxthru.kernels")
_logged: set[tuple[str, str]] = set()


class Unsupported(Exception):
    """An implementation cannot run here; the message says what it needs and what it found."""


def resolve_platform(platform: str | None = None) -> str:
    """Returns "cpu", "gpu" or "tpu": where the computation will run, by default on JAX's default backend."""
    platform = platform or jax.default_backend()
    return "gpu" if platform in ("cuda", "rocm") else platform


@functools.cache
def nvidia_compute_capability() -> tuple[int, int] | None:
    """Returns (major, minor) of this process's first NVIDIA GPU, or None without one."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # JAX knows no such backend
        return None
    major, minor = device.compute_capability.split(".")
    return int(major), int(minor)


def on_nvidia(platform: str | None = None) -> bool:
    """Whether it will run on an NVIDIA GPU. Where there is no GPU to ask, "gpu" is one."""
    another = jax.default_backend() == "gpu" and nvidia_compute_capability() is None
    return resolve_platform(platform) == "gpu" and not another


def require_nvidia(platform: str, least: tuple[int, int], below: tuple[int, int] | None = None) -> None:
    """Raises Unsupported unless `platform` is an NVIDIA GPU of at least this compute capability.

    Where there is no GPU to ask, "gpu" passes: what is traced there is lowered for another machine.

    below: where given, a capability from which on the kernel cannot run; (10, 0) leaves Hopper alone.
    """
    found = platform
    if platform == "gpu":
        capability = nvidia_compute_capability()
        fits = capability is not None and capability >= least and (below is None or capability < below)
        if fits or jax.default_backend() != "gpu":
            return
        found = f"{capability[0]}.{capability[1]}" if capability else "another maker's"
    limit = f" and < {below[0]}.{below[1]}" if below else ""
    raise Unsupported(
        f"needs an NVIDIA GPU of compute capability >= {least[0]}.{least[1]}{limit}, found {found}"
    )


def require_gpu(platform: str, least: tuple[int, int]) -> None:
    """Raises Unsupported unless `platform` is a GPU, and if it is NVIDIA's, of this compute capability."""
    if platform != "gpu" or on_nvidia(platform):
        require_nvidia(platform, least)


@functools.cache
def load_triton(package: str) -> tuple[ModuleType, ModuleType]:
    """Returns jax_triton and `<package>.triton_kernels`. Late, for neither is of use off a GPU.

    Raises Unsupported without jax-triton.
    """
    try:
        return importlib.import_module("jax_triton"), importlib.import_module(f"{package}.triton_kernels")
    except ImportError as error:
        raise Unsupported(f"needs jax-triton (pip install 'jaxthru[gpu]'): {error}") from error


def require_tpu(platform: str) -> None:
    """Raises Unsupported unless `platform` is a TPU."""
    if platform != "tpu":
        raise Unsupported(f"needs a TPU, found {platform}")


def require_nvlink(platform: str) -> None:
    """Raises Unsupported where the GPUs of a host are joined by PCIe, by the name of the first one. Where
    there is no GPU to ask, it passes, as `require_nvidia` does."""
    if platform == "gpu" and jax.default_backend() == "gpu":
        kind = jax.local_devices()[0].device_kind
        if "PCIe" in kind:
            raise Unsupported(f"needs GPUs joined by NVLink, found {kind}")


def require_one_process() -> None:
    """Raises Unsupported unless one process drives every device: for kernels that write into peers' memory.

    Addresses of peers are known within a process. Between processes JAX makes symmetric memory of every
    argument instead, and the runtime then asks for its multicast address, which no kernel here may.
    """
    if (processes := jax.process_count()) > 1:
        raise Unsupported(f"needs every device in one process, found {processes} processes")


def run[Result](
    operation: str,
    implementations: Mapping[str, Callable[..., Result]],
    automatic: Sequence[str],
    implementation: str | None,
    *arguments: object,
) -> Result:
    """Calls the named implementation, or the first of `automatic` that does not refuse.

    Which one ran, and why those before it refused, is logged once for each (operation, implementation).

    Args:
      operation: its name, for log and errors.
      implementations: all of them by name; each takes `arguments`.
      automatic: the names to try, in order, when none is asked for. Others run only when named.
      implementation: the name asked for, or None.
      *arguments: what the operation is applied to.

    Raises:
      ValueError: no implementation has the name.
      Unsupported: the named one refuses, or all of `automatic` do; gives each reason.
    """
    refusals = []
    for name in automatic if implementation is None else (implementation,):
        if name not in implementations:
            raise ValueError(
                f"{operation}: no implementation {name!r}; there are {', '.join(implementations)}"
            )
        try:
            result = implementations[name](*arguments)
        except Unsupported as refusal:
            refusals.append(f"{name}: {refusal}")
            continue
        if (operation, name) not in _logged:
            _logged.add((operation, name))
            reasons = f" (refused: {'; '.join(refusals)})" if refusals else ""
            logger.info("%s: %s runs%s", operation, name, reasons)
        return result
    untried = [name for name in implementations if name not in automatic]
    hint = f"; only when named: {', '.join(untried)}" if implementation is None and untried else ""
    raise Unsupported(f"{operation}: no implementation can run here: {'; '.join(refusals)}{hint}")
