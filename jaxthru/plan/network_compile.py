"""The step of a configuration, compiled for described hosts in a process of its own.

A compiler that meets what it cannot do may end its process (XLA does so for some shapes of hosts), and the
plan then says so in one line.
"""

import contextlib
import dataclasses
import math
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from jaxthru.build import attention_choice, early_choices, transfers_choice
from jaxthru.build.checks import check_sizes, offloaded, refusals_named, validate
from jaxthru.build.choices import Documents, documents
from jaxthru.build.defaults import AUTO, get, plain
from jaxthru.build.memory_estimate import layout_of
from jaxthru.build.proposals import candidates
from jaxthru.build.stand_ins import without_triton
from jaxthru.build.step import assemble
from jaxthru.config import RunConfig
from jaxthru.plan import memory
from jaxthru.plan.network_schedule import Rates
from jaxthru.plan.network_traffic import compiled_shape, shape_of
from jaxthru.runtime import aot, xla
from jaxthru.runtime.errors import InputError, did_you_mean, require
from jaxthru.runtime.hardware import data_sheet_flops

TPUS = {"v5e": 0.82e12, "v5p": 2.77e12, "v6e": 1.64e12}
"""TPUs that libtpu describes, a device each chip -> bytes/s of HBM by their data sheets."""

PRODUCTS, MEMORY = 0.7, 0.83
"""Shares of the data sheet's FLOP/s and bytes/s that a step reaches: an H200 under load makes 690 of 989.5
TFLOP/s, and 4 of 4.8 TB/s (docs/results.md)."""


def rates(device: str, share: float = PRODUCTS) -> Rates:
    """Returns the rates of a device by its name. share: of the data sheet's FLOP/s that products reach.
    Raises InputError."""
    known = [*aot.TARGETS, *TPUS]
    require(device in known, lambda: f"--device {device}: unknown{did_you_mean(device, known)}")
    require(0 < share <= 1, f"--products {share}: must be a share, above 0 and at most 1")
    kind, bandwidth = f"tpu {device}", TPUS.get(device)
    if device in aot.TARGETS:
        kind, bandwidth = aot.TARGETS[device].name, aot.TARGETS[device].bandwidth
    return Rates(data_sheet_flops(kind) * share, bandwidth * MEMORY)


@dataclasses.dataclass(frozen=True)
class Request:
    """What to compile: config's step for a mesh of this shape on devices of a kind. per_host: devices of a
    host. torus: of a TPU slice. segments: most documents in a row. sources: of the mix."""

    config: RunConfig
    device: str
    shape: dict[str, int]
    per_host: int
    torus: tuple[int, ...]
    segments: int
    sources: int


def asked(
    config: RunConfig,
    device: str,
    devices: int,
    per_host: int,
    torus: tuple[int, ...] = (),
    segments: int | None = None,
) -> tuple[Request, dict[str, int], tuple[str, ...]]:
    """Returns what to compile for a step on so many devices, the shape of its mesh, and notes.

    Raises InputError where the configuration does not fit these devices, or its step is several programs.
    """
    require(
        not config.offload.layered,
        f"{offloaded(config)}: the step is several programs, of which links are not planned; choose 'none'",
    )
    check_sizes(config, layout_of(config, devices))
    shape = shape_of(config.mesh.shape(devices))
    found = documents(config)
    notes = () if segments else found.notes
    found = found._replace(segments=segments or found.segments)
    config, chosen = _settled(config, device, devices, per_host, found)
    small = compiled_shape(shape)
    share = math.prod(shape.values()) // math.prod(small.values())
    if share > 1:
        notes += (
            f"compiled for {_named(small)}, which stands for {_named(shape)}: each device has its rows",
        )
    train, data = config.train, config.data
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(train, rows=train.rows // share),
        data=dataclasses.replace(data, groups=max(1, data.groups // share) if data.groups else data.groups),
        mesh=dataclasses.replace(config.mesh, **small),
    )
    request = Request(config, device, small, per_host, torus, found.segments, found.sources)
    return request, shape, (*chosen, *notes)


def _named(shape: dict[str, int]) -> str:
    return " × ".join(f"{name}={size}" for name, size in shape.items() if size > 1) or "one device"


def _settled(
    config: RunConfig, device: str, devices: int, per_host: int, found: Documents
) -> tuple[RunConfig, tuple[str, ...]]:
    """Returns a configuration with what it leaves open as a run would choose it by tables and arithmetic, and
    what was chosen. found: of the corpus."""
    if device not in aot.TARGETS:
        return plain(config), ()
    asked, target, layout = config, aot.TARGETS[device], layout_of(config, devices)
    processes = -(-devices // per_host)
    config, _ = early_choices.for_devices(config, layout, target.name, target.capability, processes)
    room = memory.room(config, target) if plain(config) != config else None
    config, _ = attention_choice.by_table(config, layout, found.segments, found.mean, target.capability, room)
    notes: tuple[str, ...] = ()
    if room is not None:
        tried = candidates(config, room, devices=devices, segments=found.segments)
        chosen = next((one.config for one in tried if not (one.near or one.config.offload.layered)), None)
        notes = ("nothing fits without offload, by arithmetic: see plan memory",) * (chosen is None)
        config = chosen or plain(config)
    keys = [key for key in (*AUTO, "kernels.attention") if get(asked, key) != get(config, key)]
    keys = [key for key in keys if key != transfers_choice.KEY or config.mesh.copies]
    named = ", ".join(f"{key} is {get(config, key)}" for key in keys)
    return config, (*notes, *([f"{named}, by tables and arithmetic"] if named else []))


def compiled(request: Request, work: Callable[[Request], str] | None = None) -> str:
    """Returns the HLO of the step, scheduled, compiled in a process of its own; what that process writes to
    stderr is kept to itself. work: what it does, by default `text`.

    Raises InputError for what does not compile, and where the compiler ended its process.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_child, args=(request, theirs, work or text), daemon=True)
    child.start()
    theirs.close()
    try:
        done, said = ours.recv()
    except EOFError:
        child.join()
        where = f"{math.prod(request.shape.values())} × {request.device} in hosts of {request.per_host}"
        raise InputError(
            f"--devices: the compiler ended its process (exit code {child.exitcode}) over {where}; choose "
            "other hosts or another mesh"
        ) from None
    finally:
        ours.close()
    child.join()
    if done is None:
        raise AssertionError(said)
    require(done, said)
    return said


def _child(request: Request, answers: Connection, work: Callable[[Request], str]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # of pages that no user can do much with
    with contextlib.closing(answers):
        try:
            with refusals_named(request.config):
                answers.send((True, work(request)))
        except InputError as error:
            answers.send((False, str(error)))
        except (RuntimeError, NotImplementedError) as error:
            first = str(error).strip().partition("\n")[0]
            answers.send((False, f"the step does not compile for {request.device}: {first}"))
        except Exception:
            answers.send((None, traceback.format_exc()))


def text(request: Request) -> str:
    """Returns what `compiled` does, in this process, which may have touched no device before."""
    devices = math.prod(request.shape.values())
    xla.configure()
    aot.use_cpu(devices)
    if request.device in TPUS:
        return _for_tpu(request, devices)
    target = aot.target(request.device)
    made, _, _ = memory.traced(request.config, target, devices, request.segments)
    return memory.compiled(made, target, devices, max(1, devices // request.per_host)).hlo


def _for_tpu(request: Request, devices: int) -> str:
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no TPU is opened: others may plan meanwhile
    dims = request.torus if math.prod(request.torus) == devices else _slice(request.device, devices)
    named = f"{request.device}:{'x'.join(map(str, dims))}"
    try:
        described = topologies.get_topology_desc(named, "tpu").devices
    except (RuntimeError, NotImplementedError, ValueError) as error:
        said = str(error).strip().partition("\n")[0]
        raise InputError(
            f"compiling for {named}: libtpu does not describe it ({said}); it comes with "
            'pip install "jaxthru[tpu]"'
        ) from error
    layout = validate(request.config, [*described], "tpu")
    config, _ = without_triton(request.config)
    attention = "xla" if config.kernels.attention == "auto" else config.kernels.attention
    made = assemble(config, layout, segments=request.segments, sources=request.sources, attention=attention)
    lowered = made.jitted.trace(made.abstract, made.batch).lower(lowering_platforms=("tpu",))
    options = xla.compiler_options("tpu", devices=devices, deterministic=False)
    with xla.nothing_kept():
        program = lowered.compile(compiler_options=options or None)
    return xla.text(program.runtime_executable())


def _slice(device: str, devices: int) -> tuple[int, ...]:
    """Returns the dims of a small slice of so many chips, as near to a cube or a square as powers of 2."""
    dims = [1] * (2 if device in ("v5e", "v6e") else 3)
    for _ in range(devices.bit_length() - 1):
        dims[dims.index(min(dims))] *= 2
    require(math.prod(dims) == devices, f"--devices: {devices} chips are no slice of {device}")
    return tuple(sorted(dims))
