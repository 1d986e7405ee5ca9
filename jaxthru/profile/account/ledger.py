"""The ledger: where each second of the profiled steps went. Its schema, and its JSON.

`docs/ledger.md` says what each line means and which setting moves it. A number that is not known is None.
All seconds are means per step over the devices, unless said otherwise.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxthru.profile.read.facts import Facts
from jaxthru.runtime import plain

VERSION = 1

LINES = (
    *("matmul", "attention", "collective_matmul", "other_kernels", "unclassified"),
    *("exposed_communication", "exposed_host_copies", "data_wait", "host_gap", "dependency"),
)
"""Of what runs at a moment, the first of these counts."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What was run. attention_span_per_token: Σ document length² ÷ tokens."""

    config: str
    device_kind: str
    devices: int
    processes: int
    platform: str
    versions: dict[str, str]
    tokens_per_step: float
    attention_span_per_token: float


@dataclasses.dataclass(frozen=True)
class Window:
    """The profiled steps. step_seconds: their mean. loop_seconds: the median of the steps that were not
    profiled, by the loop's own clock. closure: step_seconds / loop_seconds - 1. noise: the relative spread of
    the steps that were not profiled; no cause below it is named. Where fewer than three such steps ran, the
    first two are None and noise is 0. attribution_seconds: a step's mean where kernels have names, if that
    took a pass of its own (without CUDA graphs)."""

    first_step: int
    steps: int
    step_seconds: float
    loop_seconds: float | None = None
    closure: float | None = None
    noise: float = 0.0
    attribution_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Line:
    name: str
    seconds: float
    share: float


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The line "matmul" taken apart: the four seconds from ideal to inefficiency add up to it.

    flops: of one step over all devices, counted in the HLO with trip counts, without attention's.
    model_flops: those that the model needs. ideal_seconds: model_flops at the reference clock, but for those
    of the line "collective_matmul". headroom: what ideal_seconds would fall by at the maximum clock.
    peak_flops: of one device, at the reference clock.
    frequency_seconds is None without a clock, and then lies within the inefficiency.
    """

    flops: float
    model_flops: float
    ideal_seconds: float | None = None
    recomputation_seconds: float | None = None
    frequency_seconds: float | None = None
    inefficiency_seconds: float | None = None
    reference_mhz: float | None = None
    maximum_mhz: float | None = None
    headroom_seconds: float | None = None
    peak_flops: float | None = None


@dataclasses.dataclass(frozen=True)
class Scope:
    """phase: "forward", "backward", "recomputation", "optimizer", "loss" or "other"."""

    layer: str
    phase: str
    line: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Kernels of one name and instruction. count: a step and device. seconds: their own durations, also where
    they run beside others. flops, bytes: of one run."""

    name: str
    hlo: str
    line: str
    scope: str
    source: str | None
    count: float
    seconds: float
    flops: float | None = None
    bytes: float | None = None
    flops_per_second: float | None = None


@dataclasses.dataclass(frozen=True)
class Collective:
    """bytes: of one run, the larger of operand and result on a device. wait_seconds: the part of its seconds
    for which a device waited for the last to come. last: the device that came last most often."""

    name: str
    kind: str
    bytes: float | None
    count: float
    seconds: float
    exposed_seconds: float
    wait_seconds: float
    last: str | None = None


@dataclasses.dataclass(frozen=True)
class DeviceStep:
    """start: seconds from the window's."""

    step: int
    start: float
    seconds: float
    lines: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Device:
    """strip: (start, end, line) of one step's spans, seconds from its start."""

    device: str
    steps: tuple[DeviceStep, ...]
    strip: tuple[tuple[float, float, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Clock:
    """source: "cupti", "nvml" or "none". samples: (seconds from the window's start, MHz). power: watts.
    cap_reasons: the share of the time for which each held the clock down."""

    source: str = "none"
    mean_mhz: float | None = None
    samples: tuple[tuple[float, float], ...] = ()
    power: tuple[tuple[float, float], ...] = ()
    cap_reasons: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Buffer:
    bytes: int
    scope: str
    source: str | None
    category: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """Of the fullest device. peak_bytes: the runtime's own. categories: at the program's peak. curve:
    (position in the step from 0 to 1, bytes)."""

    peak_bytes: int | None
    categories: dict[str, int]
    buffers: tuple[Buffer, ...]
    curve: tuple[tuple[float, float], ...]
    host_pinned_bytes: int


@dataclasses.dataclass(frozen=True)
class Lint:
    """What the program's text shows. bytes: moved or held by it in a step. seconds: what it costs a step.
    remedy: the key of the advice that counts it. gain_seconds: what that is expected to win, for all that it
    counts; advised: whether `Ledger.advice` has it. Older ledgers lack these three."""

    rule: str
    scope: str
    instruction: str
    bytes: float | None
    seconds: float | None
    text: str
    remedy: str = ""
    gain_seconds: float | None = None
    advised: bool = False


@dataclasses.dataclass(frozen=True)
class Advice:
    """cause: a line or a lint rule. key, value: the setting to change."""

    cause: str
    key: str
    value: str
    gain_seconds: float | None
    gain_share: float | None
    text: str


@dataclasses.dataclass(frozen=True)
class Cost:
    """Means of the steps that were not profiled, over all devices, as metrics.jsonl has them."""

    joules: float | None = None
    joules_per_token: float | None = None
    dollars: float | None = None
    dollars_per_million_tokens: float | None = None


@dataclasses.dataclass(frozen=True)
class Ledger:
    """`lines` add up to `window.step_seconds`: each instant of each device is counted once. expert_tokens: of
    a mixture of experts, the tokens of each expert of each layer in one step."""

    run: Run
    window: Window
    lines: tuple[Line, ...]
    matmul: Matmul
    scopes: tuple[Scope, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    collectives: tuple[Collective, ...] = ()
    devices: tuple[Device, ...] = ()
    clock: Clock = Clock()
    memory: Memory | None = None
    lint: tuple[Lint, ...] = ()
    advice: tuple[Advice, ...] = ()
    model: Facts | None = None
    cost: Cost = Cost()
    expert_tokens: tuple[tuple[int, ...], ...] = ()
    version: int = VERSION

    def seconds(self, line: str) -> float:
        """Returns the seconds of a line."""
        return sum(entry.seconds for entry in self.lines if entry.name == line)

    def to_json(self) -> dict[str, Any]:
        """Returns what `json.dump` takes."""
        return dataclasses.asdict(self)

    def write(self, path: Path) -> None:
        """Writes `ledger.json`."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


def from_json(data: dict[str, Any]) -> Ledger:
    """Returns the ledger of parsed JSON. Raises ValueError for what is none, and another version."""
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise ValueError(f"ledger version {version!r}: this jaxthru reads version {VERSION}")
    return plain.build(Ledger, data)


def read(path: Path) -> Ledger:
    """Returns the ledger of a `ledger.json`. Raises ValueError as `from_json` does."""
    return from_json(json.loads(path.read_text()))
