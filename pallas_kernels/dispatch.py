"""Operations and the choice of an implementation by capability, the same for every operation.

Each folder beside this file is an operation, whose `__init__.py` has one `OPERATION`. An implementation
refuses by raising `Unsupported` while it is traced, from static facts alone: platform, dtypes, shapes,
compute capability, installed libraries. So a choice is made once per compilation and costs a step nothing.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import jax

logger = logging.getLogger("jaxthru.kernels")
_logged: set[tuple[str, str]] = set()


class Unsupported(Exception):
    """An implementation cannot run here; the message says what it needs and what it found. Of an operation
    that nothing can run, operation is its name, which may mean one of several functions, and reasons are
    those of all that were tried."""

    operation: str | None = None
    reasons: str = ""


_assumed = contextvars.ContextVar[str | None]("assumed", default=None)


@contextlib.contextmanager
def assumed(platform: str) -> Iterator[None]:
    """Has what is traced within be for a platform, and never run, so that no choice is logged. JAX is not
    asked for its backend, which would start it."""
    token = _assumed.set(platform)
    try:
        yield
    finally:
        _assumed.reset(token)


_noted = contextvars.ContextVar[dict[str, set[str]] | None]("noted", default=None)


@contextlib.contextmanager
def noted() -> Iterator[dict[str, set[str]]]:
    """Yields {operation: implementations}, which comes to hold those that are traced within."""
    found: dict[str, set[str]] = {}
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def resolve_platform(platform: str | None = None) -> str:
    """Returns "cpu", "gpu" or "tpu": where the computation will run, by default on JAX's default backend."""
    platform = platform or _assumed.get() or jax.default_backend()
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


def on_nvidia(
    platform: str | None = None, least: tuple[int, int] = (0, 0), below: tuple[int, int] | None = None
) -> bool:
    """Whether it will run on an NVIDIA GPU, of such a compute capability; see `require_nvidia`. Where there
    is no GPU to ask, "gpu" is one."""
    if resolve_platform(platform) != "gpu":
        return False
    return jax.default_backend() != "gpu" or fits(nvidia_compute_capability(), least, below)


def fits(
    capability: tuple[int, int] | None, least: tuple[int, int], below: tuple[int, int] | None = None
) -> bool:
    """Whether a compute capability, None of what is no NVIDIA GPU, is one of these; see `require_nvidia`."""
    return capability is not None and capability >= least and (below is None or capability < below)


def require_nvidia(platform: str, least: tuple[int, int], below: tuple[int, int] | None = None) -> None:
    """Raises Unsupported unless `platform` is an NVIDIA GPU of at least this compute capability.

    Where there is no GPU to ask, "gpu" passes: what is traced there is lowered for another machine.

    below: where given, a capability from which on the kernel cannot run; (10, 0) leaves Hopper alone.
    """
    found = platform
    if platform == "gpu":
        capability = nvidia_compute_capability()
        if fits(capability, least, below) or jax.default_backend() != "gpu":
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


def require_float(x: jax.Array) -> None:
    """Raises Unsupported for an array of a dtype that Triton kernels of floats do not take."""
    if x.dtype not in (jax.numpy.bfloat16, jax.numpy.float16, jax.numpy.float32):
        raise Unsupported(f"needs bfloat16, float16 or float32, got {x.dtype}")


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


def triton_before_xla(platform: str) -> tuple[str, ...]:
    """Returns the order of operations whose Triton kernels are measured to be worth it on NVIDIA's GPUs."""
    return ("triton", "xla") if on_nvidia(platform) else ("xla",)


STAND_IN_SUFFIX = "_stand_in"
"""How the name of what stands in for an implementation ends."""


def log_once(operation: str, implementation: str, refusals: str) -> None:
    """Logs what runs, and why others refused, once of each implementation, and not of what never runs."""
    if (operation, implementation) not in _logged and _assumed.get() is None:
        _logged.add((operation, implementation))
        reasons = f" (refused: {refusals})" if refusals else ""
        logger.info("kernels: %s uses %s%s", operation, implementation, reasons)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to do an operation: a module of its folder, imported when it is first tried.

    takes: what its functions take by keyword beside the operation's own arguments: "platform", where it will
    run; "named", whether it was asked for by name: then it runs wherever it can, be it slower than another.
    module: the module's name, where it is not the implementation's.
    options: further keyword arguments, for implementations that share a module.
    """

    takes: tuple[Literal["platform", "named"], ...] = ()
    module: str | None = None
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation and all of its implementations, one of which is called "reference".

    package: dotted, the `__name__` of the folder; its last part is the operation's name.
    implementations: by name, as users name them.
    automatic: (**facts, platform=...) -> the names that are tried, in order, where none is asked for. Others
    run only when named.
    function: what the implementations' modules call it, where that is not the operation's name.
    stand_ins: by name, what has an implementation's memory and refuses what it does, for programs that are
    compiled and never run. They are no choice of users'.
    """

    package: str
    implementations: Mapping[str, Implementation]
    automatic: Callable[..., tuple[str, ...]]
    function: str | None = None
    stand_ins: Mapping[str, Implementation] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """For configurations, log and errors."""
        return self.package.rpartition(".")[2]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all implementations."""
        return tuple(self.implementations)

    def load(self, name: str) -> ModuleType:
        """Returns an implementation's module. Late: Mosaic takes two seconds to import, and few need it."""
        return importlib.import_module(f"{self.package}.{self._implementation(name).module or name}")

    def planned(self, tried: Sequence[str]) -> bool:
        """Whether these names are of a program that is planned, and never run: one is a stand-in's."""
        return not self.stand_ins.keys().isdisjoint(tried)

    def _implementation(self, name: str) -> Implementation:
        return self.stand_ins.get(name) or self.implementations[name]

    def options(self, name: str, platform: str, named: bool) -> dict[str, object]:
        """Returns what an implementation's functions take beside the operation's own arguments."""
        implementation = self._implementation(name)
        given = {"platform": platform, "named": named}
        return {key: given[key] for key in implementation.takes} | dict(implementation.options)

    def tried(
        self, implementation: str | Sequence[str] | None, platform: str | None, **facts: object
    ) -> tuple[str, ...]:
        """Returns the names that `run` tries, in order, for the same arguments."""
        if isinstance(implementation, str):
            return (implementation,)
        return tuple(implementation or self.automatic(platform=resolve_platform(platform), **facts))

    def run(
        self,
        *arguments: object,
        implementation: str | Sequence[str] | None,
        platform: str | None,
        function: str | None = None,
        facts: Mapping[str, object] = types.MappingProxyType({}),
        **options: object,
    ) -> Any:
        """Calls the named implementation, or the first of several that does not refuse.

        Which one ran, and why those before it refused, is logged once.

        Args:
          *arguments, **options: what the operation is applied to.
          implementation: the name asked for, or those to try, in order; None tries those of `automatic`.
          platform: "cpu", "gpu" or "tpu", where it will run; None is JAX's default backend.
          function: which, of an operation that has several; log and errors name it then.
          facts: what the automatic order depends on beside the platform.

        Raises:
          ValueError: no implementation has the name.
          Unsupported: the named one refuses, or all that are tried do; gives each reason.
        """
        platform, label = resolve_platform(platform), function or self.name
        named = isinstance(implementation, str)
        tried = self.tried(implementation, platform, **facts)
        refusals = []
        for name in tried:
            if name not in self.implementations and name not in self.stand_ins:
                raise ValueError(f"{label}: no implementation {name!r}; there are {', '.join(self.names)}")
            try:
                call = getattr(self.load(name), function or self.function or self.name)
                result = call(*arguments, **options, **self.options(name, platform, named))
            except Unsupported as refusal:
                refusals.append(f"{name.removesuffix(STAND_IN_SUFFIX)}: {refusal}")
                continue
            if self.planned(tried):
                return result
            if (found := _noted.get()) is not None:
                found.setdefault(self.name, set()).add(name)
            log_once(label, name, "; ".join(refusals))
            return result
        untried = [name for name in self.names if name not in tried]
        hint = f"; only when named: {', '.join(untried)}" if implementation is None and untried else ""
        reasons = "; ".join(refusals)
        refused = Unsupported(f"{label}: no implementation can run here: {reasons}{hint}")
        refused.operation, refused.reasons = self.name, reasons
        raise refused
