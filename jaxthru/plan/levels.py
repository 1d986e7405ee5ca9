"""Which level of offload, which format of the state and which share of the layers: by arithmetic.

It answers before anything is compiled: bytes per parameter of each format (`optim.formats`), where each level
keeps them, and what is on its way. The resident step's activations are those of its compile, where there is
one; a layered step's are counted here and noted as counted.
"""

import dataclasses
import logging
from collections.abc import Iterable

import jax
import rich.box
import rich.table

from jaxthru.config import RunConfig
from jaxthru.models import flops
from jaxthru.optim.formats import FORMATS
from jaxthru.plan.memory import MemoryPlan, Room, gib, host_room
from jaxthru.profile.memory import CATEGORIES
from jaxthru.runtime import distributed, xla
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.mesh import MeshConfig
from jaxthru.training.offload import AHEAD, OffloadConfig

log = logging.getLogger("jaxthru")

LEVELS = ("none", "optimizer", "gradients", "parameters")

BY_PRECISION = (
    *("float32", "split_master_float32", "bfloat16", "split_master"),
    *("int8", "split_master_int8", "stochastic_rounding"),
)
"""Formats, the one nearest to float32 first: of two that cost the same, the first is proposed."""

LOSS_CHUNK = 2048  # tokens whose logits exist at once in linear_cross_entropy


@dataclasses.dataclass(frozen=True)
class Proposal:
    """moved: bytes over PCIe a step, both directions together."""

    level: str
    state: str
    fraction: float
    plan: MemoryPlan
    moved: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Parameters of a layer's matrices, of each table (embedding, output matrix), and of what is no matrix;
    tokens of a step and of a micro-batch on one device. shards: devices that the state is split over."""

    layers: int
    layer: int
    tables: tuple[int, ...]
    small: int
    tokens: int
    part: int
    shards: int = 1

    @classmethod
    def of(cls, config: RunConfig, devices: int = 1) -> "Sizes":
        shape, train = config.model, config.train
        table = shape.vocabulary * shape.embed
        tables = (table,) if shape.tied_embeddings else (table, table)
        layer = (flops.matmul_parameters(shape) - table) // shape.layers
        matrices = layer * shape.layers + sum(tables)
        data, fsdp, tensor = config.mesh.shape(devices)
        tokens = train.rows * config.data.sequence // (data * fsdp)
        small = flops.parameters(shape) - matrices
        return cls(shape.layers, layer, tables, small, tokens, tokens // train.microbatches, fsdp * tensor)

    @property
    def matrices(self) -> int:
        return self.layers * self.layer + sum(self.tables)

    def parts(self) -> list[int]:
        """Parameters of the matrices of what is fetched and updated at once, in the order of the forward
        pass."""
        head = self.tables[1] if len(self.tables) > 1 else 0
        return [self.tables[0], *(self.layer,) * self.layers, head]


def estimate(
    config: RunConfig,
    level: str,
    state: str,
    fraction: float = 1.0,
    *,
    resident: MemoryPlan | None = None,
    devices: int = 1,
) -> tuple[MemoryPlan, int]:
    """Returns the memory that a level needs, and the bytes that it moves over PCIe a step.

    state: the format, as `optim.state` names it. fraction: share of the parts that are on the host. resident:
    of the configuration's own step without offload, compiled; its transients are taken for level "none".
    """
    sizes, shape, activations = Sizes.of(config, devices), config.model, config.offload.activations
    format = FORMATS[state]
    weights, *kept = format.bytes_per_parameter()
    kept = sum(kept)
    P, small = sizes.matrices / sizes.shards, 12 * sizes.small / sizes.shards
    device, host = dict.fromkeys(CATEGORIES, 0.0), dict.fromkeys(CATEGORIES, 0.0)
    device["parameters"], device["optimizer"] = weights * P + small / 3, kept * P + small * 2 / 3
    if level == "none" and activations == "none":
        own = _transients(config, sizes) if resident is None else resident.device
        device |= {name: size for name, size in own.items() if name not in ("parameters", "optimizer")}
        return _plan(device, host, ("the transients are those of the resident step",)), 0

    chosen = OffloadConfig(level, fraction or 1.0).on_host(len(sizes.parts()))
    parts = [size / sizes.shards for size in sizes.parts()]
    hosted = [size for size, there in zip(parts, chosen, strict=True) if there]
    away, layer, largest = sum(hosted), sizes.layer / sizes.shards, max(parts)
    sent = kept + weights * (level == "parameters")
    device["optimizer"] -= kept * away
    host["optimizer"] = kept * away
    moved = 2 * kept * away
    if level == "parameters":
        device["parameters"] -= weights * away
        host["parameters"] = weights * away
        moved += 3 * weights * away  # forward, backward, and stored after the update
    # On its way at once. On the host: what is being stored, beside what it replaces.
    host["staging"] = sent * min(max(hosted, default=0) + AHEAD * layer, away)
    staging = sent * min(max(hosted, default=0) + (AHEAD + 1) * layer, away)

    D, M, H, K, C = shape.embed, shape.mlp, shape.heads, shape.kv_heads, shape.head_dim
    inputs, names = 2 * D * sizes.tokens, _kept(config) * sizes.tokens
    gone = inputs * (activations != "none") + names * (activations == "names")
    host["activations"], moved = gone * sizes.layers, moved + 2 * gone * sizes.layers
    near = inputs + names - gone
    stack = near * sizes.layers + gone * min(AHEAD + 1, sizes.layers)
    # One layer's work: its input, output and their gradients, and what the backward pass makes again.
    work = 3 * inputs + 2 * sizes.part * (6 * D + 4 * (H + K) * C + 6 * M)
    work += 2 * layer * (weights > 2)  # its weights in the compute dtype
    one = 2 * layer + 4 * layer * (config.train.microbatches > 1)  # summed in float32
    table = 4 * max(sizes.tables) / sizes.shards
    tied = table * (len(sizes.tables) == 1)  # as output matrix, until the embedding's gradient is there
    logits = 4 * LOSS_CHUNK * shape.vocabulary + table / 2
    update = 8 * largest * (format.moments == "int8")  # both moments in float32
    exact = config.optim.clip_rule == "exact"
    moments = [  # that may be the fullest
        {"activations": stack + inputs, "loss": logits, "gradients": table},
        {"activations": stack + work, "gradients": one + (table if exact else tied)},
    ]
    if exact:
        gradients = [table * (size > 0) for size in parts]
        gradients[1:-1] = [2 * layer] * sizes.layers
        if level in ("gradients", "parameters"):
            there = sum(size for size, out in zip(gradients, chosen, strict=True) if out)
            host["gradients"], moved = there, moved + 2 * there
            moments[1]["staging"] = weights * (level == "parameters") * (AHEAD + 1) * layer
            moments[1]["staging"] += 2 * layer * AHEAD
        else:
            there = 0
        left = sum(gradients) - there
        moments.append({"activations": work, "gradients": left})
        moments.append(
            {"optimizer": update, "gradients": left + there / max(sum(chosen), 1), "staging": staging}
        )
    else:
        moments[1]["staging"] = staging
        moments.append(
            {"activations": stack + inputs, "gradients": table, "optimizer": update, "staging": staging}
        )
    for name, size in max(moments, key=lambda moment: sum(moment.values())).items():
        device[name] += size
    return _plan(device, host, ("of the layered step: by arithmetic, not compiled",), devices), round(moved)


def pinned(config: RunConfig) -> int:
    """Returns the bytes that this process will keep in pinned host memory, by arithmetic. 0 where that is not
    known before devices are: with level auto, several processes, or an unknown number of replicas."""
    offload, replicas = config.offload, config.mesh.data
    if offload.level == "auto" or replicas == -1 or jax.distributed.is_initialized():
        return 0
    alone = dataclasses.replace(config, mesh=MeshConfig())
    plan, _ = estimate(alone, offload.level, config.optim.state, offload.fraction)
    return replicas * plan.peak_host


def ready(config: RunConfig) -> RunConfig:
    """Returns a configuration as this machine is to run it, and has XLA pin what it needs. Call it before
    the first device is touched. Raises InputError."""
    if config.offload.layered:
        xla.limit_pinned(pinned(config), host_room(config))
    return resolve_here(config)


def _kept(config: RunConfig) -> int:
    """Returns the bytes per token that remat.policy keeps of a layer beside its input."""
    shape = config.model
    D, M, H, K, C = shape.embed, shape.mlp, shape.heads, shape.kv_heads, shape.head_dim
    attention = 2 * (2 * H + 2 * K) * C + 4 * H + 2 * D
    kept = {"full": 0, "attention": attention, "gate": attention + 2 * M, "projections": attention + 4 * M}
    return kept.get(config.remat.policy, attention + 6 * M + 6 * D)


def _transients(config: RunConfig, sizes: Sizes) -> dict[str, float]:
    """Returns what a resident step needs besides its state, by arithmetic: at the loss, or after the backward
    pass, whichever is more."""
    shape = config.model
    D, M = shape.embed, shape.mlp
    activations = (2 * D + _kept(config)) * sizes.layers * sizes.part
    table = sizes.tables[-1] / sizes.shards
    loss = 2 * table + 4 * LOSS_CHUNK * shape.vocabulary
    tables = 4 * sum(sizes.tables) / sizes.shards
    gradients = 2 * sizes.layers * sizes.layer / sizes.shards + tables
    work = 2 * sizes.part * (4 * D + 4 * M)
    if config.train.microbatches > 1:
        # Sums in float32, which XLA makes anew for each micro-batch beside those so far.
        sums = 8 * sizes.matrices / sizes.shards
        return {"activations": activations + work, "gradients": sums}
    if activations + loss + 4 * table >= gradients + work:
        return {"activations": activations, "loss": loss, "gradients": 4 * table}
    return {"activations": work, "gradients": gradients}


def _plan(device: dict, host: dict, notes: tuple[str, ...], devices: int = 1) -> MemoryPlan:
    device = {name: round(value) for name, value in device.items()}
    host = {name: round(value * devices) for name, value in host.items()}
    return MemoryPlan(device, host, sum(device.values()), sum(host.values()), notes)


def propose(
    config: RunConfig,
    room: Room,
    *,
    formats: Iterable[str] = FORMATS,
    resident: MemoryPlan | None = None,
    devices: int = 1,
) -> list[Proposal]:
    """Returns for each format the level and fraction that fit and move the least, the cheapest format first.

    formats: of those that `optim.state` may be. One that fits at no level is left out.
    """
    found = []
    for state in formats:
        fitting = [_least(config, level, state, room, resident, devices) for level in LEVELS]
        fitting = [proposal for proposal in fitting if proposal]
        if fitting:
            found.append(min(fitting, key=lambda proposal: (proposal.moved, LEVELS.index(proposal.level))))
    return sorted(found, key=lambda proposal: (proposal.moved, BY_PRECISION.index(proposal.state)))


def _least(config, level, state, room, resident=None, devices=1) -> Proposal | None:
    """Returns a level with the least fraction that fits, if any does."""
    count = config.model.layers + 2  # embedding and head are parts too
    steps = (0,) if level == "none" else range(1, count + 1)
    for fraction in (step / count for step in steps):
        plan, moved = estimate(config, level, state, fraction, resident=resident, devices=devices)
        if room.holds(plan):
            return Proposal(level, state, fraction, plan, moved)
    return None


def resolve_here(config: RunConfig) -> RunConfig:
    """Returns what `resolve` does for this process's devices and host, the same in all processes."""
    if config.offload.level != "auto":
        return config
    host = host_room(config)
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", host)  # a CPU's is the host's
    found = distributed.from_first(
        lambda: dataclasses.asdict(resolve(config, Room(memory, host), jax.device_count()).offload)
    )
    log.info("offload.level = auto: %s, offload.fraction = %g", found["level"], found["fraction"])
    return dataclasses.replace(config, offload=OffloadConfig(**found))


def resolve(config: RunConfig, room: Room, devices: int = 1) -> RunConfig:
    """Returns a configuration with `offload.level = "auto"` replaced by the first level that fits, with the
    least fraction, by arithmetic; any other as it is.

    Raises InputError, with what is short, where none fits.
    """
    if config.offload.level != "auto":
        return config
    room = dataclasses.replace(room, device=round(room.device * CERTAIN))
    fits = (_least(config, level, config.optim.state, room, devices=devices) for level in LEVELS)
    first = next((proposal for proposal in fits if proposal), None)
    if first is None:
        most, _ = estimate(config, LEVELS[-1], config.optim.state, devices=devices)
        others = [proposal.state for proposal in propose(config, room, devices=devices)]
        advice = f"optim.state = {' or '.join(map(repr, others))} fits" if others else "no optim.state fits"
        raise InputError(
            f"offload.level = 'auto': no level fits with optim.state = {config.optim.state!r}; with all on "
            f"the host it needs {gib(most.peak_device)} GiB on the device, of {gib(room.device)}, and "
            f"{gib(most.peak_host)} on the host, of {gib(room.host)}; {advice}"
        )
    fraction = first.fraction or 1.0
    offload = dataclasses.replace(config.offload, level=first.level, fraction=fraction)
    return dataclasses.replace(config, offload=offload)


CERTAIN = 0.95
"""Share of the device that a plan by arithmetic may fill."""


PCIE = 87e9  # bytes/s of both directions together, fetched, updated and stored (H200, PCIe Gen5)


def table(proposals: list[Proposal]) -> rich.table.Table:
    """Returns what was proposed, the cheapest first."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for column in ("optim.state", "offload.level"):
        table.add_column(column, no_wrap=True)
    for column in ("fraction", "device\nGiB", "host\nGiB", "moved\nGB", "PCIe\nseconds"):
        table.add_column(column, justify="right")
    for found in proposals:
        table.add_row(
            found.state,
            found.level,
            f"{found.fraction:.2f}",
            gib(found.plan.peak_device),
            gib(found.plan.peak_host),
            f"{found.moved / 1e9:,.0f}",
            f"{found.moved / PCIE:.2f}",
        )
    return table
