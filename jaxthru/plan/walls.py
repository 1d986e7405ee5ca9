"""The walls of scale as equations: latency and data movement (E. Erdil and others, Epoch AI, 2024).

From "Can AI scaling continue through 2030?" and its appendix E; arXiv:2411.01137 has the model. Seconds,
bytes, FLOP/s and parameters throughout; N is parameters, D tokens, B tokens of a batch, L layers.
"""

import dataclasses

import numpy as np

US = 1e-6
TOKENS_PER_PARAMETER = 20
"""D / N of a training run that spends its compute best (Hoffmann et al., arXiv:2203.15556)."""
FLOPS = 6 * TOKENS_PER_PARAMETER
"""C / N² of such a run, whose C is 6 N D."""
DEPTH, DEPTH_EXPONENT = 0.088, 0.27
"""L = 0.088 N^0.27: a fit to published models, whose exponent is 0.21 to 0.33."""
SERIAL = 4
"""Matmuls of a layer that wait for one another: into attention, out of it, into the MLP, out of it."""


@dataclasses.dataclass(frozen=True)
class Latency:
    """What a matmul and a collective take however little they move, in seconds. kernel: of a matmul. base,
    nvlink, network: NCCL's constants of its tree in the LL protocol, a hop each way (src/graph/tuning.cc)."""

    kernel: float = 4.5 * US
    base: float = 6.8 * US
    nvlink: float = 0.6 * US
    network: float = 5.0 * US

    def all_reduce(self, inside, outside=1):
        """Returns the least time of an all-reduce. inside: ranks that share an NVLink domain. outside:
        domains that it spans. Numbers or arrays of them."""
        inside, outside = np.asarray(inside, float), np.asarray(outside, float)
        hops = self.base + 2 * ((inside - 1) * self.nvlink + np.log2(outside) * self.network)
        return np.where(inside * outside > 1, hops, 0.0)

    def scaled(self, factor: float) -> "Latency":
        """Returns latencies that are all so many times as long."""
        return Latency(*(factor * value for value in dataclasses.astuple(self)))


def layers_of(parameters: float, exponent: float = DEPTH_EXPONENT) -> float:
    """Returns the layers that a model of so many parameters has by the fit."""
    return DEPTH * parameters**exponent


def batch_of(parameters: float, batch: float, reference: float, exponent: float) -> float:
    """Returns the tokens of a batch that grows with the model: `batch` at `reference` parameters."""
    return batch * (parameters / reference) ** exponent if exponent else batch


def latency_wall(
    seconds: float, layer: float, batch: float, reference: float = 1.0, exponent: float = 0.0
) -> float:
    """Returns the most parameters that a run of so many seconds can train: it makes D / B steps, each of
    which takes L × `layer` seconds at least, however many devices there are.

    layer: the least time of a layer, forward and backward. batch, reference, exponent: as in `batch_of`.
    """
    at_one = batch / reference**exponent if exponent else batch
    power = 1 + DEPTH_EXPONENT - exponent
    return (seconds * at_one / (TOKENS_PER_PARAMETER * layer * DEPTH)) ** (1 / power)


def balance_tokens(rate: float, item: float, bandwidth: float) -> float:
    """Returns the tokens at which reading a matrix takes as long as multiplying by it: H p / (2 W).

    rate: FLOP/s. item: bytes of a number. bandwidth: bytes/s of the device's memory.
    """
    return rate * item / (2 * bandwidth)


def linear_compute(seconds: float, bandwidth: float, domain: int, batch: float, item: float) -> float:
    """Returns the FLOP of a run beyond which each device has too few tokens to keep it busy: 2 T W TP B / p.

    domain: devices that share a matrix by NVLink; the other devices split the batch, to `balance_tokens`.
    """
    return 2 * seconds * bandwidth * domain * batch / item


@dataclasses.dataclass(frozen=True)
class Machine:
    """A device and its network, as the search needs it. rate: FLOP/s. item: bytes of a number. bandwidth: of
    the memory. domain: devices joined by NVLink. nvlink, network: bytes/s of a device, each way."""

    rate: float
    item: float
    bandwidth: float = 3.35e12
    domain: int = 8
    nvlink: float = 450e9
    network: float = 50e9
    latency: Latency = Latency()


@dataclasses.dataclass(frozen=True)
class Found:
    """The best arrangement of a scale. utilisation: of the devices' FLOP/s; 0 where none is in time."""

    utilisation: float
    devices: float
    data: int
    stages: int
    tensor: tuple[int, int]
    microbatches: int


def search(
    compute: float,
    machine: Machine,
    *,
    seconds: float,
    batch: float,
    reference: float = 70e9,
    exponent: float = 0.36,
    exposed: bool = True,
    wide: bool = True,
) -> Found:
    """Returns the arrangement that uses devices best among those that train a model of `compute` FLOP in
    time.

    The model is MLPs alone: N = 8 L d². Data, pipeline (interleaved to a layer a stage) and two ways of
    tensor parallelism, and the micro-batches, are powers of two. A layer of a micro-batch takes the longer of
    its six matmuls and the all-reduces of its activations; a step at least the all-reduce of its gradients,
    and a batch's passage through the layers. exposed: latencies are added to a layer; they are hidden
    otherwise. wide: both all-reduces carry the MLP's inner width, 4 d; otherwise one of them carries d.
    """
    parameters = (compute / FLOPS) ** 0.5
    layers = max(1.0, layers_of(parameters))
    width = (parameters / (8 * layers)) ** 0.5
    tokens = batch_of(parameters, batch, reference, exponent)
    one, two = _powers(0, 11), _powers(1, 11)
    data, micro, stages = _powers(2, 21), _powers(3, 12), _powers(4, int(np.log2(layers)) + 1)
    rows = tokens / data / micro
    matmuls = 6 * _matmul(machine, rows, width / one, 4 * width / two)
    inside_one = np.minimum(one, machine.domain)
    inside_two = np.minimum(two, np.maximum(machine.domain / one, 1))
    size = machine.item * rows * width
    reduced = _all_reduce(machine, 4 * size / two, one, one)
    reduced = reduced + _all_reduce(machine, (4 if wide else 1) * size / one, two, one * two)
    latency = machine.latency
    waits = latency.all_reduce(inside_one, one / inside_one) + latency.all_reduce(
        inside_two, two / inside_two
    )
    waits = 2 * waits + SERIAL * latency.kernel  # two matmuls forward, two backward that wait
    layer = np.maximum(matmuls, 2 * reduced)
    layer = layer + waits if exposed else np.maximum(layer, waits)
    step = layers / stages * layer * (micro + (stages - 1) * stages / layers)
    gradients = machine.item * parameters / (one * two * stages)
    step = np.maximum(step, np.where(data > 1, 2 * (data - 1) / data * gradients / machine.network, 0.0))
    step = np.maximum(step, layers * waits)
    devices = data * one * two * stages
    used = 6 * parameters * tokens / (devices * machine.rate * step)
    in_time = step <= seconds * tokens / (TOKENS_PER_PARAMETER * parameters)
    used = np.where(in_time & (rows >= 1), used, 0.0)
    best = np.unravel_index(used.argmax(), used.shape)
    sizes = [int(2**place) for place in best]
    return Found(
        float(used.max()),
        float(np.broadcast_to(devices, used.shape)[best]),
        sizes[2],
        sizes[4],
        (sizes[0], sizes[1]),
        sizes[3],
    )


def reaches(utilisation: float, machine: Machine, **how) -> float:
    """Returns the largest FLOP, to a twentieth of a power of ten, whose best arrangement uses the devices so
    well. how: of `search`."""
    low, high = 25.0, 33.0
    while high - low > 0.05:
        middle = (low + high) / 2
        enough = search(10**middle, machine, **how).utilisation >= utilisation
        low, high = (middle, high) if enough else (low, middle)
    return 10**low


def _powers(axis: int, count: int) -> np.ndarray:
    """Returns powers of two along an axis of the search."""
    shape = [1] * 5
    shape[axis] = count
    return (2.0 ** np.arange(count)).reshape(shape)


def _matmul(machine: Machine, a, b, c):
    moved = machine.item * (a * b + b * c + a * c)
    return np.maximum(2 * a * b * c / machine.rate, moved / machine.bandwidth)


def _all_reduce(machine: Machine, size, ranks, span):
    """span: ranks within which the group lies; beyond the domain the network carries it."""
    speed = np.where(span <= machine.domain, machine.nvlink, machine.network)
    return np.where(ranks > 1, 2 * (ranks - 1) / ranks * size / speed, 0.0)
