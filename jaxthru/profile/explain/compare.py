"""What changed from one profiled run to another, by how much, and what likely caused it.

The change of the step is taken apart into the changes of its parts, which add up to it. What a named cause
moves at once is one part here: the whole of the recomputation, whichever kernels it runs; the whole of the
matmuls where some are newly in float32.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from jaxthru.profile.account.ledger import Collective, Ledger, Lint
from jaxthru.profile.explain.breakdown import MATMUL_PARTS, noise_threshold, step_parts
from jaxthru.profile.explain.causes import Causes, Change
from jaxthru.profile.explain.settings import TITLES


@dataclasses.dataclass(frozen=True)
class Comparison:
    """step_before, step_after: seconds of a profiled step, the second for as many tokens as the first has.
    noise: seconds; smaller changes are not named, and `rest` is their sum. tokens: a step's, after ÷ before.
    config: (key, before, after), of devices and versions too. lint: entries in one run only. figures: (name,
    before, after) of clocks and memory. changes, scopes, kernels, collectives: the largest first.
    """

    step_before: float
    step_after: float
    noise: float
    tokens: float
    config: tuple[tuple[str, Any, Any], ...]
    changes: tuple[Change, ...]
    rest: float
    scopes: tuple[Change, ...]
    kernels: tuple[Change, ...]
    collectives: tuple[Change, ...]
    lint_gone: tuple[Lint, ...]
    lint_new: tuple[Lint, ...]
    figures: tuple[tuple[str, float | None, float | None], ...]

    @property
    def top(self) -> Change | None:
        """The largest change, None where there is none above the noise."""
        return self.changes[0] if self.changes else None


def compare(
    before: Ledger, after: Ledger, config_before: dict[str, Any], config_after: dict[str, Any]
) -> Comparison:
    """Returns what changed. config_before, config_after: nested plain values of the runs' config.json."""
    counts = before.run.tokens_per_step, after.run.tokens_per_step
    tokens = counts[1] / counts[0] if all(counts) else 1.0  # 0 where they were not recorded
    # Packing alone changes a step's tokens by little: that is no reason to bend what was measured.
    scale = 1.0 if abs(tokens - 1) < 0.01 else 1 / tokens
    noise = math.hypot(noise_threshold(before), noise_threshold(after) * scale)
    step = before.window.step_seconds
    config = _differences(_machine(before), _machine(after))
    config += tuple(sorted(_differences(_flat(config_before), _flat(config_after))))
    gone, new = _only(before.lint, after.lint), _only(after.lint, before.lint)
    merged = any(entry.rule == "float32_matmuls" for entry in (*gone, *new))
    common = min(each.matmul.recomputation_seconds or 0.0 for each in (before, after))
    was, now = _parts(before, merged, common), _parts(after, merged, common)
    if was.keys() != now.keys():  # the peak of one of them is not known
        was, now = _parts(before, True, common), _parts(after, True, common)

    def changes(was: dict[str, float], now: dict[str, float]) -> list[Change]:
        names = dict.fromkeys([*was, *now])
        pairs = [(name, was.get(name, 0.0), now.get(name, 0.0) * scale) for name in names]
        found = [Change(name, a, b, b - a, (b - a) / step) for name, a, b in pairs]
        return sorted(found, key=lambda change: -abs(change.seconds))

    def large(entries: list[Change]) -> tuple[Change, ...]:
        return tuple(entry for entry in entries if abs(entry.seconds) > noise)

    entries = [changes(sums(before), sums(after)) for sums in (_scopes, _kernels, _collectives)]
    causes, found = Causes(before, after, config, gone, new, *entries), changes(was, now)
    rest = sum(change.seconds for change in found if abs(change.seconds) <= noise)
    whole = step, after.window.step_seconds * scale, noise, tokens, config
    named = tuple(map(causes.explained, large(found)))
    return Comparison(*whole, named, rest, *map(large, entries), gone, new, _figures(before, after))


def _parts(ledger: Ledger, merged: bool, common: float) -> dict[str, float]:
    """Returns the parts of the step, all that is computed again as one; `merged`: and all matmuls as one.
    common: the recomputation of both runs' matmuls, in seconds at the peak."""
    found = step_parts(ledger)
    again = {scope.line: 0.0 for scope in ledger.scopes}
    for scope in ledger.scopes:
        again[scope.line] += scope.seconds if scope.phase == "recomputation" else 0.0
    if merged and "matmul" not in found:
        found = {"matmul": sum(found.pop(name, 0.0) for name in MATMUL_PARTS)} | found
    split = "recomputation" in found
    found.setdefault("recomputation", 0.0)
    for line, seconds in again.items():
        if line in found and not (line == "matmul" and merged):
            moved = min(seconds, found[line])  # scopes may overlap where a line counts an instant once
            found[line] -= moved
            found["recomputation"] += moved
    if split:
        fresh = ledger.matmul.recomputation_seconds - common
        _at_their_own_rate(found, again.get("matmul", 0.0), fresh, ledger)
    return found


def _at_their_own_rate(found: dict[str, float], again: float, fresh: float, ledger: Ledger) -> None:
    """Counts the matmuls that this run alone computes again with all that they take, of which the ledger
    has what they would take at the peak as recomputation, and the rest as the clock's and inefficiency.

    again: seconds of all that are computed again. fresh: of this run's alone, at the peak.
    """
    at_peak = ledger.matmul.recomputation_seconds
    if fresh <= 0 or again <= at_peak:  # it may hold padding too
        return
    own = again * fresh / at_peak
    slowed = found.get("frequency", 0.0) * own / ledger.seconds("matmul")
    if "frequency" in found:
        found["frequency"] -= slowed
    found["inefficiency"] -= own - fresh - slowed
    found["recomputation"] += own - fresh


def _scopes(ledger: Ledger) -> dict[str, float]:
    return _sums((f"{each.layer}, {each.phase} ({each.line})", each.seconds) for each in ledger.scopes)


def _kernels(ledger: Ledger) -> dict[str, float]:
    """Returns the seconds of kernels by scope and line: their own names change with every compilation."""
    return _sums((f"{each.scope or each.name} ({each.line})", each.seconds) for each in ledger.kernels)


def _collectives(ledger: Ledger) -> dict[str, float]:
    """Returns the exposed seconds of collectives by kind and size."""

    def name(each: Collective) -> str:
        return each.kind if each.bytes is None else f"{each.kind} of {each.bytes / 1e6:,.3g} MB"

    return _sums((name(each), each.exposed_seconds) for each in ledger.collectives)


def _sums(named: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, seconds in named:
        sums[name] = sums.get(name, 0.0) + seconds
    return sums


def _only(these: Iterable[Lint], others: Iterable[Lint]) -> tuple[Lint, ...]:
    known = {(entry.rule, entry.scope) for entry in others}  # instructions are numbered anew
    return tuple(entry for entry in these if (entry.rule, entry.scope) not in known)


def _differences(was: dict[str, Any], now: dict[str, Any]) -> tuple[tuple[str, Any, Any], ...]:
    return tuple((key, was.get(key), now.get(key)) for key in was | now if was.get(key) != now.get(key))


def _machine(ledger: Ledger) -> dict[str, str]:
    """Returns the devices and the installed packages."""
    return {"devices": f"{ledger.run.devices} × {ledger.run.device_kind}"} | ledger.run.versions


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration by whole keys, without those of the profile: it is no difference."""
    found = {f"{group}.{name}": value for group in config for name, value in config[group].items()}
    return {key: found[key] for key in sorted(found) if not key.startswith("profile.")}


def _figures(before: Ledger, after: Ledger) -> tuple[tuple[str, float | None, float | None], ...]:
    names = dict.fromkeys(name for each in (before, after) if each.memory for name in each.memory.categories)

    def of(ledger: Ledger) -> dict[str, float | None]:
        power, memory = [watts for _, watts in ledger.clock.power], ledger.memory
        return {
            "clock, MHz": ledger.clock.mean_mhz,
            "power, W": sum(power) / len(power) if power else None,
            "energy, J a step": ledger.cost.joules,
            "energy, J a token": ledger.cost.joules_per_token,
            "dollars a step": ledger.cost.dollars,
            "dollars a million tokens": ledger.cost.dollars_per_million_tokens,
            "peak memory, bytes": memory and memory.peak_bytes,
        } | {f"  {name}": memory and memory.categories.get(name, 0) for name in names}

    return _differences(of(before), of(after))


def title(name: str) -> str:
    """Returns what a part is called."""
    return TITLES.get(name, (name, ""))[0]
