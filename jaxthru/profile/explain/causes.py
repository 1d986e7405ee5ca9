"""The likely cause of a change between two runs: a setting, a finding, or the kernel that grew."""

import dataclasses
from typing import Any

from jaxthru.profile.account.ledger import Ledger, Lint
from jaxthru.profile.explain.breakdown import MATMUL_PARTS
from jaxthru.profile.explain.settings import CAUSES, FINDINGS, SETTINGS

MACHINE = ("devices", "jax", "jaxlib")
"""What moves any part: not of the configuration, but of what it ran on."""


@dataclasses.dataclass(frozen=True)
class Change:
    """seconds: of a step, after - before. share: of the step before. cause: likely, in a sentence; "" where
    nothing points to one. rule: the lint rule that points to it."""

    name: str
    before: float
    after: float
    seconds: float
    share: float
    cause: str = ""
    rule: str | None = None


@dataclasses.dataclass(frozen=True)
class Causes:
    """All that may say why a part changed."""

    before: Ledger
    after: Ledger
    config: tuple[tuple[str, Any, Any], ...]
    gone: tuple[Lint, ...]
    new: tuple[Lint, ...]
    scopes: list[Change]
    kernels: list[Change]
    collectives: list[Change]

    def explained(self, change: Change) -> Change:
        """Returns the change with its likely cause."""
        entries = self.new if change.seconds > 0 else self.gone
        moving = {rule for rule, found in FINDINGS.items() if change.name in found.parts}
        lint = [entry for entry in entries if entry.rule in moving]
        lint.sort(key=lambda entry: -(entry.seconds or 0.0))
        said = []
        if lint:
            where = f" in {lint[0].scope}" if lint[0].scope else ""
            said.append(f"{'new' if change.seconds > 0 else 'gone'}: {lint[0].text.rstrip('.')}{where}")
        keys = SETTINGS.get(change.name, ())
        changed = [entry for entry in self.config if entry[0] in MACHINE or entry[0].startswith(keys)]
        changed.sort(key=lambda entry: entry[0] in MACHINE)
        said += [f"{key} {a!r} → {b!r}" for key, a, b in changed[:3]]
        said += self.seen(change)
        return dataclasses.replace(change, cause="; ".join(said), rule=lint[0].rule if lint else None)

    def seen(self, change: Change) -> list[str]:
        """Returns what the ledgers show of a part beside its seconds."""
        if change.name in CAUSES:
            return [CAUSES[change.name]]
        match change.name:
            case "frequency":
                return [self.clock()]
            case "exposed_communication":
                return self.largest(self.collectives, change, "") + self.waited(change)
            case "recomputation":
                return self.largest(self.scopes, change, "recomputation")
            case "exposed_host_copies" | "dependency":
                return []
        line = "matmul" if change.name in MATMUL_PARTS else change.name
        kernels, scopes = (self.largest(each, change, f"({line})") for each in (self.kernels, self.scopes))
        return kernels or scopes

    def largest(self, entries: list[Change], change: Change, within: str) -> list[str]:
        """Returns the entry that moved most in the direction of the change."""
        alike = (each for each in entries if within in each.name and each.seconds * change.seconds > 0)
        found = max(alike, key=lambda each: abs(each.seconds), default=None)
        return [f"most in {found.name}: {1e3 * found.seconds:+.3g} ms"] if found else []

    def clock(self) -> str:
        a, b = self.before.clock, self.after.clock
        if a.mean_mhz is None or b.mean_mhz is None:
            return "the clock"
        said = f"the clock went from {a.mean_mhz:,.0f} to {b.mean_mhz:,.0f} MHz"
        reasons = b.cap_reasons if b.mean_mhz < a.mean_mhz else a.cap_reasons
        said += f", held down by {max(reasons, key=reasons.__getitem__)}" if reasons else ""
        same = abs(self.after.matmul.flops / max(1.0, self.before.matmul.flops) - 1) < 0.01
        alike = ", with the same FLOPs: the operands, or the power and heat that the card has"
        return said + alike * same

    def waited(self, change: Change) -> list[str]:
        """Returns who came last, where waiting for it is most of the change."""
        total = lambda ledger: sum(each.wait_seconds for each in ledger.collectives)  # noqa: E731
        if total(self.after) - total(self.before) < abs(change.seconds) / 2:
            return []
        worst = max(self.after.collectives, key=lambda each: each.wait_seconds)
        return [f"mostly waiting for {worst.last or 'a device'}, which comes last"]
