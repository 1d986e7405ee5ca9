"""The configuration of a run: composed of the parts' own dataclasses, loaded from a `.py` or `.json` file."""

import argparse
import dataclasses
import json
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxthru import config_file, moved
from jaxthru.data.loading.dataset import DataConfig
from jaxthru.engine.offload import OffloadConfig
from jaxthru.engine.step import TrainConfig
from jaxthru.huggingface import adapter, pretrained
from jaxthru.models import family, gemma, moe  # noqa: F401 - for configuration files
from jaxthru.models.family import FamilyConfig
from jaxthru.models.kernels import KernelsConfig
from jaxthru.models.layers import PrecisionConfig
from jaxthru.models.llama import Config as ModelConfig
from jaxthru.models.llama import RopeScaling as RopeScaling
from jaxthru.models.lora import LoraConfig
from jaxthru.models.remat import RematConfig
from jaxthru.optim.optimizer import OptimConfig
from jaxthru.profile.collect.trace import ProfileConfig
from jaxthru.runtime import command_line, plain
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError, require
from jaxthru.runtime.mesh import MeshConfig
from jaxthru.training.checkpoint_config import CheckpointConfig, LocalTierConfig  # noqa: F401 - the same
from jaxthru.training.cost import CostConfig
from jaxthru.training.evaluate import EvaluateConfig
from jaxthru.training.metrics import MetricsConfig

moved.take_old_keys(ModelConfig, "model")
moved.take_old_keys(MeshConfig, "mesh")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run. Each group belongs to the part of jaxthru that it is named after.
    `ModelConfig` is that of the default family, llama.

    train: how long the run is, and how large a step.
    model: the family of the model, and its shape.
    data: which text the run reads, and how it is packed into rows.
    optim: the optimizer, the learning rate and its schedule.
    mesh: how many devices stand along each mesh axis.
    precision: number formats of weights and matmuls.
    remat: what the backward pass computes again instead of keeping it in memory.
    offload: what lives in the host's memory instead of the device's.
    checkpoint: when the state is saved, and which checkpoints are kept.
    evaluate: when the loss on held-out text is measured, and on how much of it.
    metrics: where the numbers of each step are written.
    profile: which steps are profiled.
    kernels: which implementation of each operation runs.
    cost: what a device costs, in dollars, and in watts beside its own.
    lora: adapters that are trained in the model's place.
    """

    name = "run"  # of the file that `load` read, for run directories: no key, and of no other configuration
    file, overridden = None, frozenset()  # that `load` read, and keys that it was told: no keys either

    train: TrainConfig = TrainConfig()
    model: FamilyConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    mesh: MeshConfig = MeshConfig()
    precision: PrecisionConfig = PrecisionConfig()
    remat: RematConfig = RematConfig()
    offload: OffloadConfig = OffloadConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    metrics: MetricsConfig = MetricsConfig()
    profile: ProfileConfig = ProfileConfig()
    kernels: KernelsConfig = KernelsConfig()
    cost: CostConfig = CostConfig()
    lora: LoraConfig = LoraConfig()

    def __post_init__(self):
        plain.check_groups(self)
        _take_old_keys(self)
        _take_shape(self)
        if self.lora.adapter:
            object.__setattr__(self, "lora", adapter.taken(self.lora))
        sequence, longest = self.data.sequence, self.model.longest
        said = f"data.sequence = {sequence}: longer than model.max_sequence = {longest}"
        require(longest is None or sequence <= longest, said)
        at, steps = self.profile.at, self.train.steps
        require(at <= steps, f"profile.at = {at}: beyond the last step, train.steps = {steps}")
        groups = self.data.groups
        require(
            groups is None or self.train.rows % groups == 0,
            f"data.groups = {groups}: must divide train.rows = {self.train.rows}",
        )


CHANGEABLE = (
    *("train.steps", "optim.schedule_steps", "train.microbatches", "train.loss_chunk", "model.loop"),
    *("kernels.", "mesh.", "remat.", "offload.", "checkpoint.", "evaluate.", "metrics.", "profile.", "cost."),
    *("train.stopped_exit_code", "data.loaders", "data.workers", "data.tokenizer"),  # a path to the same one
)
"""Keys, and groups of keys, that may differ when a run directory is resumed."""


def changeable(key: str) -> bool:
    """Says whether a run may be resumed with another value of a key, by its whole name."""
    return key.startswith(CHANGEABLE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives a command the arguments of `load`."""
    add = parser.add_argument
    file = "a .py file, the config.json of a run, or the name of a file in configs/"
    add("--config", required=True, metavar="FILE", help=file)
    command_line.add_overrides(parser)


def from_arguments(arguments: argparse.Namespace) -> RunConfig:
    """Returns the configuration that a command line asks for. Raises InputError, also for a key set twice."""
    keys = config_file.keys(arguments.overrides)
    twice = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
    require(twice is None, f"--set {twice}: is given twice; which one counts?")
    return load(arguments.config, arguments.overrides)


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Returns the configuration in `path` with each `a.b=value` of `overrides` applied, in turn.

    path: a `.py` file with `def config() -> RunConfig`, a `.json` file written by `dump`, or a name that
    `config_file.find` knows. overrides: of them `model.family` comes first: another family than the file's
    begins from its defaults. A module of the user's own is imported if that names it, but not if a `.json`
    does.
    Raises InputError for a file that cannot be read, an unknown key, a wrong type or an impossible value.
    """
    try:
        file = config_file.find(path)
        tree = moved.renewed(_read(file))
        config = _changed(tree, overrides)
        object.__setattr__(config, "name", file.stem)
        object.__setattr__(config, "file", file)
        object.__setattr__(config, "overridden", frozenset(config_file.keys(overrides)))
        return config
    except OSError as error:
        raise InputError(f"--config {path}: cannot be read ({error.strerror})") from error
    except RecursionError as error:
        raise InputError(f"--config {path}: is nested too deep") from error


def changed(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Returns a configuration with each `a.b=value` of `overrides` applied, as `load` does."""
    return _changed(to_dict(config), overrides)


def _changed(tree: dict, overrides: Sequence[str]) -> RunConfig:
    """Returns the configuration of nested plain values, with `overrides` applied."""
    words = dict(_words(overrides, tree))
    for key, text in words.items():
        if key == "model.pretrained":
            pretrained.leave(tree, text)
        _set(tree, key, text)
    config = from_dict(tree)
    if config.model.pretrained:
        named = {*words, *config_file.keys(overrides)}
        asked = {key: value for key, value in plain.flat(tree).items() if key in named}
        pretrained.check_set(asked, plain.flat(to_dict(config)), config.model.pretrained)
    return config


def load_own(path: Path) -> RunConfig:
    """Returns the configuration in the config.json of a run directory, which alone says what its checkpoints
    are of. Raises InputError, saying whose file it is, if that is missing or damaged."""
    try:
        require(path.is_file(), f"--config {path}: no such file")
        return load(path)
    except InputError as error:
        said = f"{path.parent} holds a run whose own config.json cannot be used"
        raise InputError(f"{said}: {error}; put it back as it was, or give another --run-dir") from error


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Returns the configuration as nested plain values."""
    return dataclasses.asdict(config) | {"model": family.to_plain(config.model)}


def from_dict(tree: dict) -> RunConfig:
    """Returns the configuration described by nested plain values. Raises InputError."""
    tree = moved.renewed(tree)
    return plain.build(RunConfig, tree | {"model": family.from_plain(tree.get("model", {}))})


def dump(config: RunConfig, path: Path) -> None:
    """Writes the resolved configuration as JSON, in one piece."""
    write_atomically(path, json.dumps(to_dict(config), indent=2) + "\n")


def check_change(old: RunConfig, new: RunConfig, where: Path) -> list[str]:
    """Returns what differs, one `group.key (old → new)` each. Raises InputError if that cannot be resumed.

    where: the run directory, for the message.
    """
    before, after = plain.flat(to_dict(old)), plain.flat(to_dict(new))
    left_open = {k for k, value in after.items() if value == "auto"}  # what the run has recorded is kept
    left_open |= {"offload.fraction", "offload.prefetch"} if "offload.level" in left_open else set()
    differ = [k for k in sorted(before | after) if before.get(k) != after.get(k) and k not in left_open]
    changed = {k: f"{k} ({before.get(k)!r} → {after.get(k)!r})" for k in differ}
    if "model.family" in changed:  # their other keys have little to do with each other
        changed = {k: line for k, line in changed.items() if k == "model.family" or k[:6] != "model."}
    fixed = [line for key, line in changed.items() if not changeable(key)]
    require(
        not fixed,
        f"{where} holds a run of another configuration: {', '.join(fixed)}; "
        "give another --run-dir, or the values that the run was started with",
    )
    return list(changed.values())


def _take_old_keys(config: RunConfig) -> None:
    """Moves what groups of a new configuration were made with, and is no key of theirs any more."""
    names = [field.name for field in dataclasses.fields(config)]
    old = {name: keys for name in names if (keys := getattr(getattr(config, name), "old_keys", None))}
    chosen = {key: value for key, value in dataclasses.asdict(config.kernels).items() if value != "auto"}
    for name, keys in moved.renewed(old | {"kernels": chosen}).items() if old else ():
        part = getattr(config, name)
        object.__setattr__(config, name, plain.build(type(part), dataclasses.asdict(part) | keys, f"{name}."))


def _take_shape(config: RunConfig) -> None:
    """Gives a new configuration the shape and the tokenizer of `model.pretrained`. Raises InputError."""
    if config.model.pretrained is None:
        return
    object.__setattr__(config, "model", pretrained.taken(config.model))
    if config.data.tokenizer is None:
        data = dataclasses.replace(config.data, tokenizer=config.model.pretrained)
        object.__setattr__(config, "data", data)


def _read(path: Path) -> dict:
    """Returns the nested plain values of a configuration's file."""
    if path.suffix == ".py":
        config = config_file.run(path)
        require(isinstance(config, RunConfig), f"--config {path}: config() must return a RunConfig")
        return to_dict(config)
    require(path.suffix == ".json", f"--config {path}: must end in .py or .json")
    return config_file.read_json(path)


def _words(overrides: Sequence[str], tree: dict) -> Iterator[tuple[str, str]]:
    """Yields the key and the text of each override, by its new name if it has one; of the nested plain values
    the model is made one of the family that they name."""
    words: dict[str, Any] = {"model": {}}
    for override in overrides:
        key, separator, text = override.partition("=")
        require(bool(separator), f"--set {override}: must look like group.key=value")
        group, _, name = key.strip().partition(".")
        words.setdefault(group, {})[name] = text.strip()
    found, named = family.name_in(tree.get("model")), words["model"].get("family")
    if named is not None:
        family.config_class(named, trusted=True)
        if named != found:
            tree["model"] = {"family": named}
    words["model"]["family"] = family.name_in(tree.get("model"))
    for group, texts in moved.renewed(words).items():
        for name, text in texts.items():
            if (group, name) != ("model", "family"):
                yield f"{group}.{name}" if name else group, text


def _set(tree: dict, key: str, text: str) -> None:
    """Sets `group.key` of the nested plain values to `text`, read as the type declared for it."""
    *path, last = key.split(".")
    cls, group, prefix = RunConfig, tree, ""
    for name in path:
        declared = _declared(cls, name, prefix, key, text, tree)
        cls = group_in(declared, group.get(name))
        require(cls is not None, f"unknown key {key} = {text!r}: {prefix}{name} has no keys of its own")
        if group.get(name) is None:
            group[name] = {}
        group, prefix = group[name], f"{prefix}{name}."
        require(isinstance(group, dict), f"{prefix[:-1]} = {group!r}: must be a group of keys")
    declared = _declared(cls, last, prefix, key, text, tree)
    require(group_in(declared) is None or text == "None", f"{key} is a group: set one of its keys")
    group[last] = plain.parse(key, text, declared)


def _declared(cls: type, name: str, prefix: str, key: str, text: str, tree: dict) -> Any:
    """Returns the declared type of a field on the way to a key. Raises InputError if there is none."""
    valid = plain.fields(cls)

    def unknown() -> str:
        hint = plain.nearest(key, declared_keys(family.name_in(tree.get("model"))))
        level = f"keys of {prefix[:-1]}" if prefix else "groups"
        return f"unknown key {key} = {text!r}{hint or f'; the {level} are {", ".join(sorted(valid))}'}"

    require(name in valid, unknown)
    return valid[name]


def declared_keys(model_family: Any = family.SHIPPED[0]) -> dict[str, Any]:
    """Returns {name: declared type} of all groups and keys, each by its whole name, as `optim.clip`."""
    return {"model.family": str, **dict(_walk(RunConfig, "", {"family": model_family}))}


def _walk(cls: type, prefix: str, tree: Any) -> Iterator[tuple[str, Any]]:
    for name, declared in plain.fields(cls).items():
        yield prefix + name, declared
        if (group := group_in(declared, tree)) is not None:
            yield from _walk(group, f"{prefix}{name}.", None)


def group_in(declared: Any, tree: Any = None) -> type | None:
    """Returns the dataclass in `X` or `X | None`, if there is one; of a model, its family's."""
    kind = plain.without_none(declared)
    if kind is FamilyConfig:
        return family.config_class(family.name_in(tree))
    return kind if dataclasses.is_dataclass(kind) else None


if __name__ == "__main__":  # `jaxthru.config` itself is another module then, and the one that counts
    runpy.run_module("jaxthru.config_reference", run_name="__main__")
