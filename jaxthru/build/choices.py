"""What `auto` stands for on these devices: the fastest that fits, by the compiled step.

Arithmetic proposes (build/proposals.py), a compile confirms, and what does not fit after all makes room for
the next. A run directory keeps what was chosen, in choices.json.
"""

import dataclasses
import json
import logging
import math
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxthru import config as configuration
from jaxthru.build.attention_choice import mean_document
from jaxthru.build.defaults import AUTO, NUMERIC, get, plain, replaced
from jaxthru.build.memory_estimate import Room, host_room
from jaxthru.build.proposals import Candidate, candidates
from jaxthru.build.refusal import NothingFits
from jaxthru.config import RunConfig
from jaxthru.data.loading.dataset import open_data
from jaxthru.data.loading.host_pool import RunData
from jaxthru.data.store.mix_file import load_mix
from jaxthru.runtime import distributed, hardware
from jaxthru.runtime import plain as plain_values
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.sharding import Layout

log = logging.getLogger("jaxthru")

KEPT_WITH = {"offload.level": ("offload.fraction", "offload.prefetch")}
"""A key -> others that are chosen with it."""
CHOSEN = *AUTO, *(key for keys in KEPT_WITH.values() for key in keys), "kernels."
"""Keys, and groups of keys, that may be chosen: what else a file of choices has is none of a run's."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a key was asked to be, what was chosen, why, and on which devices."""

    key: str
    asked: Any
    chosen: Any
    reason: str
    device: str


def device_name(devices: Sequence[jax.Device]) -> str:
    """Returns `named` of these devices."""
    processes = len({device.process_index for device in devices})
    return named(len(devices), devices[0].device_kind, processes)


def named(devices: int, kind: str, processes: int = 1) -> str:
    """Returns how many devices of which kind, in how many processes, as choices.json has it."""
    return f"{devices} × {kind}" + f" in {processes} processes" * (processes > 1)


def open_keys(config: RunConfig) -> list[str]:
    """Returns the keys of `defaults.AUTO` that are still `auto`."""
    return [key for key in AUTO if get(config, key) == "auto"]


def made(
    asked: RunConfig,
    chosen: RunConfig,
    reason: str,
    devices: Sequence[jax.Device],
    reasons: Mapping[str, str] = types.MappingProxyType({}),
) -> tuple[Choice, ...]:
    """Returns the choices that lead from one configuration to the other. reason: for keys of AUTO. reasons:
    of single keys, where there is one."""
    ours, theirs = (plain_values.flat(configuration.to_dict(each)) for each in (asked, chosen))
    found = []
    for key in sorted(key for key in ours if ours[key] != theirs[key]):
        why = reasons.get(key) or REASONS.get(key.partition(".")[0]) or reason or RECORDED
        found.append(Choice(key, ours[key], theirs[key], why, device_name(devices)))
    return tuple(found)


CAN_RUN = "the first that can run here"
REASONS = {"kernels": CAN_RUN}
DEFAULT = "the default of this device"
RECORDED = f"as on the first start, or {DEFAULT}"


def with_kernels(config: RunConfig, kernels: Mapping[str, Collection[str]]) -> RunConfig:
    """Returns a configuration with the implementations that were taken, where one alone was of an operation
    that is `auto`. kernels: {operation: implementations}."""
    names = {f"kernels.{name}": sorted(found) for name, found in kernels.items() if len(found) == 1}
    return replaced(config, {key: name for key, (name,) in names.items() if get(config, key) == "auto"})


def write(path: Path, choices: Iterable[Choice]) -> None:
    """Writes choices as JSON, in one piece."""
    rows = [dataclasses.asdict(choice) for choice in choices]
    write_atomically(path, json.dumps(rows, indent=2) + "\n")


def still_true(recorded: Iterable[Choice], config: RunConfig, made: Iterable[Choice]) -> tuple[Choice, ...]:
    """Returns the choices that led to a configuration: those of this start, and of earlier ones those whose
    key is not chosen anew and has the value that was chosen, be it that this start asks for just that. What
    this start has found settled has the reason of when it was, or is the device's default."""
    values = plain_values.flat(configuration.to_dict(config))
    kept = {each.key: each for each in recorded if values.get(each.key) == each.chosen}
    found = {each.key: each for each in made}
    for key, settled in found.items():
        if settled.reason == RECORDED:
            was = kept.get(key)
            same = was and (key in NUMERIC or was.device == settled.device)
            found[key] = was if same else dataclasses.replace(settled, reason=DEFAULT)
    return tuple(one for _, one in sorted((kept | found).items()))


def read(path: Path) -> tuple[Choice, ...]:
    """Returns the choices in a file, none without one, and none of keys that are no more, or are never
    chosen. Raises InputError for a file that is none, and for a value that its key cannot have."""
    if not path.exists():
        return ()
    try:
        names = [field.name for field in dataclasses.fields(Choice)]
        found = [Choice(*(row[name] for name in names)) for row in json.loads(path.read_text())]
        declared = configuration.declared_keys()
        found = [each for each in found if each.key in declared and each.key.startswith(CHOSEN)]
        for each in found:
            for value in (each.asked, each.chosen):
                plain_values.check(each.key, value, declared[each.key])
        return tuple(found)
    except (OSError, ValueError, TypeError, LookupError, RecursionError, InputError) as error:
        said = f"{path}: cannot be read as choices ({error})"
        raise InputError(
            f"{said}; delete it, and start with the configuration that was asked for, not its config.json"
        ) from error


DECIDES = (
    "train.rows",
    "train.microbatches",
    "train.deterministic",
    "train.loss_chunk",
    "model.",
    "data.sequence",
    "optim.state",
)
DECIDES += ("optim.clip_rule", "optim.name", "mesh.", "precision.", "remat.", "offload.", "kernels.")
"""Keys that what fits, and what is fast, depends on."""
DECIDE_NUMBERS = "precision.compute", "optim.name", "lora."
"""Those by which what changes numbers may be chosen at all (`defaults.NUMERIC`)."""


def of_file(config: RunConfig) -> tuple[Choice, ...]:
    """Returns the choices that led to the config.json that a configuration comes from, but for keys that
    --set names; none for one from elsewhere."""
    if not config.file or config.file.suffix != ".json":
        return ()
    made = read(config.file.parent / "choices.json")
    return tuple(each for each in made if each.key not in config.overridden)


def reopened(config: RunConfig, here: str | None = None) -> RunConfig:
    """Returns the configuration of a config.json with what `auto` was settled to open again on other devices,
    or where --set names what it depends on; but for what changes numbers, unless --set makes that senseless.

    here: `named` of the devices, by default of all that are here.
    """
    here = here or device_name(hardware.devices())

    def holds(choice: Choice) -> bool:
        numeric = choice.key in NUMERIC
        decide = DECIDE_NUMBERS if numeric else DECIDES
        changed = any(key.startswith(decide) for key in config.overridden)
        return not changed and (numeric or choice.device == here)

    away = [each for each in of_file(config) if get(config, each.key) == each.chosen and not holds(each)]
    return replaced(config, {each.key: each.asked for each in away})


def resolve(config: RunConfig, run: RunConfig | None = None, recorded: Sequence[Choice] = ()) -> RunConfig:
    """Returns a configuration with every `auto` settled that needs no compile: by what its run has recorded
    on such devices, and on a CPU. What changes numbers is kept on any devices, which refuse what they cannot
    do (`checks.validate`).

    run, recorded: the configuration that a run was started with, and the choices that led to it.
    """
    devices = hardware.devices()
    here, config = device_name(devices), reopened(config)
    if run is not None:
        config = replaced(config, {key: get(run, key) for key in NUMERIC if get(config, key) == "auto"})
    if run is not None and _alike(config, run, {each.key: each.asked for each in recorded}):
        kept = {each.key: each.chosen for each in recorded if each.device == here}
        open_here = {*open_keys(config), *(key for key in kept if get(config, key) == "auto")}
        open_here |= {other for key in open_here for other in KEPT_WITH.get(key, ())}
        config = replaced(config, {key: value for key, value in kept.items() if key in open_here})
    return plain(config) if devices[0].platform == "cpu" else config


def _alike(config: RunConfig, run: RunConfig, asked: dict[str, Any]) -> bool:
    """Says whether the same would be chosen for a configuration and for that of a run: what is open now was
    so there too. asked: of the keys that were chosen there, what they were before."""
    ours, theirs = (plain_values.flat(configuration.to_dict(each)) for each in (config, run))
    left_open = {key for key, value in ours.items() if value == "auto"}
    left_open &= {*asked} | {key for key, value in theirs.items() if value == "auto"}
    with_open = (other for key in left_open for other in KEPT_WITH.get(key, ()))
    theirs |= {other: asked[other] for other in with_open if other in asked}
    keys = [key for key in ours | theirs if key.startswith(DECIDES) and key not in left_open]
    return all(ours.get(key) == theirs.get(key) for key in keys)


def room_here(config: RunConfig) -> Room:
    """Returns the room on this process's devices and hosts, the same in all processes."""
    host = host_room(config)
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", host)  # a CPU's is the host's
    # A plan's host bytes are those of all devices, a host's room is for its own.
    sizes = distributed.from_first(lambda: [memory, host * jax.device_count() // jax.local_device_count()])
    return Room(*sizes)


def proposed(config: RunConfig, layout: Layout, room: Room | None, segments: int) -> Iterator[Candidate]:
    """Yields what a configuration may become here, see `likeliest`; itself where nothing is open.

    segments: most documents in a row. Raises NothingFits where nothing is near by arithmetic.
    """
    if not open_keys(config):
        yield Candidate(config, None, math.inf, 0)  # which is compared with no other
        return
    devices, gpu = layout.mesh.size, layout.mesh.devices.flat[0].platform == "gpu"
    found = candidates(config, room, devices=devices, segments=segments, gpu=gpu)
    first = next(found, None)
    if first is None:
        raise NothingFits(config, room, devices, segments)
    yield first
    yield from found


DOCUMENTS = 32
"""Most documents assumed in a row where the corpus is not prepared: they size tables and workspaces."""


class Documents(NamedTuple):
    """segments: most documents in a row. sources: of the mix. notes: where these are assumed. mean: tokens of
    a document in a row, None where that is unknown. masked: whether some say what is trained on."""

    segments: int
    sources: int
    notes: tuple[str, ...] = ()
    mean: float | None = None
    masked: bool = False


def documents_of(data: RunData) -> Documents:
    """Returns what the documents of open data are like."""
    return Documents(data.segments, len(data.names), mean=mean_document(data), masked=data.masked)


def documents(
    config: RunConfig, begun: Mapping[str, str] | None = None, kept: Path | None = None
) -> Documents:
    """Returns what the documents of the mix are like. begun, kept: of a run that goes on, as of `open_data`.
    Raises InputError for a mix that is none."""
    load_mix(config.data.mix, config.data.tokenizer, kept)
    try:
        with open_data(config.data, prepare=False, begun=begun, kept=kept) as data:
            return documents_of(data)
    except InputError:
        note = f"the corpus is not prepared: {DOCUMENTS} documents a row assumed (--segments)"
        return Documents(DOCUMENTS, 1, (note,))
