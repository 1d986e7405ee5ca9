"""Model families: each is one file, and known by the configuration class that stands in it.

A family's module exports `Config`, a `FamilyConfig`; `stages(config)`, its chain of stages (models/stage.py);
and `train_flops(config, tokens, attention_span)`, the floating-point operations that one update needs.
"""

import dataclasses
import importlib
import sys
from types import ModuleType
from typing import Literal

from jaxthru.runtime.errors import InputError, did_you_mean, require

SHIPPED = ("llama",)
"""The families of jaxthru, modules of this package."""


@dataclasses.dataclass(frozen=True)
class FamilyConfig:
    """What every family's `Config` has.

    loop: `scan` compiles each block of the repeated pattern once and loops over stacked parameters; `unroll`
    compiles each layer.
    """

    loop: Literal["scan", "unroll"] = "scan"

    @property
    def family(self) -> str:
        """The family's name: of a shipped one its file's, otherwise the whole name of the module."""
        return type(self).__module__.removeprefix(f"{__package__}.")


def module_of(config: FamilyConfig) -> ModuleType:
    """Returns the module that a configuration is of."""
    return sys.modules[type(config).__module__]


def config_class(name: str, *, trusted: bool) -> type[FamilyConfig]:
    """Returns the `Config` of a family by its name.

    trusted: import the module of another's family. Only whoever starts a run may ask for that: nothing stored
    runs code. Raises InputError.
    """
    if name in SHIPPED:
        module = importlib.import_module(f"{__package__}.{name}")
    else:
        require(
            "." in name,
            f"model.family = {name!r}{did_you_mean(name, SHIPPED)}, or package.module of your own",
        )
        require(
            trusted or name in sys.modules,
            f"model.family = {name!r}: is no family of jaxthru, and what is stored imports no code; say it "
            f"yourself: --set model.family={name}",
        )
        try:
            module = importlib.import_module(name)
        except Exception as error:
            raise InputError(f"model.family = {name!r}: {type(error).__name__}: {error}") from error
    found = getattr(module, "Config", None)
    fits = dataclasses.is_dataclass(found) and issubclass(found, FamilyConfig)
    require(fits, f"model.family = {name!r}: must define `Config`, a frozen dataclass and FamilyConfig")
    return found
