"""What memory a configuration needs, before anything is compiled and before any device is touched.

The account is that of `plan memory`: a dispatched step is rehearsed (engine/rehearsed.py), here on a mesh of
no devices. What its programs need beside their arguments comes from formulas in place of their compiles, and
so does all that a resident step needs beside its state.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from jaxthru.build.checks import attention_by
from jaxthru.build.step import Assembled, assemble
from jaxthru.config import RunConfig
from jaxthru.engine import programs
from jaxthru.engine.model import parts
from jaxthru.engine.offload import OffloadConfig, on_device, placed
from jaxthru.engine.rehearsed import Moment, shard_size
from jaxthru.models import scopes
from jaxthru.models.remat import kept_bytes
from jaxthru.optim.formats import FORMATS
from jaxthru.profile.read.buffers import CATEGORIES, Breakdown
from jaxthru.runtime import hardware
from jaxthru.runtime.sharding import Layout
from pallas_kernels import dispatch
from pallas_kernels.attention import STAND_IN


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


LOSS_CHUNK = 2048
"""Tokens whose logits exist at once in linear_cross_entropy."""

WORK = 1.5
"""Numbers that a block's backward pass has at once for each that it could keep: what it makes again, and
gradients on their way through it."""


def estimate(
    config: RunConfig, *, resident: MemoryPlan | None = None, devices: int = 1
) -> tuple[MemoryPlan, int]:
    """Returns the memory that a configuration needs, and the bytes that a device moves over PCIe a step.

    resident: of the configuration's own step without offload, compiled; its transients are taken for level
    `none`.
    """
    if not config.offload.layered:
        made, _ = _assembled(config, devices)
        return _resident(made, Sizes.of(made), resident), 0
    # The host runs layer after layer, see `checks.fit`.
    policy = "projections" if config.remat.policy == "none" else config.remat.policy
    base = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, loop="unroll"),
        remat=dataclasses.replace(config.remat, policy=policy, keep_parameters=False),
        offload=OffloadConfig(),
    )
    made, trace = _assembled(base, devices)
    made = dataclasses.replace(made, offload=config.offload, abstract=placed(made.abstract, config.offload))
    sizes, int8 = Sizes.of(made), FORMATS[config.optim.state].moments == "int8"

    def needs(name: str, _: Any) -> Breakdown:
        kind, device = scopes.program_of(name), dict.fromkeys(CATEGORIES, 0)
        if kind == scopes.LOSS_HEAD:
            device |= {"loss": sizes.logits + sizes.item * sizes.table, "gradients": 4 * sizes.table}
        elif kind == scopes.BACKWARD:
            # Input, output and gradients of all micro-batches, and weights as products take them.
            passing = 3 * sizes.stream * made.step.microbatches
            device["activations"] = sizes.work + passing + sizes.gathered // len(made.step.model.chain.layers)
            device["gradients"] = sizes.layer * (sizes.item + 4 * (made.step.microbatches > 1))
        elif kind == scopes.EMBED_BACKWARD:
            device["gradients"] = 4 * sizes.table
        elif kind in scopes.UPDATES and int8 and devices > 1:
            # Both moments in float32, where XLA partitions the update; on one device it goes slab by slab.
            device["optimizer"] = 8 * (sizes.layer if kind == scopes.UPDATE_LAYER else sizes.table)
        return Breakdown(device, dict.fromkeys(CATEGORIES, 0), sum(device.values()), 0, "")

    with dispatch.assumed("cpu"):
        found = made.rehearsed(needs, trace)
    return fullest(found.moments, ("of the dispatched step: estimated, not compiled",)), found.moved


@functools.lru_cache(maxsize=16)
def _assembled(config: RunConfig, devices: int) -> tuple[Assembled, Callable]:
    """Returns the step on a mesh of no devices, and `programs.trace` that remembers what it has traced."""
    shape = config.mesh.shape(devices)
    layout = Layout(AbstractMesh((*shape.values(),), (*shape,), axis_types=(AxisType.Auto,) * len(shape)))
    attention = attention_by(config, "gpu")
    attention = STAND_IN.get("triton" if attention == "auto" else attention, attention)
    made = assemble(config, layout, segments=1, sources=1, attention=attention)
    # No devices, no memory kind that they would have by default.
    abstract = programs.placed(made.abstract, on_device(made.abstract))
    made = dataclasses.replace(made, abstract=abstract)
    known: dict[str, jax.stages.Traced] = {}

    def trace(name: str, *arguments, **settings) -> jax.stages.Traced:
        if name not in known:
            known[name] = programs.trace(name, *arguments, **settings)
        return known[name]

    return made, trace


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the formulas go by, on one device. layer, layers, tables: parameters of the largest layer (where
    layers are unrolled), of all, and of embedding and head, as the state is split. table: of the larger of
    these. item: bytes of a number in the compute dtype. stream: bytes of a block's input. kept: of what all
    blocks keep. work: of what one block's backward pass has beside that. logits: of those of a chunk.
    gathered: of all layers' weights as products take them, where that is not as they are stored."""

    layer: int
    layers: int
    table: int
    tables: int
    item: int
    stream: int
    kept: int
    work: int
    logits: int
    gathered: int

    @classmethod
    def of(cls, made: Assembled) -> "Sizes":
        model, micro = made.step.model, made.step.microbatches
        mesh, chain, item = model.ops.layout.mesh, model.chain, jnp.dtype(model.ops.compute).itemsize
        params = parts(made.abstract["params"])
        embedding, head, *layers = map(_on_a_device, params)
        # Along `tensor` a device has all tokens of a part of the heads and of the feed-forward's width.
        tokens = made.batch["tokens"].size // mesh.size // micro
        dims = dict(chain.dims)
        kept = [kept_bytes(stage.kept, model.policy, item) for stage in chain.layers]
        widest = max(sum(stage.kept.values()) for stage in chain.layers)
        stored = max(jax.tree.leaves(params), key=lambda leaf: leaf.size).dtype  # of a matrix
        cast = mesh.shape["fsdp"] > 1 or stored.itemsize != item
        return cls(
            layer=max(layers),
            layers=sum(layers),
            table=max(embedding, head),
            tables=embedding + head,
            item=item,
            stream=item * dims["embed"] * tokens,
            kept=sum(kept) * tokens,
            work=round(WORK * item * widest * tokens),
            logits=4 * LOSS_CHUNK * dims["vocab"],
            gathered=item * sum(layers) * mesh.shape["fsdp"] if cast else 0,
        )


def _on_a_device(tree: Any) -> int:
    """Returns how many numbers of an abstract tree are on one device."""
    return sum(shard_size(leaf.shape, leaf.sharding) for leaf in jax.tree.leaves(tree))


def _resident(made: Assembled, sizes: Sizes, compiled: MemoryPlan | None) -> MemoryPlan:
    """Returns the memory of a step that is one program: its state, and what else it needs at the loss or
    after the backward pass, whichever is more."""
    model, state = made.step.model, dict.fromkeys(CATEGORIES, 0)
    for name, key in (("parameters", "params"), ("optimizer", "opt_state")):
        leaves = jax.tree.leaves(made.abstract[key])
        state[name] = sum(leaf.dtype.itemsize * shard_size(leaf.shape, leaf.sharding) for leaf in leaves)
    count = len(model.chain.layers)
    activations = sizes.stream * count + sizes.kept
    if model.ops.keep_parameters or model.policy == "none":
        activations += sizes.gathered
    loss = {"activations": activations, "loss": sizes.item * sizes.table + sizes.logits}
    loss["gradients"] = 4 * sizes.table
    of_layers = sizes.item * sizes.layers
    backward = {"activations": sizes.work, "gradients": of_layers + 4 * sizes.tables}
    if made.step.microbatches > 1:
        # Sums in float32, to which unrolled layers add one after another; of scanned ones all gradients come
        # first.
        sums = 4 * (sizes.layers + sizes.tables + sizes.table) + of_layers * (model.loop == "scan")
        loss = backward = {"activations": activations + sizes.work, "gradients": sums}
    more = max(loss, backward, key=lambda moment: sum(moment.values()))
    if compiled is not None:
        more = {name: size for name, size in compiled.device.items() if not state[name]}
    device, host = state | more, dict.fromkeys(CATEGORIES, 0)
    return MemoryPlan(
        device, host, sum(device.values()), 0, ("the transients are those of the resident step",)
    )


def fullest(moments: Iterable[Moment], notes: tuple[str, ...] = ()) -> MemoryPlan:
    """Returns the memory of a step of several programs: that of the moment which needs the most."""

    def total(moment: Moment) -> int:
        return moment.program.peak_device + sum(moment.beside.values())

    moments = list(moments)
    most = max(moments, key=total)
    host = max(moments, key=lambda moment: moment.program.peak_host + sum(moment.host.values()))
    device = {name: most.program.device[name] + most.beside.get(name, 0) for name in CATEGORIES}
    on_host = {name: host.program.host[name] + host.host.get(name, 0) for name in CATEGORIES}
    notes += (f"the peak is in {most.name}",)
    return MemoryPlan(device, on_host, sum(device.values()), sum(on_host.values()), notes)
