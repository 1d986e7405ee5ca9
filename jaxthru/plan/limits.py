"""`plan limits`: over how many devices a step still gets faster, and which wall ends it.

By arithmetic, nothing is compiled: what a step computes, reads and sends, on the best mesh of each number of
devices. Two bounds are given: with all of it overlapped, and with nothing. Equations: `jaxthru.plan.walls`.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxthru.models.facts import POLICIES
from jaxthru.plan import walls
from jaxthru.plan.cluster import Cluster
from jaxthru.plan.demand import Demand, Matrix
from jaxthru.plan.walls import SERIAL
from jaxthru.runtime.errors import require
from jaxthru.runtime.mesh import AXES, MOST_EXPERT, usual_chunks

RING = (8.4e-6, 3.4e-6, 14.0e-6)
"""NCCL's ring for large arrays, in seconds: base, a hop by NVLink, a hop by the network."""
SHARE = 0.8
"""Of linear: where scaling is said to end."""
WALLS = ("compute", "HBM", "NVLink", "NIC", "latency", "batch")
MOST = 1 << 16


@dataclasses.dataclass(frozen=True)
class Point:
    """The best mesh of so many devices. seconds: of a step in which all is overlapped. exposed: on the mesh
    that is best where no communication is. parts: seconds of each wall. share: of linear, of either. binds:
    the wall."""

    devices: int
    mesh: dict[str, int]
    microbatches: int
    remat: str
    seconds: float
    exposed: float
    parts: dict[str, float]
    share: float
    share_exposed: float
    tokens_per_second: float
    tokens_per_second_exposed: float
    binds: str


@dataclasses.dataclass(frozen=True)
class Ends:
    """Where scaling ends. overlapped, exposed: the most devices that run at SHARE of linear, 0 for none, in
    either bound. binds: the wall beyond, empty where none was met. shortest: of a step, seconds."""

    overlapped: int
    exposed: int
    binds: str
    shortest: float


def points(need: Demand, cluster: Cluster, most: int = MOST) -> list[Point]:
    """Returns the best mesh of each power of two of devices that holds the state, up to `most`. Raises
    InputError where none does."""
    most = min(most, cluster.most or most)
    found = [best(need, cluster, 1 << power) for power in range(most.bit_length())]
    found = [point for point in found if point is not None]
    require(
        bool(found),
        f"no mesh of up to {most:,} devices holds {need.parameters * need.state / 1e9:,.0f} GB of weights "
        f"and optimizer in {cluster.memory / 1e9:,.0f} GB each; give more --most, or another optim.state",
    )
    return found


def best(need: Demand, cluster: Cluster, devices: int) -> Point | None:
    """Returns the mesh of so many devices whose step is shortest with all overlapped, None where no mesh
    holds the state. Meshes: powers of two of `data`, `fsdp`, of a mixture `expert`, and `tensor`, whose ranks
    lie in this order."""
    powers = [1 << power for power in range(devices.bit_length()) if devices % (1 << power) == 0]
    experts = need.mixture.experts if need.mixture else 1
    grid = [
        (devices // (fsdp * expert * tensor), fsdp, expert, tensor, parts, policy)
        for tensor in powers
        if need.splits % tensor == 0
        for expert in powers
        if expert <= MOST_EXPERT and experts % expert == 0
        for fsdp in powers
        if devices % (fsdp * expert * tensor) == 0 and need.rows % (devices // tensor) == 0
        for parts in [1 << power for power in range(need.rows.bit_length())]
        if need.rows // (devices // tensor) % parts == 0
        for policy in POLICIES
    ]
    if not grid:
        return None
    meshes = Meshes(*(np.array([row[axis] for row in grid], float) for axis in range(5)))
    policies = [row[5] for row in grid]
    times = walls_of(need, cluster, meshes, np.array([need.recomputed[policy] for policy in policies]))
    held = _held(need, meshes, policies)
    stack = np.stack([np.broadcast_to(times[name], held.shape) for name in WALLS[:-1]])
    fits = held <= cluster.memory
    summed = np.maximum(times["compute"], times["HBM"]) + times["NVLink"] + times["NIC"] + times["latency"]
    overlapped, apart = (np.where(fits, each, np.inf) for each in (stack.max(axis=0), summed))
    place = int(np.lexsort((apart, overlapped))[0])
    if not fits[place]:
        return None
    seconds, exposed = float(overlapped[place]), float(apart.min())
    linear = need.flops / (devices * cluster.rate)
    sizes = dict(zip(AXES, grid[place][:4], strict=True))
    if not need.mixture:
        del sizes["expert"]
    binds = WALLS[int(stack[:, place].argmax())]
    parts_of = {name: float(stack[number, place]) for number, name in enumerate(WALLS[:-1])}
    return Point(
        devices,
        sizes,
        grid[place][4],
        grid[place][5],
        seconds,
        exposed,
        parts_of,
        linear / seconds,
        linear / exposed,
        need.tokens / seconds,
        need.tokens / exposed,
        binds,
    )


class Meshes(NamedTuple):
    """Meshes that are looked at, an array [meshes] of each axis, and of the micro-batches of a step."""

    data: np.ndarray
    fsdp: np.ndarray
    expert: np.ndarray
    tensor: np.ndarray
    parts: np.ndarray

    def tokens(self, need: Demand) -> np.ndarray:
        """Returns the tokens of a micro-batch on each group of `tensor`."""
        return need.tokens / (self.data * self.fsdp * self.expert * self.parts)

    def chunks(self, need: Demand) -> np.ndarray:
        """Returns the parts in which a layer's tokens go to experts, of which other devices have a part."""
        chunks = need.chunks or usual_chunks(self.expert, self.tensor)
        return np.where(self.expert * self.tensor > 1, chunks, 1)

    def share(self, experts: float, others: float) -> np.ndarray:
        """Returns a device's part over `expert` and `tensor` of so many numbers of experts, and others."""
        return (experts / self.expert + others) / self.tensor


def walls_of(need: Demand, cluster: Cluster, meshes: Meshes, again: np.ndarray) -> dict[str, np.ndarray]:
    """Returns seconds [meshes] of a step by wall. again: FLOPs of a token that are computed a second time."""
    data, fsdp, expert, tensor, parts = meshes
    devices = data * fsdp * expert * tensor
    at_once, experts, chunks = meshes.tokens(need), need.expert_parameters, meshes.chunks(need)
    compute = (need.flops + again * need.tokens) / (devices * cluster.rate)
    passes = parts * (3 + again * need.tokens / need.flops)  # forward, and backward twice
    read = sum(_read(need, matrix, at_once, tensor, expert, chunks) for matrix in need.matrices) * passes
    updated = 2 * need.state * meshes.share(experts, need.parameters - experts) / fsdp
    slow = cluster.contention.get(int(devices.flat[0]), 1.0)
    links = Links(dataclasses.replace(cluster, network=cluster.network / slow))
    layers, mixtures = need.layers * parts, need.mixtures * parts
    passed = need.item * at_once * need.width  # all-gathered and reduce-scattered, twice each way
    split = links.gather(passed, tensor, 1) * (8 * layers - 4 * mixtures)
    split = split + links.gather(passed * expert, expert * tensor, 1) * 4 * mixtures
    weights = need.item * meshes.share(experts, need.blocks - experts)
    inner = expert * tensor
    gathered = links.gather(weights, fsdp, inner) * 3 * parts
    # What is no expert's is summed over `expert` too: then each device has a part of it to sum over `data`.
    others = need.item * (need.parameters - experts) / (fsdp * tensor)
    summed = others / expert + need.item * experts / (fsdp * inner)
    reduced = (links.gather(others, expert, tensor) + links.gather(summed, data, fsdp * inner)) * 2
    nvlink, network = split + gathered + reduced
    serial = layers * layer_latency(cluster, tensor)
    rings = 3 * layers * links.ring(fsdp, inner) + 2 * links.ring(data, fsdp * inner)
    rings = rings + np.where(expert > 1, 4 * mixtures * chunks * links.ring(inner, 1), 0.0)
    return {
        "compute": compute,
        "HBM": (read + updated) / cluster.bandwidth,
        "NVLink": nvlink,
        "NIC": network,
        "latency": np.maximum(serial, rings),
    }


class Links:
    """What NVLink and the network carry of a collective, by the two-level algorithm: each device of a domain
    brings its share from outside, and hands it round within."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster

    def spread(self, ranks, stride) -> tuple[np.ndarray, np.ndarray]:
        """Returns how many ranks share a domain, and how many domains the group spans."""
        room = np.maximum(self._cluster.domain / np.asarray(stride, float), 1)
        inside = np.minimum(ranks, 2.0 ** np.floor(np.log2(room)))
        return inside, ranks / inside

    def gather(self, size, ranks, stride) -> np.ndarray:
        """Returns [2, meshes], the seconds by NVLink and by the network of an all-gather or a reduce-scatter
        of so many bytes. stride: devices from one rank to the next."""
        inside, outside = self.spread(ranks, stride)
        cluster = self._cluster
        near = size * (inside - 1) / inside / cluster.nvlink
        far = size * (outside - 1) / outside / inside / cluster.network
        return np.stack(np.broadcast_arrays(near, far))

    def ring(self, ranks, stride) -> np.ndarray:
        """Returns the seconds that a ring takes however little it moves, 0 of one rank."""
        _, outside = self.spread(ranks, stride)
        base, near, far = RING
        return np.where(ranks > 1, base + (ranks - outside) * near + (outside - 1) * far, 0.0)


def layer_latency(cluster: Cluster, tensor) -> np.ndarray:
    """Returns the least time of a layer, forward and backward: its matmuls, one after the other, and with
    `tensor` the all-reduces between them."""
    inside, outside = Links(cluster).spread(np.asarray(tensor, float), 1)
    latency = cluster.latency
    return 2 * SERIAL * latency.kernel + 4 * latency.all_reduce(inside, outside)


def ends(need: Demand, cluster: Cluster, found: list[Point]) -> Ends:
    """Returns where scaling ends by these points."""
    within = [point.devices for point in found if point.share >= SHARE]
    exposed = [point.devices for point in found if point.share_exposed >= SHARE]
    overlapped = max(within, default=0)
    beyond = next((point for point in found if point.devices > overlapped and point.share < SHARE), None)
    split = need.layers * float(layer_latency(cluster, split_by(need, cluster)))
    shortest = min(split, *(point.seconds for point in found))  # small layers are faster whole
    largest = (need.rows & -need.rows) * (need.splits & -need.splits)  # powers of two, as meshes are
    full = found[-1].devices >= largest  # no mesh splits the step further
    binds = beyond.binds if beyond else "batch" if full else ""
    return Ends(overlapped, max(exposed, default=0), binds, shortest)


def split_by(need: Demand, cluster: Cluster) -> int:
    """Returns the most devices of an NVLink domain that can share the layers' matrices."""
    return min(1 << (cluster.domain.bit_length() - 1), need.splits)


def closed(need: Demand, cluster: Cluster) -> dict[str, float]:
    """Returns the devices at which each wall alone takes as long as the matmuls, by closed formulas: with
    tensor parallelism TP within an NVLink domain, the rest of the devices splitting the batch.

    HBM: TP B / B_min, with B_min = H p / 2 W. NVLink: rows × TP, at which what `tensor` sends of a row takes
    as long. NIC: TP B / b, with b the tokens of a device at which the gathers of its weights, twice, and the
    reduction of its gradients take as long; of experts there are more weights to read and to gather than a
    token is multiplied with. latency: FLOPs / (H L t_L). batch: rows × the most that a layer can be split
    into. Without the axis `expert`, which has fewer of these weights on each device.
    """
    item, split = need.item, split_by(need, cluster)
    idle = need.blocks / need.multiplied()
    balance = idle * walls.balance_tokens(cluster.rate, item, cluster.bandwidth)
    multiplied = 6 * need.multiplied()
    near = multiplied * cluster.nvlink / (8 * item * need.width * need.layers * cluster.rate)
    far = idle * 3 * item * cluster.rate / (6 * cluster.network)  # tokens of a device
    layer = float(layer_latency(cluster, split))
    return {
        "HBM": split * need.tokens / balance,
        "NVLink": need.rows * (1 + near),
        "NIC": split * need.tokens / far,
        "latency": need.flops / (cluster.rate * need.layers * layer),
        "batch": float(need.rows * need.splits),
    }


@dataclasses.dataclass(frozen=True)
class Change:
    """What another cluster or batch moves."""

    what: str
    overlapped: int
    exposed: int
    shortest: float
    binds: str


def changes(need: Demand, cluster: Cluster, most: int = MOST) -> list[Change]:
    """Returns where scaling ends with twice the batch, the NVLink domain, the network or the memory's
    bandwidth, and with half the latency."""
    replace = dataclasses.replace
    variants = {
        "as it is": (need, cluster),
        "batch × 2": (replace(need, rows=2 * need.rows, flops=2 * need.flops), cluster),
        "NVLink domain × 2": (need, replace(cluster, domain=2 * cluster.domain)),
        "NICs × 2": (need, replace(cluster, network=2 * cluster.network)),
        "HBM × 2": (need, replace(cluster, bandwidth=2 * cluster.bandwidth)),
        "latency ÷ 2": (need, replace(cluster, latency=cluster.latency.scaled(0.5))),
    }
    found = []
    for what, (of, on) in variants.items():
        end = ends(of, on, points(of, on, most))
        found.append(Change(what, end.overlapped, end.exposed, end.shortest, end.binds))
    return found


def _held(need: Demand, meshes: Meshes, policies: Sequence[str]) -> np.ndarray:
    """Returns bytes on a device: state and float32 gradients, two layers' weights as matmuls take them, what
    is kept of a micro-batch, and a layer's rows of experts, those of a chunk, as `Mixture.rows` has room.
    policies: of remat, one a mesh."""
    experts, tensor = need.expert_parameters, meshes.tensor
    kept, rows = (np.array([of.get(policy, 0) for policy in policies]) for of in (need.kept, need.kept_rows))
    room = need.mixture.rows if need.mixture else float
    more = np.array([room(int(devices)) for devices in meshes.expert])
    held = (need.state + 4) * meshes.share(experts, need.parameters - experts) / meshes.fsdp
    held = held + 2 * need.item * meshes.share(experts, need.blocks - experts) / need.layers
    kept = kept + (more - 1) * rows + more * need.room / meshes.chunks(need)
    return held + meshes.tokens(need) * (kept + need.layers * need.width * need.item) / tensor


def _read(need: Demand, matrix: Matrix, tokens, tensor, expert=1, chunks=1) -> np.ndarray:
    """Returns bytes that one pass of a matrix, or of all experts of a device, moves between memory and the
    tensor units. tokens: of each device along `expert`, which go to experts in so many chunks."""
    inputs, outputs = matrix.inputs, matrix.outputs
    ins = inputs / tensor if matrix.split == "inputs" else inputs
    outs = outputs / tensor if matrix.split == "outputs" else outputs
    rows = tokens * matrix.top_k
    own = matrix.experts / expert * chunks if matrix.experts > 1 else 1
    return need.item * (rows * (ins + outs) + np.minimum(rows, own) * ins * outs)
