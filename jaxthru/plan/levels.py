"""Which level of offload, which format of the state and which share of the layers: by arithmetic.

It answers before anything is compiled: bytes per parameter of each format (`optim.formats`), where each level
keeps them, and what is on its way. The resident step's activations are those of its compile, where there is
one; a layered step's are counted here and noted as counted.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import rich.box
import rich.table

from jaxthru.config import RunConfig
from jaxthru.models import flops
from jaxthru.plan.memory import MemoryPlan, Room, gib
from jaxthru.profile.memory import CATEGORIES

LEVELS = ("none", "optimizer", "gradients", "parameters")

BY_PRECISION = (
    *("float32", "split_master_float32", "bfloat16", "split_master"),
    *("int8", "split_master_int8", "stochastic_rounding"),
)
"""Formats, the one nearest to float32 first: of two that cost the same, the first is proposed."""

LOSS_CHUNK = 2048  # tokens whose logits exist at once in linear_cross_entropy


class PerParameter(Protocol):
    """Bytes per parameter of a matrix: its weight, and its state (master and moments) beside it."""

    weights: float
    state: float


class Bytes(NamedTuple):
    weights: float
    state: float


SCALE = 4 / 256
"""Bytes per parameter of the float32 scale of a block of 8-bit moments."""

FORMATS: dict[str, PerParameter] = {  # TODO(lead): those of optim/formats.py, `bytes_per_parameter()`
    "float32": Bytes(4, 8),
    "bfloat16": Bytes(4, 4),
    "int8": Bytes(4, 2 + 2 * SCALE),
    "split_master_float32": Bytes(2, 10),
    "split_master": Bytes(2, 6),
    "split_master_int8": Bytes(2, 4 + 2 * SCALE),
    "stochastic_rounding": Bytes(2, 2 + 2 * SCALE),
}


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


def estimate(
    config: RunConfig,
    level: str,
    bytes_of: PerParameter,
    fraction: float = 1.0,
    *,
    resident: MemoryPlan | None = None,
    devices: int = 1,
) -> tuple[MemoryPlan, int]:
    """Returns the memory that a level needs, and the bytes that it moves over PCIe a step.

    bytes_of: of the format of the state. fraction: share of the parts that are on the host. resident: of the
    configuration's own step without offload, compiled; its transients are taken for level "none".
    """
    sizes, shape = Sizes.of(config, devices), config.model
    weights, state = bytes_of.weights, bytes_of.state
    P, small = sizes.matrices / sizes.shards, 12 * sizes.small / sizes.shards
    device, host = dict.fromkeys(CATEGORIES, 0.0), dict.fromkeys(CATEGORIES, 0.0)
    if level == "none":
        if resident is not None:
            device |= resident.device
        else:
            device |= _transients(config, sizes)
        device["parameters"], device["optimizer"] = weights * P + small / 3, state * P + small * 2 / 3
        return _plan(device, host, ("the transients are those of the resident step",)), 0

    exact = config.optim.clip_rule == "exact"
    largest = max(sizes.layer, *sizes.tables) / sizes.shards
    # On its way at once: one part that is updated, the next one fetched, the one before stored.
    passing = min(largest + 2 * sizes.layer / sizes.shards, P) * (fraction > 0)
    away = fraction * P
    device["parameters"], device["optimizer"] = weights * P + small / 3, state * (P - away) + small * 2 / 3
    host["optimizer"], moved = state * away, 2 * state * away
    device["staging"] = state * passing
    if level == "parameters":
        device["parameters"] -= weights * away
        host["parameters"] = weights * away
        device["staging"] += weights * passing
        moved += 3 * weights * away  # forward, backward, and stored after the update
    sums = 4 if config.train.microbatches > 1 else 2  # one part's gradients are summed in float32
    device["gradients"] = sums * largest
    if exact and level == "optimizer":
        device["gradients"] += 2 * P
    elif exact:
        host["gradients"] = 2 * P
        device["staging"] += 2 * largest
        moved += 4 * P
    D, M, H, K, C = shape.embed, shape.mlp, shape.heads, shape.kv_heads, shape.head_dim
    inputs = 2 * D * sizes.tokens * (sizes.layers + 1)
    if getattr(config.offload, "activations", "none") == "inputs":
        host["activations"], moved = inputs, moved + 2 * inputs
        inputs = 3 * 2 * D * sizes.tokens
    work = 2 * sizes.part * (8 * D + 3 * (H + K) * C + 6 * M)
    work += 2 * sizes.layer / sizes.shards * (weights > 2)  # its weights in the compute dtype
    loss = 2 * min(sizes.tables) / sizes.shards * (weights > 2) + 4 * LOSS_CHUNK * shape.vocabulary
    device["activations"] = inputs + (work if work >= loss else 0)
    device["loss"] = 0 if work >= loss else loss
    notes = ("activations of the layered step: by arithmetic, not compiled",)
    return _plan(device, host, notes, devices), round(moved)


def _transients(config: RunConfig, sizes: Sizes) -> dict[str, float]:
    """Returns what a resident step needs besides its state, by arithmetic: at the loss, or after the backward
    pass, whichever is more."""
    shape = config.model
    D, M, H, K, C = shape.embed, shape.mlp, shape.heads, shape.kv_heads, shape.head_dim
    attention = 2 * (2 * H + 2 * K) * C + 4 * H + 2 * D
    kept = {"full": 0, "attention": attention, "gate": attention + 2 * M, "projections": attention + 4 * M}
    by_token = 2 * D + kept.get(config.remat.policy, attention + 6 * M + 6 * D)
    activations = by_token * sizes.layers * sizes.part
    table = sizes.tables[-1] / sizes.shards
    loss = 2 * table + 4 * LOSS_CHUNK * shape.vocabulary
    tables = 4 * sum(sizes.tables) / sizes.shards
    gradients = 2 * sizes.layers * sizes.layer / sizes.shards + tables
    work = 2 * sizes.part * (4 * D + 4 * M)
    if activations + loss + 4 * table >= gradients + work:
        return {"activations": activations, "loss": loss, "gradients": 4 * table}
    return {"activations": work, "gradients": gradients}


def _plan(device: dict, host: dict, notes: tuple[str, ...], devices: int = 1) -> MemoryPlan:
    device = {name: round(value) for name, value in device.items()}
    host = {name: round(value * devices) for name, value in host.items()}
    return MemoryPlan(device, host, sum(device.values()), sum(host.values()), notes)


def propose(
    config: RunConfig,
    formats: Mapping[str, PerParameter],
    room: Room,
    *,
    resident: MemoryPlan | None = None,
    devices: int = 1,
) -> list[Proposal]:
    """Returns for each format the level and fraction that fit and move the least, the cheapest format first.

    formats: {optim.state: bytes per parameter}. One that fits at no level is left out.
    """
    layers = config.model.layers
    found = []
    for name, bytes_of in formats.items():
        fitting = []
        for level in LEVELS:
            steps = (0,) if level == "none" else range(1, layers + 1)
            for count in steps:  # the device's part falls with each layer that goes to the host
                fraction = count / layers
                plan, moved = estimate(config, level, bytes_of, fraction, resident=resident, devices=devices)
                if room.holds(plan):
                    fitting.append(Proposal(level, name, fraction, plan, moved))
                    break
        if fitting:
            found.append(min(fitting, key=lambda proposal: (proposal.moved, LEVELS.index(proposal.level))))
    order = {name: place for place, name in enumerate(BY_PRECISION)}
    return sorted(found, key=lambda proposal: (proposal.moved, order.get(proposal.state, len(order))))


PCIE = 87e9
"""Bytes/s of both directions together, fetched, updated and stored by separate programs (H200, PCIe Gen5)."""


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
