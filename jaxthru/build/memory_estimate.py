"""What memory a configuration needs, before anything is compiled and before any device is touched.

The account is that of `plan memory`: a dispatched step is rehearsed (engine/rehearsed.py), here on a mesh of
no devices. What its programs need beside their arguments comes from formulas in place of their compiles, and
so does all that a resident step needs beside its state.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jaxthru.build.defaults import plain, replaced
from jaxthru.build.memory_sizes import (
    Sizes,
    loops,
    stacked,
    update_in_8_bits,
)
from jaxthru.build.stand_ins import attention_stand_in, stand_ins, without_triton
from jaxthru.build.step import Assembled, assemble
from jaxthru.config import RunConfig
from jaxthru.engine import programs
from jaxthru.engine.gradients import gradient_dtype
from jaxthru.engine.memory_tally import Moment, shard_size
from jaxthru.engine.offload import OffloadConfig, on_device
from jaxthru.engine.rehearsed import Rehearsals
from jaxthru.models import scopes
from jaxthru.optim.optimizer import OptimConfig
from jaxthru.profile.read.buffers import CATEGORIES, Breakdown
from jaxthru.runtime import hardware, pinned
from jaxthru.runtime.sharding import Layout
from jaxthru.runtime.weights import WeightInfo
from pallas_kernels import dispatch


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes by category (`profile.read.buffers`): on one device, at the moment when it needs the most, and on
    the host, of all its devices. Each adds up to its peak."""

    device: dict[str, int]
    host: dict[str, int]
    peak_device: int
    peak_host: int
    notes: tuple[str, ...] = ()

    def scaled(self, times: float) -> "MemoryPlan":
        """Returns it with so many times the bytes on the device; what is more is `other`."""
        more = round((times - 1) * self.peak_device)
        device = self.device | {"other": self.device["other"] + more}
        return dataclasses.replace(self, device=device, peak_device=self.peak_device + more)


FULL = 0.97
"""Share of memory that a plan may fill: of a device's, with a step of several programs with the gaps between
its arrays; of the host's, where gaps are not counted."""


@dataclasses.dataclass(frozen=True)
class Room:
    """Bytes that a plan may take on a device and on the host. said: where the two come from."""

    device: int
    host: int
    said: tuple[str, ...] = ()

    @property
    def full(self) -> "Room":
        """What a plan may fill, and beyond which it does not fit."""
        return dataclasses.replace(self, device=round(FULL * self.device), host=round(FULL * self.host))

    def holds(self, plan: MemoryPlan) -> bool:
        """Says whether a plan fits."""
        return plan.peak_device <= self.device and plan.peak_host <= self.host

    def shortfall(self, plan: MemoryPlan) -> list[str]:
        """Returns the shortfall of a plan, a line for the device and one for the host, each with the settings
        to change."""
        short = []
        if plan.peak_device > self.device:
            short.append(
                f"does not fit: {gib(plan.peak_device)} GiB on the device, which has {gib(self.device)}; "
                "more micro-batches, remat.policy, offload.level, offload.prefetch = 0 or mesh.expert_chunks "
                "make it less"
            )
        if plan.peak_host > self.host:
            short.append(
                f"does not fit: {gib(plan.peak_host)} GiB on the host, of which it may fill {gib(self.host)} "
                f"({FULL:.0%} of offload.host_gib); optim.state, offload.prefetch = 0 or a smaller "
                "offload.fraction makes it less"
            )
        return short


PROCESS = 12 << 30
"""Bytes of host memory that a process takes beside what it pins: 7 GiB with CUDA and XLA on an H200, what a
save comes to, and what the system wants to have free."""


def host_room(config: RunConfig) -> int:
    """Returns the bytes that a configuration may pin on this host."""
    given = config.offload.host_gib
    if given:
        return round(given * 2**30)
    limit = hardware.host_limit_bytes()
    return round((limit - min(PROCESS, limit // 2)) / pinned.COST)


def gib(size: float) -> str:
    """Returns bytes in GiB, as text."""
    return f"{size / 2**30:,.1f}"


def estimate(
    config: RunConfig,
    *,
    resident: MemoryPlan | None = None,
    devices: int = 1,
    segments: int = 1,
    memory: int = 0,
) -> tuple[MemoryPlan, int]:
    """Returns the memory that a configuration needs, and the bytes that a device moves over PCIe a step.

    resident: of the configuration's own step without offload, compiled; its transients are taken for level
    `none`. segments: most documents in a row, by which cuDNN's attention sizes its workspace. memory: of a
    device, as of `Rehearsals`; 0 leaves gaps between arrays out.
    """
    config = plain(config)
    if not config.offload.layered:
        made, workspace = _assembled(config, devices, segments)
        return _resident(made, Sizes.of(made, workspace, _stacked(config, devices, segments)), resident), 0
    return _rehearsed(config, devices, segments, memory)


@functools.lru_cache(maxsize=256)
def _rehearsed(config: RunConfig, devices: int, segments: int, memory: int) -> tuple[MemoryPlan, int]:
    """Returns `estimate` of a step of several programs. Remembered: a search asks for the same
    fractions again when it looks at another room, or at all formats after its own."""
    # The host runs layer after layer, see `checks.validate`.
    policy = "projections" if config.remat.policy == "none" else config.remat.policy
    base = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, loop="unroll"),
        remat=dataclasses.replace(config.remat, policy=policy, keep_parameters=False),
        offload=dataclasses.replace(config.offload, level="parameters", fraction=1.0),
    )
    with dispatch.assumed("cpu"):
        found = _rehearsals(base, devices, segments)(config.offload, memory)
    note = "of the dispatched step: estimated, not compiled"
    return fullest(found.moments, (note,), found.needs), found.moved


@functools.lru_cache(maxsize=16)
def _rehearsals(config: RunConfig, devices: int, segments: int) -> Rehearsals:
    """Returns the dispatched step of a configuration, whose programs need what formulas say. config: of any
    level and fraction."""
    made, workspace = _assembled(dataclasses.replace(config, offload=OffloadConfig()), devices, segments)
    made = dataclasses.replace(made, offload=config.offload)
    sizes, int8 = Sizes.of(made, workspace), config.optim.format.moments == "int8"
    updates = update_in_8_bits(made) if int8 and devices > 1 else (0, 0)  # one device goes slab by slab

    def needs(name: str, _: Any) -> Breakdown:
        kind, device = scopes.program_of(name), dict.fromkeys(CATEGORIES, 0)
        if kind == scopes.LOSS_HEAD:
            device |= {"loss": sizes.logits + sizes.item * sizes.table, "gradients": 4 * sizes.table}
        elif kind == scopes.BACKWARD:
            # Input, output and gradients of all micro-batches, and weights as matmuls take them.
            passing = 3 * sizes.stream * made.step.microbatches
            device["activations"] = sizes.at_once + passing + sizes.gathered
            device["gradients"] = sizes.layer * (sizes.item + 4 * (made.step.microbatches > 1))
        elif kind == scopes.EMBED_BACKWARD:
            device["gradients"] = 4 * sizes.table
        elif kind in scopes.UPDATES:
            device["optimizer"] = updates[kind == scopes.UPDATE_LAYER]
        return Breakdown(device, dict.fromkeys(CATEGORIES, 0), sum(device.values()), 0, "")

    return made.rehearsals(needs)


def indispensable(config: RunConfig, devices: int) -> dict[str, int]:
    """Returns the bytes on one device of what exists at once in any step, by category: parameters, optimizer
    and gradients, which wait for their norm. Whatever else a step needs comes on top."""
    layered = config.offload.layered
    made, _ = _assembled(dataclasses.replace(config, offload=OffloadConfig()), devices, 1)
    params, model = made.abstract["params"], made.step.model

    def gradient(info: WeightInfo, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | None:
        return leaf.update(dtype=gradient_dtype(info, model.ops.compute)) if info.trains else None

    gradients = jax.tree.map(gradient, model.weights, params)
    if layered and config.optim.clip_rule != "exact":  # each layer's are used up at once
        gradients = None
    kept = {"parameters": params, "optimizer": made.abstract["opt_state"], "gradients": gradients}
    return {name: _bytes_on_a_device(tree) for name, tree in kept.items()}


def layout_of(config: RunConfig, devices: int) -> Layout:
    """Returns the layout of a configuration on so many devices, none of which need be here."""
    shape = config.mesh.shape(devices)
    return Layout(AbstractMesh((*shape.values(),), (*shape,), axis_types=(AxisType.Auto,) * len(shape)))


@functools.lru_cache(maxsize=16)
def _assembled(config: RunConfig, devices: int, segments: int) -> tuple[Assembled, int]:
    """Returns the step on a mesh of no devices, and the bytes of attention's workspace."""
    layout = layout_of(config, devices)
    attention, workspace = attention_stand_in(config, layout, segments)
    config, _ = without_triton(config)
    of_data = {"segments": segments, "sources": 1}
    made = assemble(config, layout, attention=attention, **of_data, **stand_ins(config))
    # No devices, no memory kind that they would have by default.
    abstract = programs.with_shardings(made.abstract, on_device(made.abstract))
    return dataclasses.replace(made, abstract=abstract), workspace


def _stacked(config: RunConfig, devices: int, segments: int) -> int | None:
    """Returns the bytes of a device that a loop over layers stacks for the backward pass, beside their
    inputs; None where there is no loop."""
    if config.model.loop != "scan":
        return None
    # Neither of these is in a loop over layers.
    of_any = dataclasses.replace(replaced(config, {"train.loss_chunk": "small"}), optim=OptimConfig())
    return _traced_stacks(of_any, devices, segments)


@functools.lru_cache(maxsize=16)
def _traced_stacks(config: RunConfig, devices: int, segments: int) -> int | None:
    made, _ = _assembled(config, devices, segments)
    return stacked(made, segments) if loops(made.step.model) else None


def _bytes_on_a_device(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(leaf.dtype.itemsize * shard_size(leaf.shape, leaf.sharding) for leaf in leaves)


def _resident(made: Assembled, sizes: Sizes, compiled: MemoryPlan | None) -> MemoryPlan:
    """Returns the memory of a step that is one program: its state, and what else it needs in the forward
    pass, at the loss, at the first block of the backward pass or at its last, whichever is the most."""
    model, state = made.step.model, dict.fromkeys(CATEGORIES, 0)
    for name, key in (("parameters", "params"), ("optimizer", "opt_state")):
        state[name] = _bytes_on_a_device(made.abstract[key])
    of_layers, scanned = sizes.item * sizes.layers, loops(model)
    # Weights that come for a block, if not all are kept.
    weights = sizes.gathered if model.ops.layout.mesh.shape["fsdp"] > 1 and model.policy != "none" else 0
    # The LM head's gradient is whole until it is summed over devices; a loop's gradients are one stack.
    first = 4 * sizes.whole + of_layers * scanned
    sums = last = 0
    if made.step.microbatches > 1:
        sums = 4 * (sizes.layers + sizes.tables)  # in float32, from the first micro-batch on
    else:
        last = of_layers + 4 * sizes.tables
    moments = (
        {"activations": sizes.forward + weights, "gradients": sums},
        {
            "activations": sizes.kept,
            "loss": sizes.item * sizes.whole + sizes.logits,
            "gradients": sums + 4 * sizes.whole,
        },
        {"activations": sizes.kept + sizes.first + weights, "gradients": sums + first},
        # A loop is over before the embedding's gradient begins.
        {"activations": 0 if scanned else sizes.at_once + weights, "gradients": sums + last},
    )
    more = max(moments, key=lambda moment: sum(moment.values()))
    if compiled is not None:
        more = {name: size for name, size in compiled.device.items() if not state[name]}
    device, host = state | more, dict.fromkeys(CATEGORIES, 0)
    return MemoryPlan(
        device, host, sum(device.values()), 0, ("the transients are those of the resident step",)
    )


def fullest(moments: Iterable[Moment], notes: tuple[str, ...] = (), needs: int = 0) -> MemoryPlan:
    """Returns the memory of a step of several programs: that of the moment which needs the most. needs: of a
    rehearsal, with the gaps between arrays, which are `other`; 0 where they are not known."""

    def total(moment: Moment) -> int:
        return moment.program.peak_device + sum(moment.beside.values())

    moments = list(moments)
    most = max(moments, key=total)
    host = max(moments, key=lambda moment: moment.program.peak_host + sum(moment.host.values()))
    device = {name: most.program.device[name] + most.beside.get(name, 0) for name in CATEGORIES}
    on_host = {name: host.program.host[name] + host.host.get(name, 0) for name in CATEGORIES}
    device["other"] += max(needs - sum(device.values()), 0)
    notes += (f"the peak is in {most.name}",)
    return MemoryPlan(device, on_host, sum(device.values()), sum(on_host.values()), notes)
