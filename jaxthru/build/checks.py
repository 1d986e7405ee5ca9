"""Checks that a configuration fits these devices, before data is prepared or a device works."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping

import jax

from jaxthru.build.defaults import float8_setting, plain, replaced
from jaxthru.build.step import assemble, chain_of
from jaxthru.config import RunConfig
from jaxthru.engine.offload import OffloadConfig
from jaxthru.engine.step import check_groups
from jaxthru.models import family
from jaxthru.runtime.errors import InputError, require
from jaxthru.runtime.mesh import make_mesh
from jaxthru.runtime.sharding import Layout, check_divisible
from pallas_kernels import dispatch
from pallas_kernels.dispatch import Unsupported, nvidia_compute_capability
from pallas_kernels.grouped_matmul.float8 import OPERATION as GROUPED_FLOAT8

log = logging.getLogger("jaxthru")
FLOAT8 = "precision.matmul = 'fp8'"


def validate(
    config: RunConfig, devices: list[jax.Device] | None = None, platform: str | None = None
) -> Layout:
    """Returns the layout of a configuration on these devices, by default all of them. platform: where it is
    to run, if not on them: a plan for GPUs is made on CPU devices.

    Raises InputError, naming the key, where rows, heads or another size cannot be split as the mesh asks, or
    the devices cannot do what is asked of them.
    """
    shape, kernels = config.model, config.kernels
    layout = Layout(make_mesh(config.mesh, devices))
    chain_of(config)  # refuses adapters that it has no place for
    check_sizes(config, layout)
    device = layout.mesh.devices.flat[0]
    require(
        (platform or device.platform) != "cpu"
        or layout.mesh.size == 1
        or config.precision.compute == "float32",
        f"precision.compute = {config.precision.compute!r}: on {layout.mesh.size} CPU devices XLA ends the "
        "process over sums in it; choose 'float32'",
    )
    if setting := float8_setting(config):
        check_float8_settings(config, layout)
        check_float8(device, setting)
    if left := left_wide(config):
        log.info("%s", left)
    require(
        kernels.collective_matmul != "mosaic_gpu_adds"
        or not config.train.deterministic
        or layout.size("heads") <= 2,
        "kernels.collective_matmul = 'mosaic_gpu_adds': more than 2 devices add in any order, which "
        "train.deterministic = True rules out; choose 'mosaic_gpu'",
    )
    if config.mesh.copies:
        check_copies(config, layout, platform or device.platform)
    if config.offload.layered:
        which = offloaded(config)
        require(
            shape.loop != "scan",
            f"model.loop = {shape.loop!r}: with {which} the host runs layer after layer; choose 'unroll'",
        )
        require(
            config.remat.policy != "none",
            f"remat.policy = 'none': with {which} a layer keeps no more than what has a name; choose "
            "'projections', which recomputes the least, or another",
        )
    kept = "remat.keep_parameters = True"
    require(
        not (config.remat.keep_parameters and config.offload.layered),
        f"{kept}: with {offloaded(config)} a layer's come and go with its programs; choose False",
    )
    return layout


def check_sizes(config: RunConfig, layout: Layout) -> None:
    """Raises InputError, naming the key, where rows, heads or another size cannot be split as the mesh asks.
    layout: its mesh may be an abstract one."""
    train, shape = config.train, config.model
    sizes = {
        "train.rows / train.microbatches": ("batch", train.rows_at_once),
        "train.rows / train.microbatches × data.sequence": (
            "tokens",
            train.rows_at_once * config.data.sequence,
        ),
    }
    check_divisible(layout, sizes)
    dims = family.chain(shape).dims
    for axis in ("embed", "vocab"):
        named = any(axis == other for other, _ in dims)
        require(named, f"model.family = {shape.family!r}: no weight has the logical axis {axis!r}")
    require(
        layout.size("experts") == 1 or any(axis == "experts" for axis, _ in dims),
        f"mesh.expert = {layout.size('experts')}: model.family = {shape.family!r} has no experts to split; "
        "choose 1, and give the devices to mesh.fsdp",
    )
    for axis, size in dims:
        check_divisible(layout, {shape.key(axis, size): (axis, size)})
    check_groups(train, config.data.groups_of(train.rows), layout.size("batch"))


def check_vocabulary(config: RunConfig, tokens: int) -> None:
    """Raises InputError for a tokenizer of more tokens than the model has rows for. tokens: the highest id of
    what text becomes, and 1."""
    vocabulary = dict(family.chain(config.model).dims)["vocab"]  # which `validate` has found
    which = f"{config.model.key('vocab')} = {vocabulary}"
    require(tokens <= vocabulary, f"{which}: smaller than the tokenizer's {tokens}")
    if tokens < vocabulary:
        log.info("the tokenizer uses %d of %s", tokens, which)


def check_objective(config: RunConfig, units: Mapping[str, int]) -> None:
    """Raises InputError for an objective that the mix is not for. units: {source: documents that belong
    together}, 2 of pairs."""
    asked, mix = f"train.objective = {config.train.objective!r}", f"data.mix = {config.data.mix!r}"
    of_pairs = config.train.objective == "dpo"
    other = next((name for name, unit in units.items() if (unit == 2) != of_pairs), None)
    said = (
        "is not of pairs of answers; choose 'cross_entropy', or a mix of them"
        if of_pairs
        else "is of pairs, whose rejected answers would be trained on too; choose 'dpo', or another mix"
    )
    require(other is None, f"{asked}: source {other} of {mix} {said}")


def offloaded(config: RunConfig) -> str:
    """Returns the settings that make the step several programs."""
    return f"offload.level = {config.offload.level!r}, activations = {config.offload.activations!r}"


def check_copies(config: RunConfig, layout: Layout, platform: str) -> None:
    """Raises InputError where parameters cannot be moved by copies, or would not be."""
    asked = "mesh.transfers = 'copies'"
    processes = jax.process_count()
    require(
        platform != "gpu" or processes == 1,
        f"{asked}: GPUs of one process copy to each other, found {processes} processes; choose 'collectives'",
    )
    require(
        config.kernels.collective_matmul != "none" or layout.size("heads") == 1,
        f"{asked}: with kernels.collective_matmul = 'none' XLA places what moves; choose 'collectives'",
    )


def check_kernels(config: RunConfig, layout: Layout) -> None:
    """Raises InputError where an implementation that `kernels` names cannot run on these devices: a step is
    traced."""
    config = plain(dataclasses.replace(config, offload=OffloadConfig()))  # one program, which takes them all
    of_data = {"segments": 1, "sources": 1, "attention": attention_by(config)}
    with refusals_named(config), dispatch.assumed(layout.mesh.devices.flat[0].platform):
        made = assemble(replaced(config, {"model.loop": "scan"}), layout, **of_data)
        made.jitted.trace(made.abstract, made.batch)


def attention_by(config: RunConfig, platform: str | None = None) -> str:
    """Returns which attention is to run on `platform`, by default JAX's default backend.

    cuDNN's repeatable kernel takes memory that grows with rows × segments × heads × sequence²; the Triton
    kernels repeat bit for bit as they are.
    """
    chosen = config.kernels.attention
    repeatable = config.train.deterministic and (platform or jax.default_backend()) == "gpu"
    return "triton" if chosen == "auto" and repeatable else chosen


@contextlib.contextmanager
def refusals_named(config: RunConfig) -> Iterator[None]:
    """Raises InputError, with the setting behind it, for an implementation that cannot run what is made
    within."""
    try:
        yield
    except Unsupported as refusal:
        raise InputError(f"{setting_behind(config, refusal)}: {refusal}") from refusal


def setting_behind(config: RunConfig, refusal: Unsupported) -> str:
    """Returns the setting behind a refusal, as `key = value`: which implementation was named, or what has but
    one."""
    key = refusal.operation
    chosen = getattr(config.kernels, key)
    if key == "grouped_matmul" and chosen == "auto" and config.precision.float8_experts:
        return float8_setting(config)  # of all other grouped matmuls `auto` has one that always runs
    return f"kernels.{key} = {chosen!r}"


def left_wide(config: RunConfig) -> str:
    """Returns what to say of matrices that a setting of eight bits leaves as they are; empty without any."""
    float8 = float8_setting(config)
    asked = float8 or "lora.base = 'int8'" * (config.lora.on and config.lora.base == "int8")
    if not asked or config.precision.float8_experts or not has_experts(config):
        return ""
    other = "; precision.matmul = 'fp8_experts' has them multiplied in float8, on Hopper" if float8 else ""
    return f"{asked}: experts stay in {config.precision.compute}{other}"


def has_experts(config: RunConfig) -> bool:
    """Says whether a model has a mixture of experts in any of its blocks."""
    return any(stage.mixture is not None for stage in family.chain(config.model).layers)


def check_float8(device: jax.Device, setting: str = FLOAT8) -> None:
    """Raises InputError where XLA would widen float8 matmuls without a word. On a CPU it does, for tests.
    setting: that asks for them."""
    capability = nvidia_compute_capability() if device.platform == "gpu" else None
    require(
        device.platform == "cpu" or (capability is not None and capability >= (8, 9)),
        f"{setting}: needs an NVIDIA GPU of compute capability 8.9 or above (Ada, Hopper, "
        f"Blackwell), and here is {device.device_kind}; choose 'compute'",
    )


def check_float8_settings(config: RunConfig, layout: Layout) -> None:
    """Raises InputError, naming the setting, where one of a configuration in float8 rules that out."""
    require(
        not (config.lora.on and config.lora.base == "int8" and config.precision.float8),
        "lora.base = 'int8': is multiplied in precision.compute, and precision.matmul is "
        f"{config.precision.matmul!r}; choose lora.base = 'fp8', or precision.matmul = 'compute'",
    )
    which, chosen = f"with {float8_setting(config)}", config.kernels.collective_matmul
    if config.precision.float8_experts:
        asked, product = float8_setting(config), config.kernels.grouped_matmul
        without = f"model.family = {config.model.family!r} has no experts"
        require(has_experts(config), f"{asked}: {without}; choose 'fp8'")
        names = ("auto", *GROUPED_FLOAT8.names)
        require(
            product in names,
            f"kernels.grouped_matmul = {product!r}: {which} it is one of {', '.join(map(repr, names))}",
        )
    require(
        chosen in ("auto", "none") or layout.size("heads") == 1,
        f"kernels.collective_matmul = {chosen!r}: {which} matmuls and collectives are apart; choose 'auto'",
    )
    require(
        not config.mesh.copies,
        f"mesh.transfers = 'copies': {which} parameters are gathered in float8; choose 'collectives'",
    )
    require(
        not config.remat.keep_parameters,
        f"remat.keep_parameters = True: {which} matmuls take them in float8; choose False",
    )
