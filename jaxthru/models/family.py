"""Model families: each is one file, and known by the configuration class that stands in it.

A family's module exports `Config`, a `FamilyConfig`; `stages(config)`, its chain of stages (models/stage.py);
and `train_flops(config, tokens, attention_span)`, the floating-point operations that one update needs.
"""

import dataclasses
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, ClassVar, Literal

import jax

from jaxthru.models.published import Published, Tensor
from jaxthru.runtime import plain
from jaxthru.runtime.errors import InputError, did_you_mean, require
from jaxthru.runtime.weights import WeightInfo

SHIPPED = ("llama", "gemma", "moe")
"""The families of jaxthru, modules of this package; the first is the default."""


@dataclasses.dataclass(frozen=True)
class FamilyConfig:
    """What every family's `Config` has.

    family: `llama`, or the whole name of a module of your own that has a `Config`, as `package.module`.
    loop: `scan` compiles each block of the repeated pattern once and loops over stacked parameters; `unroll`
    compiles each layer, and makes faster steps. `auto` takes the faster that fits a GPU (build/choices.py);
    elsewhere it scans.
    pretrained: a folder of published weights in Hugging Face's form, to start from. Its config.json gives the
    model's shape, and its tokenizer reads the text; a key of `model` that is set must agree with it.
    """

    TRAINING: ClassVar[tuple[str, ...]] = ()
    """Keys that say how it is trained, and are no part of a shape that published weights have."""

    loop: Literal["auto", "scan", "unroll"] = dataclasses.field(default="auto", kw_only=True)
    pretrained: str | None = dataclasses.field(default=None, kw_only=True)

    @property
    def family(self) -> str:
        """The family's name: of a shipped one its file's, otherwise the whole name of the module."""
        return type(self).__module__.removeprefix(f"{__package__}.")

    @property
    def longest(self) -> int | None:
        """The most tokens that a row may have, `max_sequence` where a family has it; None is no bound."""
        return getattr(self, "max_sequence", None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a run is to say of the model before it starts, lines."""
        return ()

    def key(self, axis: str, size: int | None = None) -> str:
        """Returns the key that sets the size of a logical axis, by its name, as `vocabulary` does of `vocab`;
        without one, the axis within the model. size: of several keys, that which has this value."""
        return f"model.{self.field(axis, size) or axis}"

    def field(self, axis: str, size: int | None = None) -> str | None:
        """Returns the field that sets the size of a logical axis, None without one. size: see `key`."""
        names = [field.name for field in dataclasses.fields(self)]
        named = [name for name in names if name == axis or name.startswith(axis) or name.endswith(f"_{axis}")]
        named.sort(key=lambda name: (name != axis, not name.startswith(axis)))
        return next((name for name in named if size in (None, getattr(self, name))), next(iter(named), None))


def module_of(config: FamilyConfig) -> ModuleType:
    """Returns the module that a configuration is of."""
    return sys.modules[type(config).__module__]


def chain(config: FamilyConfig) -> Any:
    """Returns the chain of stages (`stage.Chain`) of a configuration."""
    return module_of(config).stages(config)


def is_published(config: FamilyConfig) -> bool:
    """Says whether the family of a configuration has a table of published weights."""
    return isinstance(getattr(module_of(config), "PUBLISHED", None), Published)


def published(config: FamilyConfig) -> Published:
    """Returns what the family of a configuration has been published as. Raises InputError without a table."""
    require(
        is_published(config),
        f"model.family = {config.family!r}: has no table of published weights, `PUBLISHED`, see "
        "jaxthru.models.published; without one it is neither read from published weights nor exported",
    )
    return module_of(config).PUBLISHED


def published_weights(
    config: FamilyConfig, table: Callable[[Any], Iterable[Tensor]] | None = None
) -> list[tuple[Tensor, WeightInfo, tuple[int, ...]]]:
    """Returns each published tensor of a configuration in the order of its table, what its weight is, and the
    weight's shape. table: in place of the family's own. Raises InputError without one, ValueError for one
    that has not each weight once."""
    model, known = chain(config), []

    def weights(stage: Any) -> dict[tuple[str, ...], tuple[WeightInfo, tuple[int, ...]]]:
        if not (found := [about for other, about in known if other == stage]):
            leaves, infos = jax.tree_util.tree_leaves_with_path(stage.shapes), jax.tree.leaves(stage.weights)
            paths = [tuple(str(key.key) for key in keys) for keys, _ in leaves]
            shapes = [leaf.shape for _, leaf in leaves]
            found = [dict(zip(paths, zip(infos, shapes, strict=True), strict=True))]
            known.append((stage, found[0]))
        return found[0]

    stages = {("embedding",): model.embedding, ("head",): model.head}
    stages |= {("layers", str(layer)): stage for layer, stage in enumerate(model.layers)}
    rest = {(*at, *path): about for at, stage in stages.items() for path, about in weights(stage).items()}
    rows, names, parts = [], set(), set()
    left = {path: math.prod(shape) for path, (_, shape) in rest.items()}
    for tensor in (table or published(config).tensors)(config):
        if tensor.path not in rest or tensor.name in names or (tensor.path, tensor.part) in parts:
            raise ValueError(f"{tensor}: its path has no weight, or it or its name comes twice")
        rows.append((tensor, *rest[tensor.path]))
        names.add(tensor.name)
        parts.add((tensor.path, tensor.part))
        left[tensor.path] -= math.prod(tensor.own(*rest[tensor.path])[1])
    if lacking := [path for path, size in left.items() if size]:
        raise ValueError(f"no published tensor, or too many, for the weights {lacking[:3]}")
    return rows


def publications() -> Iterator[tuple[type[FamilyConfig], Published]]:
    """Yields `Config` and `PUBLISHED` of the families that have both: the shipped ones, then modules of the
    user's own that are already imported."""
    shipped = [config_class(name) for name in SHIPPED]
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    own = [vars(module).get("Config") for module in modules]
    own = [each for each in own if isinstance(each, type) and issubclass(each, FamilyConfig)]
    for each in dict.fromkeys(shipped + own):
        found = getattr(sys.modules.get(each.__module__), "PUBLISHED", None)
        if isinstance(found, Published):
            yield each, found


def to_plain(config: FamilyConfig) -> dict[str, Any]:
    """Returns a configuration as plain values, the family's name before its keys. Raises InputError for one
    that its family's name does not lead back to."""
    require(
        config_class(config.family) is type(config),
        f"model.family = {config.family!r}: is another class than that of model; define `Config` in a module "
        "of its own, whose name no family of jaxthru has",
    )
    return {"family": config.family, **dataclasses.asdict(config)}


def from_plain(tree: Any) -> FamilyConfig:
    """Returns the configuration that plain values describe. Raises InputError."""
    keys = {key: value for key, value in tree.items() if key != "family"} if isinstance(tree, dict) else tree
    try:
        return plain.build(config_class(name_in(tree)), keys, "model.")
    except InputError:
        raise
    except (TypeError, ValueError) as error:  # of a `__post_init__` of the user's own
        raise InputError(f"model: {error}") from error


def name_in(tree: Any) -> Any:
    """Returns the name of the family that plain values are of."""
    return tree.get("family", SHIPPED[0]) if isinstance(tree, dict) else SHIPPED[0]


def config_class(name: Any, *, trusted: bool = False) -> type[FamilyConfig]:
    """Returns the `Config` of a family by its name: a shipped one, or a module of the user's own.

    trusted: whoever starts the run gave the name, so its module may be imported. By what is stored none ever
    is. Raises InputError.
    """
    plain.check("model.family", name, str)
    module = f"{__package__}.{name}" if name in SHIPPED else name
    hint = did_you_mean(name, SHIPPED)
    require(
        trusted or name in SHIPPED or name in sys.modules,
        f"model.family = {name!r}: is no family of jaxthru{hint}; one of your own is named by --set "
        f"model.family={name} or a .py config: what is stored imports no code",
    )
    try:
        found = getattr(importlib.import_module(module), "Config", None)
    except (Exception, SystemExit) as error:
        raise InputError(f"model.family = {name!r}: {type(error).__name__}: {error}{hint}") from error
    fits = isinstance(found, type) and issubclass(found, FamilyConfig)
    fits = fits and "__dataclass_fields__" in vars(found)  # of its own, not inherited
    require(fits, f"model.family = {name!r}: must define `Config`, a frozen dataclass and FamilyConfig")
    for export in ("stages", "train_flops"):
        lacks = not callable(getattr(sys.modules[found.__module__], export, None))
        require(not lacks, f"model.family = {name!r}: must define `{export}`, see jaxthru.models.family")
    return found
