"""What `auto` stands for where nothing is measured: on a CPU, and where a model is used and not trained."""

import dataclasses
from typing import Any

from jaxthru.config import RunConfig

AUTO = {
    "model.loop": "scan",
    "remat.policy": "none",
    "offload.level": "none",
    "precision.matmul": "compute",
    "optim.state": "float32",
    "train.loss_chunk": "small",
    "mesh.transfers": "collectives",
}
"""Keys that are chosen by memory and speed (build/choices.py) -> what they are where nothing is chosen."""
SEARCHED = ("model.loop", "remat.policy", "offload.level")
"""Those for which a search compiles what may fit; others are chosen beside them."""
NUMERIC = ("precision.matmul", "optim.state")
"""Those that change numbers: chosen by arithmetic alone, and kept by a run on whatever devices it goes on."""


def get(config: RunConfig, key: str) -> Any:
    """Returns the value of a key, by its whole name."""
    group, _, name = key.partition(".")
    return getattr(getattr(config, group), name)


def searched(config: RunConfig) -> list[str]:
    """Returns the keys of SEARCHED that are still `auto`."""
    return [key for key in SEARCHED if get(config, key) == "auto"]


def replaced(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """Returns a configuration with other values of keys, by their whole names."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    changed = {group: dataclasses.replace(getattr(config, group), **keys) for group, keys in groups.items()}
    return dataclasses.replace(config, **changed) if changed else config


def plain(config: RunConfig) -> RunConfig:
    """Returns a configuration with each `auto` of AUTO replaced. A step of several programs is given what it
    takes: unrolled layers, and a policy that keeps names."""
    values = {key: value for key, value in AUTO.items() if get(config, key) == "auto"}
    if config.offload.layered:
        values |= {key: value for key, value in LAYERED.items() if key in values}
    return replaced(config, values)


def float8_setting(config: RunConfig) -> str:
    """Returns the setting by which the blocks' linear layers are multiplied in float8; empty where they are
    not."""
    by_base = config.lora.on and config.lora.base == "fp8"
    precision = config.precision
    return f"precision.matmul = {precision.matmul!r}" if precision.float8 else "lora.base = 'fp8'" * by_base


LAYERED = {"model.loop": "unroll", "remat.policy": "projections"}
