"""What moves each part of the step (parts.toml): advice is given and changes are explained by it."""

import tomllib
from pathlib import Path
from typing import NamedTuple


class Finding(NamedTuple):
    """What a lint rule finds; see parts.toml."""

    parts: list[str]
    line: str
    key: str
    value: str
    remedy: str


_TABLE = tomllib.loads(Path(__file__).with_name("parts.toml").read_text(encoding="utf-8"))

TITLES = {name: (part["title"], part["said"]) for name, part in _TABLE["parts"].items()}
"""Part -> its title, and what it is in a sentence."""

CAUSES = {name: part["cause"] for name, part in _TABLE["parts"].items() if "cause" in part}
"""Part -> what a change of it says by itself."""

SETTINGS = {
    name: tuple(key for one in part["settings"] for key in _TABLE["several"].get(one, [one]))
    for name, part in _TABLE["parts"].items()
}
"""Part -> keys of the configuration, or groups of them, that move it."""

FINDINGS = {rule: Finding(**found) for rule, found in _TABLE["findings"].items()}
"""Lint rule -> what its findings cost, and what to do about them."""

TEXTS = _TABLE["advice"]
"""Part -> key -> what advice says, with places for numbers; "fixed": what a step has whatever its tokens."""
