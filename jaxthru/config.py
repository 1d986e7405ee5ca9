"""The configuration of a run: composed of the parts' own dataclasses, loaded from a `.py` or `.json` file."""

import argparse
import dataclasses
import json
import math
import runpy
import types
import typing
from pathlib import Path
from typing import Any, Literal

from jaxthru.data.loader import DataConfig
from jaxthru.models.layers import PrecisionConfig
from jaxthru.models.llama import ModelConfig
from jaxthru.models.remat import RematConfig
from jaxthru.optim.optimizer import OptimConfig
from jaxthru.profile.collect.trace import ProfileConfig
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError, did_you_mean, require
from jaxthru.runtime.mesh import MeshConfig
from jaxthru.training.checkpoint import CheckpointConfig
from jaxthru.training.evaluate import EvaluateConfig
from jaxthru.training.metrics import MetricsConfig
from jaxthru.training.offload import OffloadConfig
from jaxthru.training.step import TrainConfig


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run. Each group belongs to the part of jaxthru that it is named after."""

    train: TrainConfig = TrainConfig()
    model: ModelConfig = ModelConfig()
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

    def __post_init__(self):
        check_types(self)
        require(
            self.data.sequence <= self.model.max_sequence,
            f"data.sequence = {self.data.sequence}: longer than "
            f"model.max_sequence = {self.model.max_sequence}",
        )
        at, steps = self.profile.at, self.train.steps
        require(at <= steps, f"profile.at = {at}: beyond the last step, train.steps = {steps}")
        groups = self.data.groups
        require(
            groups is None or self.train.rows % groups == 0,
            f"data.groups = {groups}: must divide train.rows = {self.train.rows}",
        )


CHANGEABLE = (
    *("train.steps", "train.microbatches", "data.loaders"),
    *("mesh.", "remat.", "offload.", "checkpoint.", "evaluate.", "metrics.", "profile."),
)
"""Keys, and groups of keys, that may differ when a run directory is resumed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives a command the arguments of `load`."""
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="a .py or a resolved .json")
    add("--set", action="append", default=[], dest="overrides", metavar="GROUP.KEY=VALUE", help="repeatable")


def from_arguments(arguments: argparse.Namespace) -> RunConfig:
    """Returns the configuration that a command line asks for. Raises InputError, also for a key set twice."""
    keys = [override.partition("=")[0].strip() for override in arguments.overrides]
    twice = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
    require(twice is None, f"--set {twice}: is given twice; which one counts?")
    return load(arguments.config, arguments.overrides)


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Returns the configuration in `path` with each `a.b=value` of `overrides` applied, in turn.

    path: a `.py` file with `def config() -> RunConfig`, or a `.json` file written by `dump`.
    Raises InputError for a file that cannot be read, an unknown key, a wrong type or an impossible value.
    """
    try:
        tree = _read(Path(path))
        for override in overrides:
            key, separator, text = override.partition("=")
            require(bool(separator), f"--set {override}: must look like group.key=value")
            _set(tree, key.strip(), text.strip())
        return from_dict(tree)
    except OSError as error:
        raise InputError(f"--config {path}: cannot be read ({error.strerror})") from error
    except RecursionError as error:
        raise InputError(f"--config {path}: is nested too deep") from error


def load_own(path: Path) -> RunConfig:
    """Returns the configuration in the config.json of a run directory, which alone says what its checkpoints
    are of. Raises InputError, saying whose file it is, if that is missing or damaged."""
    try:
        return load(path)
    except InputError as error:
        said = f"{path.parent} holds a run whose own config.json cannot be used"
        raise InputError(f"{said}: {error}; put it back as it was, or give another --run-dir") from error


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Returns the configuration as nested plain values."""
    return dataclasses.asdict(config)


def from_dict(tree: dict) -> RunConfig:
    """Returns the configuration described by nested plain values. Raises InputError."""
    return _build(RunConfig, tree, "")


def dump(config: RunConfig, path: Path) -> None:
    """Writes the resolved configuration as JSON, in one piece."""
    write_atomically(path, json.dumps(to_dict(config), indent=2) + "\n")


def check_change(old: RunConfig, new: RunConfig, where: Path) -> list[str]:
    """Returns what differs, one `group.key (old → new)` each. Raises InputError if that cannot be resumed.

    where: the run directory, for the message.
    """
    before, after = _flatten(to_dict(old)), _flatten(to_dict(new))
    changed = {k: f"{k} ({before.get(k)!r} → {after.get(k)!r})" for k in sorted(before | after)}
    changed = {k: line for k, line in changed.items() if before.get(k) != after.get(k)}
    fixed = [line for key, line in changed.items() if not key.startswith(CHANGEABLE)]
    require(
        not fixed,
        f"{where} holds a run of another configuration: {', '.join(fixed)}; "
        "give another --run-dir, or the values that the run was started with",
    )
    return list(changed.values())


def check_types(config: RunConfig) -> None:
    """Raises InputError for the first field whose value is not of its declared type."""
    for group in dataclasses.fields(config):
        part = getattr(config, group.name)
        require(
            isinstance(part, group.type),
            f"{group.name} is {type(part).__name__}: must be a {group.type.__name__}",
        )
        for field in dataclasses.fields(part):
            key, value = f"{group.name}.{field.name}", getattr(part, field.name)
            _check(key, value, field.type)


def _read(path: Path) -> dict:
    """Returns the nested plain values of a configuration's file."""
    require(path.is_file(), f"--config {path}: no such file")
    if path.suffix == ".py":
        return to_dict(_run_config_file(path))
    require(path.suffix == ".json", f"--config {path}: must end in .py or .json")
    try:
        tree = json.loads(path.read_text(), object_pairs_hook=_group)
    except ValueError as error:
        raise InputError(f"--config {path}: not valid JSON ({error})") from error
    require(isinstance(tree, dict), f"--config {path}: must hold one JSON object")
    return tree


def _group(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object. Raises ValueError for a key that stands twice, of which JSON takes the last."""
    group = dict(pairs)
    if len(group) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return group


def _run_config_file(path: Path) -> RunConfig:
    try:
        function = runpy.run_path(str(path)).get("config")
        require(callable(function), f"--config {path}: must define `def config() -> RunConfig`")
        config = function()
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # it may call sys.exit
        raise InputError(f"--config {path}: {type(error).__name__}: {error}") from error
    require(isinstance(config, RunConfig), f"--config {path}: config() must return a RunConfig")
    return config


def _build(cls: type, tree: Any, prefix: str) -> Any:
    """Returns an instance of the dataclass `cls` from plain values; `prefix` names it in errors."""
    require(isinstance(tree, dict), f"{prefix.rstrip('.') or 'config'} = {tree!r}: must be a group of keys")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for name, value in tree.items():
        require(name in fields, f"unknown key {prefix}{name} = {value!r}{did_you_mean(name, list(fields))}")
        declared, nested = fields[name].type, _dataclass_in(fields[name].type)
        if nested and value is not None:
            values[name] = _build(nested, value, f"{prefix}{name}.")
            continue
        _check(f"{prefix}{name}", value, declared)
        values[name] = float(value) if type(value) is int and _matches(0.5, declared) else value
    return cls(**values)


def _check(key: str, value: Any, declared: Any) -> None:
    """Raises InputError unless a key's value is of its declared type, and finite."""
    require(not isinstance(value, int) or abs(value) < 2**64, f"{key}: is too large a number")
    require(_matches(value, declared), f"{key} = {value!r}: must be {_describe(declared)}")
    require(not isinstance(value, float) or math.isfinite(value), f"{key} = {value}: must be finite")


def _set(tree: dict, key: str, text: str) -> None:
    """Sets `group.key` of the nested plain values to `text`, read as the type declared for it."""
    *path, last = key.split(".")
    cls: type | None = RunConfig
    for depth, name in enumerate(path):
        prefix = "".join(part + "." for part in path[:depth])
        cls = _dataclass_in(_field_type(cls, name, prefix, text))
        require(cls is not None, f"unknown key {key} = {text!r}: {prefix}{name} has no keys of its own")
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
        require(isinstance(tree, dict), f"{prefix}{name} = {tree!r}: must be a group of keys")
    declared = _field_type(cls, last, "".join(part + "." for part in path), text)
    require(_dataclass_in(declared) is None or text == "None", f"{key} is a group: set one of its keys")
    tree[last] = _parse(key, text, declared)


def _field_type(cls: type, name: str, prefix: str, text: str) -> Any:
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
    require(name in fields, f"unknown key {prefix}{name} = {text!r}{did_you_mean(name, list(fields))}")
    return fields[name]


def _parse(key: str, text: str, declared: Any) -> Any:
    """Returns the first reading of `text` that the declared type accepts."""
    readings: list[Any] = [text]
    if text in ("None", "none", "null"):
        readings.insert(0, None)
    if text.lower() in ("true", "false"):
        readings.insert(0, text.lower() == "true")
    for number in (int, float):
        try:
            readings.append(number(text.replace("_", "")))
        except ValueError:
            continue
    for value in readings:
        if _matches(value, declared):
            return value
    choices = typing.get_args(declared) if typing.get_origin(declared) is Literal else ()
    hint = did_you_mean(text, [str(choice) for choice in choices]) if choices else ""
    raise InputError(f"{key} = {text!r}: must be {_describe(declared)}{hint if '?' in hint else ''}")


def _dataclass_in(declared: Any) -> type | None:
    """Returns the dataclass in `X` or `X | None`, if there is one."""
    options = typing.get_args(declared) if isinstance(declared, types.UnionType) else (declared,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


def _matches(value: Any, declared: Any) -> bool:
    if isinstance(declared, types.UnionType):
        return any(_matches(value, option) for option in typing.get_args(declared))
    if typing.get_origin(declared) is Literal:
        return value in typing.get_args(declared)
    if declared is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if declared is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, declared)


def _describe(declared: Any) -> str:
    if isinstance(declared, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(declared))
    if typing.get_origin(declared) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(declared))
    return "None" if declared is types.NoneType else declared.__name__


def _flatten(tree: dict, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
