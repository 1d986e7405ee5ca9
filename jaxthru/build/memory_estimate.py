"""What a level of offload needs, by arithmetic: before anything is compiled.

Bytes per parameter of each format (`optim.formats`), where each level keeps them, and what is on its way. The
resident step's activations are those of its compile, where there is one; a layered step's are counted here
and noted as counted.
"""

import dataclasses
import math

from jaxthru.config import RunConfig
from jaxthru.engine.offload import AHEAD, OffloadConfig
from jaxthru.models import llama
from jaxthru.optim.formats import FORMATS
from jaxthru.profile.read.buffers import CATEGORIES
from jaxthru.runtime import hardware


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes by category (`profile.read.buffers`): on one device, at the moment when it needs the most, and on
    the host, of all its devices. Each adds up to its peak."""

    device: dict[str, int]
    host: dict[str, int]
    peak_device: int
    peak_host: int
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Room:
    """Bytes that a plan may take on a device and on the host. said: where the two come from."""

    device: int
    host: int
    said: tuple[str, ...] = ()

    def holds(self, plan: MemoryPlan) -> bool:
        """Says whether a plan fits."""
        return plan.peak_device <= self.device and plan.peak_host <= self.host

    def lacks(self, plan: MemoryPlan) -> list[str]:
        """Returns what a plan has too little of, a line each that names the setting."""
        short = []
        if plan.peak_device > self.device:
            short.append(
                f"does not fit: {gib(plan.peak_device)} GiB on the device, which has {gib(self.device)}; "
                "more micro-batches, remat.policy or offload.level make it less"
            )
        if plan.peak_host > self.host:
            short.append(
                f"does not fit: {gib(plan.peak_host)} GiB on the host, which may pin "
                f"{gib(self.host)} (offload.host_gib); optim.state or a smaller offload.fraction makes it "
                "less"
            )
        return short


PROCESS = 8 << 30
"""Bytes of host memory that a process takes beside what it pins: 6 to 7 GiB with CUDA and XLA on an H200."""


def host_room(config: RunConfig) -> int:
    """Returns the bytes that a configuration may pin on this host."""
    given = config.offload.host_gib
    if given:
        return round(given * 2**30)
    limit = hardware.host_limit_bytes()
    return limit - min(PROCESS, limit // 2)


def gib(size: float) -> str:
    """Returns bytes in GiB, as text."""
    return f"{size / 2**30:,.1f}"


LOSS_CHUNK = 2048  # tokens whose logits exist at once in linear_cross_entropy


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Parameters of a layer's matrices, of each table (embedding, output matrix), and of what is no matrix;
    tokens of a step and of a micro-batch on one device, which along `tensor` has all tokens of a part of the
    heads and of mlp. shards: devices that the state is split over; tensor: that a gathered layer is."""

    layers: int
    layer: int
    tables: tuple[int, ...]
    small: int
    tokens: int
    part: int
    shards: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, config: RunConfig, devices: int = 1) -> "Sizes":
        shape, train = config.model, config.train
        table = shape.vocabulary * shape.embed
        tables = (table,) if shape.tied_embeddings else (table, table)
        layer = (llama.matmul_parameters(shape) - table) // shape.layers
        matrices = layer * shape.layers + sum(tables)
        mesh = config.mesh.shape(devices)
        tokens = train.rows * config.data.sequence // math.prod(mesh.values())
        tensor = mesh["tensor"]
        small = llama.parameters(shape) - matrices
        part = tokens // train.microbatches
        return cls(shape.layers, layer, tables, small, tokens, part, mesh["fsdp"] * tensor, tensor)

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
    there = [size * out for size, out in zip(parts, chosen, strict=True)]
    away, layer, largest = sum(there), sizes.layer / sizes.shards, max(parts)
    sent = kept + weights * (level == "parameters")
    exact = config.optim.clip_rule == "exact"
    device["optimizer"] -= kept * away
    host["optimizer"] = kept * away
    moved = 2 * kept * away
    if level == "parameters":
        device["parameters"] -= weights * away
        host["parameters"] = weights * away
        moved += 3 * weights * away  # forward, backward, and stored after the update

    # On its way at once, in either direction: AHEAD parts (those that stay count), beside the one in use if
    # they are fetched, or staging_gib if that is more: see `Fetched` and `Stores`. Weights are fetched by the
    # first rule alone.
    limit = config.offload.staging_gib * 2**30 / sizes.shards

    def fetched(order: list[float]) -> float:
        near = _most(order, AHEAD + 1)
        return min(max(kept * near, limit), kept * away) + (sent - kept) * near

    def stored(order: list[float]) -> float:
        return min(max(sent * _most(order, AHEAD), limit), sent * away)

    def both(coming: list[float], going: list[float]) -> float:
        return min(fetched(coming) + stored(going), sent * away)

    # On the host: what is being stored, beside what it replaces. Exact clipping's updates are not paced by a
    # backward pass: then the last part's store begins with the others that may be on their way.
    storing = max(sent * _most(there, AHEAD + 1), limit + sent * there[-1] * exact)
    host["staging"] = min(storing, sent * away)

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
    loss = {"activations": stack + inputs, "loss": 4 * LOSS_CHUNK * shape.vocabulary + table / 2}
    loss["gradients"] = table
    backward = {"activations": stack + work, "gradients": one + (table if exact else tied)}
    # Both moments in float32, where XLA partitions the update; on one device it goes slab by slab.
    update = 8 * largest * (format.moments == "int8" and devices > 1)
    moments = [loss, backward]  # that may be the fullest
    if exact:
        # The first parts' slots come before the head's program, while the last parts are stored, and stay.
        ahead = fetched(there[: AHEAD + 1])
        loss["staging"] = both(there[: AHEAD + 1], there[-AHEAD:])
        backward["staging"] = both(there[: AHEAD + 1], there[-1:])
        gradients = [table * (size > 0) for size in parts]
        gradients[1:-1] = [2 * layer] * sizes.layers
        held = [size * out * (level != "optimizer") for size, out in zip(gradients, chosen, strict=True)]
        host["gradients"], moved = sum(held), moved + 2 * sum(held)
        backward["staging"] += _most(held[1:-1], AHEAD)
        left = sum(gradients) - sum(held)
        end = {"activations": work, "gradients": left, "staging": ahead + _most(held[1:-1], AHEAD)}
        coming = _most(held, AHEAD + 1)
        begun = {"activations": inputs, "gradients": left, "optimizer": update}
        begun["staging"] = fetched(there[: AHEAD + 1]) + coming
        after = {"activations": inputs, "gradients": left - (gradients[0] - held[0])}
        after |= {"optimizer": update * layer / largest, "staging": both(there, there) + coming}
        done = {"activations": stack + inputs, "gradients": table, "optimizer": update}
        done["staging"] = both(there[-AHEAD - 1 :], there[-AHEAD - 1 : -1])
        moments += [end, begun, after, done]
    else:
        loss["staging"] = fetched(there[-AHEAD - 1 :])
        backward["staging"] = both(there[1:-1], there)
        updated = {"gradients": table, "optimizer": update}
        head = {"activations": stack + inputs, "staging": loss["staging"]}
        embedding = {"activations": inputs, "staging": both(there[: AHEAD + 1], there[1:-1])}
        moments += [head | updated, embedding | updated]
    for name, size in max(moments, key=lambda moment: sum(moment.values())).items():
        device[name] += size
    return _plan(device, host, ("of the layered step: by arithmetic, not compiled",), devices), round(moved)


def _most(parts: list[float], count: int) -> float:
    """Returns the largest sum of so many neighbours."""
    return max((sum(parts[i : i + count]) for i in range(len(parts))), default=0.0)


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
    if config.remat.keep_parameters or config.remat.policy == "none":
        activations += 2 * sizes.layers * sizes.layer / sizes.tensor
    table = sizes.tables[-1] / sizes.shards
    loss = 2 * table + 4 * LOSS_CHUNK * shape.vocabulary
    tables = 4 * sum(sizes.tables) / sizes.shards
    gradients = 2 * sizes.layers * sizes.layer / sizes.shards + tables
    work = 2 * sizes.part * (8 * D + 6 * M)
    if config.train.microbatches > 1:
        # Sums in float32, to which unrolled layers add one after another; of scanned ones all gradients come
        # first.
        sums, new = 4 * sizes.matrices / sizes.shards, 4 * table
        if shape.loop == "scan":
            new += 2 * sizes.layers * sizes.layer / sizes.shards
        return {"activations": activations + work, "gradients": sums + new}
    if activations + loss + 4 * table >= gradients + work:
        return {"activations": activations, "loss": loss, "gradients": 4 * table}
    return {"activations": work, "gradients": gradients}


def _plan(device: dict, host: dict, notes: tuple[str, ...], devices: int = 1) -> MemoryPlan:
    device = {name: round(value) for name, value in device.items()}
    host = {name: round(value * devices) for name, value in host.items()}
    return MemoryPlan(device, host, sum(device.values()), sum(host.values()), notes)
