"""What a step of a model takes, wherever it runs: operations, bytes and their sizes, by arithmetic."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxthru.build.defaults import plain
from jaxthru.config import RunConfig
from jaxthru.models import facts, family
from jaxthru.models.layers import PrecisionConfig
from jaxthru.models.remat import BY_ROW, kept_bytes
from jaxthru.models.stage import Chain, Mixture, Stage, distinct
from jaxthru.runtime.errors import require
from jaxthru.runtime.hardware import data_sheet_flops
from jaxthru.runtime.sharding import LOGICAL_AXIS_RULES
from jaxthru.runtime.weights import WeightInfo


class Matrix(NamedTuple):
    """inputs, outputs: its sizes. split: which of them `tensor` splits, or neither. divides: into how many
    parts that goes at most; 0 is any. experts: how many there are of it. top_k: with how many of these each
    token is multiplied."""

    inputs: int
    outputs: int
    split: str
    divides: int = 0
    experts: int = 1
    top_k: int = 1

    @property
    def multiplied(self) -> int:
        """The parameters that a token is multiplied with."""
        return self.top_k * self.inputs * self.outputs


@dataclasses.dataclass(frozen=True)
class Demand:
    """What a step of a model takes, wherever it runs. flops: of its matmuls and attention. matrices: of all
    layers and, last, of the head. parameters: all; blocks: those of the layers' matrices. width: of what is
    passed from layer to layer. item: bytes of a number in the compute dtype. state: bytes of weights and
    optimizer for a parameter. kept: {remat policy: bytes kept of a token}. recomputed: {remat policy: FLOPs
    of a token}. steps: of the run.

    mixture: of experts, None without; mixtures: layers that have one. kept_rows: of `kept`, what lies by row
    of an expert. room: bytes of a token's rows in one layer. chunks: parts in which a layer's tokens go to
    experts on other devices, None as usual over so many."""

    rows: int
    sequence: int
    flops: float
    layers: int
    matrices: tuple[Matrix, ...]
    parameters: float
    blocks: float
    width: int
    item: float
    state: float
    kept: dict[str, float]
    recomputed: dict[str, float]
    steps: int
    mixture: Mixture | None = None
    mixtures: int = 0
    kept_rows: dict[str, float] = dataclasses.field(default_factory=dict)
    room: float = 0.0
    chunks: int | None = None

    @property
    def expert_parameters(self) -> float:
        """Those of all experts."""
        return sum(one.experts * one.inputs * one.outputs for one in self.matrices if one.experts > 1)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.sequence

    @property
    def splits(self) -> int:
        """The parts into which `tensor` can split all matrices alike."""
        return math.gcd(*(matrix.divides for matrix in self.matrices))

    def multiplied(self, experts: bool = True) -> int:
        """Returns the parameters of the layers' matrices that a token is multiplied with. experts: those of
        mixtures too."""
        return sum(one.multiplied for one in self.matrices[:-1] if experts or one.experts == 1)


DATA_SHEET = "by data sheet"
SUSTAINED = {("h200", "compute"): 690e12, ("h200", "fp8"): 1293e12}
"""FLOP/s of an 8192³ product held for 20 s, measured: scripts/bench/results/one_gpu_h200.json."""


def rate_of(device: str, kind: str, need: Demand, matmul: str) -> tuple[float, str]:
    """Returns the FLOP/s that a device holds in this model's products, and where that is from. device: of
    `aot.TARGETS`. kind: the device's own name. matmul: `precision.matmul`; float8 is for the blocks alone,
    and for their experts where it says so, but for the gradients of these."""
    peak = data_sheet_flops(kind)
    known = {way: SUSTAINED.get((device, way)) for way in ("compute", "fp8")}
    plain_rate, fast = known["compute"] or peak, known["fp8"] or 2 * peak
    said = "sustained in products, measured" if known["compute"] else DATA_SHEET
    precision = PrecisionConfig(matmul=matmul)
    if not precision.float8:
        return plain_rate, said
    flops = 6 * need.multiplied(experts=False)
    if precision.float8_experts:
        flops += 4 * (need.multiplied() - need.multiplied(experts=False))
    blocks = flops * need.tokens / need.flops
    return 1 / (blocks / fast + (1 - blocks) / plain_rate), f"{said}; the blocks' matrices in float8"


def demand(config: RunConfig) -> Demand:
    """Returns what a step of a configuration takes. Rows are one document each, which attention finds
    costliest."""
    require(
        not config.lora.on,
        f"lora.rank = {config.lora.rank}: these limits are of training the whole model; set lora.rank=0",
    )
    config = plain(config)
    model, rows, sequence = config.model, config.train.rows, config.data.sequence
    known, chain = facts.facts(model, config.precision.compute), family.chain(model)
    head = _head(chain)
    blocks = [(stage, chain.layers.count(stage)) for stage in distinct(chain.layers)]
    matrices = [
        matrix
        for stage, count in blocks
        for matrix in count * [_matrix(*each, stage) for each in stage.matrices]
    ]
    stages = [(chain.embedding, 1), (chain.head, 1), *blocks]
    parameters = sum(
        count * math.prod(leaf.shape) for stage, count in stages for leaf in jax.tree.leaves(stage.shapes)
    )
    bytes_of = config.optim.format.bytes_per_parameter(moments=1 if config.optim.name == "muon" else 2)
    item = jnp.dtype(config.precision.compute).itemsize
    mixed = [(stage, count) for stage, count in blocks if stage.mixture]
    of_rows = [({name: stage.kept.get(name, 0) for name in BY_ROW}, count) for stage, count in mixed]
    return Demand(
        rows=rows,
        sequence=sequence,
        flops=known.flops(rows * sequence, rows * sequence**2),
        layers=known.layers,
        matrices=(*matrices, head),
        parameters=parameters,
        blocks=known.layer_parameters,
        width=head.inputs,
        item=item,
        state=bytes_of.weights + bytes_of.state,
        kept=known.kept,
        recomputed=known.recomputed,
        steps=config.train.steps,
        mixture=mixed[0][0].mixture if mixed else None,
        mixtures=sum(count for _, count in mixed),
        kept_rows={
            policy: sum(count * kept_bytes(each, policy, item) for each, count in of_rows)
            for policy in known.kept
        },
        room=max((kept_bytes(each, "none", item) for each, _ in of_rows), default=0),
        chunks=config.mesh.expert_chunks,
    )


def _matrix(info: WeightInfo, shape: tuple[int, ...], stage: Stage) -> Matrix:
    def size(dims: tuple[int, ...]) -> int:
        return math.prod(shape[dim] for dim in dims)

    def splits(dims: tuple[int, ...]) -> list[int]:
        return [shape[dim] for dim in dims if "tensor" in LOGICAL_AXIS_RULES.get(info.axes[dim] or "", ())]

    ins, outs = splits(info.inputs), splits(info.outputs)
    split = "inputs" if ins else "outputs" if outs else ""
    experts = size(tuple(dim for dim in info.stack if info.axes[dim] == "experts"))
    top_k = stage.mixture.top_k if experts > 1 else 1
    sizes = size(info.inputs), size(info.outputs + info.stack) // experts
    return Matrix(*sizes, split, math.gcd(*ins, *outs), experts, top_k)


def _head(chain: Chain) -> Matrix:
    """Returns the matrix that makes logits, which may be the embedding's table."""
    stage, path = getattr(chain, chain.output[0]), chain.output[1:]
    info, leaf = stage.weights, stage.shapes
    for name in path:
        info, leaf = info[name], leaf[name]
    passed = [dim for dim, axis in enumerate(info.axes) if axis and "fsdp" in LOGICAL_AXIS_RULES[axis]]
    others = tuple(dim for dim in range(len(info.axes)) if dim not in passed)
    return (
        _matrix(dataclasses.replace(info, inputs=tuple(passed)), leaf.shape, stage)
        if others
        else Matrix(1, 1, "")
    )
