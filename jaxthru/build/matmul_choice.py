"""Whether linear layers are multiplied in float8 where `precision.matmul` is `auto`: if a step gains by it.

The account sets what a device saves in matmuls against what it reads and writes more to quantise, all by
rates that an H200 was measured to keep up in steps (docs/results.md). Another GPU is given the same shares of
its data sheet. Experts are no part of it, for they stay as they are. What it leaves out: collectives, which
move float8 in the place of bfloat16, matmuls that rematerialisation makes again, and copies to the host that
a faster step may have to wait for.
"""

import dataclasses
import math
from typing import Any

from jaxthru.build.checks import check_float8_settings
from jaxthru.build.defaults import float8_setting, replaced
from jaxthru.build.memory_estimate import layout_of
from jaxthru.build.step import needed_flops
from jaxthru.config import RunConfig, from_dict
from jaxthru.models import family
from jaxthru.models.stage import distinct
from jaxthru.runtime import hardware
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.sharding import Layout
from pallas_kernels.cast_transpose import TIMED as CASTS_TIMED
from pallas_kernels.dispatch import fits

KEY = "precision.matmul"
LEAST_GAIN = 0.05
"""Share of a step's time below which float8, which rounds more, is not taken. The account was up to 0.02 more
than was measured of unrolled steps, and 0.03 in a loop over layers, whose copies are not in it."""
CAPABILITY = (8, 9)
"""Of the first NVIDIA GPUs that multiply float8."""

COMPUTE, FLOAT8, STEP = 690 / 989.5, 1293 / 1979, 572 / 989.5
"""Shares of the data sheet that an H200 keeps up: of matmuls in bfloat16 and in float8, both 8192³, and of a
whole step's needed FLOPs in bfloat16."""

BANDWIDTH = 4.1 / 4.8
"""The same of its memory."""
TRANSPOSING = {"triton": 3.2 / 4.8, "xla": 1.6 / 4.8}
"""The same of its memory in casts that transpose: by the kernel of `cast_transpose`, timed alone, and by XLA,
which stores single bytes, a fit to what five whole steps saved (docs/results.md)."""


def moved_by_activation(adapters: bool) -> tuple[int, int]:
    """Returns the bytes that quantising moves for each number of a linear layer's input, and of its output's
    gradient: in passes that transpose nothing, and in casts that do.

    It is read for the largest magnitude (2), read again (2), and written twice, as it is and transposed, as
    cuBLAS takes it for the weight's gradient (2); less the write in bfloat16 of what nothing else reads. As
    compiled, the arrays of 8 layers of Llama 3 8B move 4 to 7, 4.9 in all. Under adapters a weight has no
    gradient, so that nothing is transposed.
    """
    return (4, 0) if adapters else (1, 4)


def moved_by_weight(stored: int) -> tuple[int, int]:
    """Returns the bytes that a parameter moves more than for a matmul in bfloat16, which has it cast once,
    in passes that transpose nothing, and in casts that do.

    stored: bytes of it, read twice, the second time to be cast and transposed; its float8 form is written,
    and once read and written as it was.
    """
    cast = 0 if stored == 2 else stored + 2
    return stored - cast, stored + 3


@dataclasses.dataclass(frozen=True)
class Account:
    """Seconds of a step on one device: of the linear layers' matmuls, forward and backward, in bfloat16 and
    in float8, of quantising, and of the whole step in bfloat16."""

    compute: float
    float8: float
    quantising: float
    step: float

    @property
    def saved(self) -> float:
        """The seconds of a step that float8 saves."""
        return self.compute - self.float8 - self.quantising

    @property
    def gain(self) -> float:
        """The share of the step's time that float8 saves."""
        return self.saved / self.step

    @property
    def parts(self) -> str:
        """What its seconds are, in words."""
        parts = (self.compute, self.float8, self.quantising)
        compute, float8, quantising = (f"{1000 * part:.3g}" for part in parts)
        return (
            f"by arithmetic a step's linear layers take {float8} ms in place of {compute}, quantising "
            f"{quantising}"
        )

    def __str__(self) -> str:
        return f"{self.parts}: {self.gain:.1%} of the step"


def transposing(config: RunConfig, layout: Layout, capability: tuple[int, int] | None) -> tuple[float, float]:
    """Returns the shares of `TRANSPOSING` of activations and of weights. XLA transposes adapters' frozen
    weights, and what moves between cast and product: weights over `fsdp`, and over `tensor` the tokens of
    some activations, for which all are counted."""
    by_auto = "triton" if fits(capability, *CASTS_TIMED) else "xla"
    chosen = config.kernels.named("cast_transpose") or by_auto
    stays = (
        layout.spec(("tokens",)) == layout.spec(("batch",)),
        layout.size("embed") == 1 and not config.lora.on,
    )
    by = (chosen if chosen in TRANSPOSING and here else "xla" for here in stays)
    of_rows, of_weights = (TRANSPOSING[each] for each in by)
    return of_rows, of_weights


def account(
    config: RunConfig, layout: Layout, kind: str, capability: tuple[int, int] | None
) -> Account | None:
    """Returns the account of a configuration on devices of a kind; None where its data sheet is not known."""
    peak, memory = hardware.data_sheet_flops(kind), hardware.data_sheet_bandwidth(kind)
    if peak is None or memory is None:
        return None
    train, chain, bandwidth = config.train, family.chain(config.model), BANDWIDTH * memory
    tokens = train.rows * config.data.sequence
    micro = tokens // train.microbatches // layout.size("batch")
    sides = layout.mesh.size // layout.size("batch")  # that split a row's tokens, heads and widths
    adapters = config.lora.on  # their base is kept as it is multiplied
    of_weight = moved_by_weight(2 if adapters else config.optim.format.weights.itemsize)
    casts = transposing(config, layout, capability)
    compute = float8 = quantising = 0.0
    for stage in distinct(chain.layers):
        times = train.microbatches * chain.layers.count(stage)
        made = parameters = 0
        for info, shape in stage.matrices:
            if info.stack:  # experts, which are left as they are
                continue
            inputs, outputs = (math.prod(shape[dim] for dim in dims) for dims in (info.inputs, info.outputs))
            size = micro, inputs, outputs
            compute += times * products(size, 2, COMPUTE * peak, bandwidth, adapters) / sides
            float8 += times * products(size, 1, FLOAT8 * 2 * peak, bandwidth, adapters) / sides
            made, parameters = made + outputs, parameters + math.prod(shape)
        numbers = micro * (stage.kept.get("float8", made) + made)  # of inputs, and of outputs' gradients
        counts = numbers, parameters / layout.size("embed")
        whole = zip(counts, (moved_by_activation(adapters), of_weight), casts, strict=True)
        for count, (plain, cast), share in whole:
            seconds = plain / bandwidth + cast / (share * memory)
            quantising += times * count * seconds / sides
    needed = needed_flops(config)(tokens, tokens * config.data.sequence)
    return Account(compute, float8, quantising, needed / layout.mesh.size / (STEP * peak))


def products(
    size: tuple[int, int, int], item: int, flops: float, bandwidth: float, frozen: bool = False
) -> float:
    """Returns the seconds of a linear layer's three products: forward, and two backward. size: tokens, inputs
    and outputs. item: bytes of a number that is multiplied; results are bfloat16. frozen: the weight has no
    gradient, which is one of them. None is faster than its bytes."""
    tokens, inputs, outputs = size
    arrays = tokens * inputs, inputs * outputs, tokens * outputs
    work = 2 * tokens * inputs * outputs / flops
    results = arrays[::2] if frozen else arrays
    moved = (item * (sum(arrays) - result) + 2 * result for result in results)
    return sum(max(work, each / bandwidth) for each in moved)


def settled(
    config: RunConfig, layout: Layout, kind: str, capability: tuple[int, int] | None
) -> tuple[RunConfig, str]:
    """Returns a configuration with `precision.matmul` settled, and why; itself and nothing where it is not
    `auto`. kind, capability: of the devices; None of what is no NVIDIA GPU."""
    if config.precision.matmul != "auto":
        return config, ""
    found, why = _chosen(config, layout, kind, capability)
    return replaced(config, {KEY: "fp8" if found else "compute"}), why


def account_of_run(
    tree: dict[str, Any], devices: int, kind: str, capability: tuple[int, int] | None
) -> Account | None:
    """Returns the account of a run in bfloat16 on so many devices, none of which need be here. None where
    `auto` would leave it so, and where its configuration, config.json's nested values, is no more read."""
    try:
        config = from_dict(tree)
        layout = layout_of(config, devices)
    except (InputError, OSError, RuntimeError):  # of an older version, or of weights that are elsewhere
        return None
    return None if float8_setting(config) else _chosen(config, layout, kind, capability)[0]


def _chosen(
    config: RunConfig, layout: Layout, kind: str, capability: tuple[int, int] | None
) -> tuple[Account | None, str]:
    """Returns the account by which float8 is taken, None where it is not, and why."""
    if capability is None or capability < CAPABILITY:
        return None, f"float8 needs an NVIDIA GPU of Ada, Hopper or Blackwell, and here is {kind}"
    if config.precision.compute != "bfloat16":
        return None, f"precision.compute = {config.precision.compute!r} asks for more than bfloat16"
    try:
        check_float8_settings(replaced(config, {KEY: "fp8"}), layout)
    except InputError as refusal:
        return None, str(refusal)
    found = account(config, layout, kind, capability)
    if found is None:
        return None, f"no data sheet of {kind} is known here; 'fp8' asks for it all the same"
    if found.gain < LEAST_GAIN:
        return None, f"{found}, and {LEAST_GAIN:.0%} is the least that float8 is taken for"
    return found, str(found)
