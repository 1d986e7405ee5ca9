"""Advice: which setting to change, and the seconds that it is expected to win back.

A gain is in seconds of a step's work (of a larger step, for as many tokens as this one has), never more than
the lines it comes from, and each text says how it was estimated. Two that take from the same line do not add
up. What lies below the noise of the run is not named.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from jaxthru.optim.formats import FORMATS
from jaxthru.profile.account.ledger import Advice, Ledger, Lint
from jaxthru.profile.explain.breakdown import floor
from jaxthru.profile.explain.run_facts import Evidence

FLOAT8 = re.compile(r"\b(h100|h200|gh200|b200|gb200|b300|l4|l40s?|ada)\b", re.I)
FLOAT8_SPEED = 1.6
"""A matrix product in float8 against bfloat16 on an H200, with room for its casts: without them it is 1.89
(docs/results.md)."""

HOPPER = re.compile(r"\b(h100|h200|h800|gh200)\b", re.I)
FUSED_WINS = 0.7
"""Of the exposed seconds of gathers and scatters, what kernels that hide them within products won back in the
8-layer step with mesh.tensor=2 on two H200s: 13.4 of 19.2 ms (docs/results.md)."""

POLICIES = ("full", "attention", "gate", "projections", "none")
TILE = 128
"""Tensor cores work on tiles; a dim that is no multiple of this leaves part of the last one empty."""

FEW_TOKENS = 1024
"""Fewer tokens at once on a device than this read the weights too often for the FLOPs they bring."""


def advise(ledger: Ledger, config: dict[str, Any]) -> tuple[Advice, ...]:
    """Returns what to change, the largest gain first; what saves memory alone, whose gain is None, last.

    config: nested plain values of the run's config.json.
    """
    return with_advice(ledger, config).advice


def with_advice(ledger: Ledger, config: dict[str, Any]) -> Ledger:
    """Returns the ledger with advice, and with what its findings have to do with it: one rule, the noise of
    the run, decides on both. config: as of `advise`."""
    seen, least = Evidence(ledger, config), floor(ledger)
    found = {(each.cause, each.key): each for rule in RULES for each in rule(seen)}
    named = [each for each in found.values() if each.gain_seconds is None or each.gain_seconds >= least]
    named.sort(key=lambda each: -(each.gain_seconds or 0.0))
    lint = tuple(_judged(entry, found.get(_remedy(seen, entry)), named) for entry in ledger.lint)
    return dataclasses.replace(ledger, advice=tuple(named), lint=lint)


def _judged(entry: Lint, remedy: Advice | None, named: list[Advice]) -> Lint:
    if remedy is None:
        return dataclasses.replace(entry, remedy="", gain_seconds=None, advised=False)
    return dataclasses.replace(
        entry, remedy=remedy.key, gain_seconds=remedy.gain_seconds, advised=remedy in named
    )


def _advice(seen: Evidence, cause: str, key: str, value: Any, gain: float | None, text: str) -> Advice:
    share = None if gain is None else gain / seen.ledger.window.step_seconds
    return Advice(cause, key, str(value), gain, share, text)


def _data_wait(seen: Evidence) -> Iterator[Advice]:
    now = seen["data.loaders"]
    text = (
        "The devices waited for the next batch. If the mix has online sources, more processes make their "
        "tokens; if not, tokenise ahead (without `online`), or put data.store on a faster disk. At most the "
        "whole wait."
    )
    value = 2 * now if now else "all cores"
    yield _advice(seen, "data_wait", "data.loaders", value, seen.line("data_wait"), text)


def _host_gap(seen: Evidence) -> Iterator[Advice]:
    if seen.layered:
        return  # see _larger
    text = (
        "The devices ran out of work before the host gave them more: something in the loop waits for them. "
        "Read a step's metrics one step late, never a fresh array. At most the whole gap."
    )
    yield _advice(seen, "host_gap", "host synchronisation", "one step late", seen.line("host_gap"), text)


def _communication(seen: Evidence) -> Iterator[Advice]:
    exposed, collectives = seen.line("exposed_communication"), seen.ledger.collectives
    if not collectives:
        return
    waited = sum(min(each.wait_seconds, each.exposed_seconds) for each in collectives)
    if not seen["data.balance"]:
        text = "Devices waited for the slowest: even out what each has to do. At most all of that wait."
        yield _advice(seen, "exposed_communication", "data.balance", True, min(waited, exposed), text)
    again = seen.mesh["fsdp"] > 1 and seen["remat.policy"] != "none" and seen["precision.matmul"] != "fp8"
    if again and not seen.layered and not seen.config["remat"].get("keep_parameters"):
        need = seen.gathered_bytes()
        if seen.unused_bytes is not None and need <= seen.unused_bytes:
            text = f"Every other gather is for the backward pass; kept, matrices take {need / 1e9:.1f} GB."
            half = min(exposed, seen.exposed("all-gather")) / 2
            yield _advice(seen, "exposed_communication", "remat.keep_parameters", True, half, text)
    if seen.tensor > 1:
        if seen.fused_fits and HOPPER.search(seen.ledger.run.device_kind):
            won = FUSED_WINS * min(exposed, seen.exposed("all-gather", "reduce-scatter"))
            text = f"Kernels that send while they multiply: {FUSED_WINS:.0%} of it, as on two H200s."
            yield _advice(seen, "exposed_communication", "kernels.collective_matmul", "fused", won, text)
        text = "Sums over mesh.tensor are on the critical path: half as many devices, half of them."
        reduced = min(exposed, seen.exposed("all-reduce")) / 2
        yield _advice(seen, "exposed_communication", "mesh.tensor", seen.tensor // 2, reduced, text)


def _host_copies(seen: Evidence) -> Iterator[Advice]:
    exposed = seen.line("exposed_host_copies")
    if seen["offload.level"] == "none":
        return
    state = seen["optim.state"]
    if (lighter := _lighter(state)) is not None:
        bytes_of = lambda name: FORMATS[name].bytes_per_parameter().state  # noqa: E731
        share = 1 - bytes_of(lighter) / bytes_of(state)
        text = f"{share:.0%} fewer bytes to copy for each parameter, the exposed ones in proportion."
        yield _advice(seen, "exposed_host_copies", "optim.state", lighter, exposed * share, text)
    pinned = seen.ledger.memory.host_pinned_bytes if seen.ledger.memory else 0
    if seen.unused_bytes and pinned:
        share = min(1.0, seen.unused_bytes / pinned)
        fraction = max(0.01, math.ceil(100 * seen["offload.fraction"] * (1 - share)) / 100)
        text = (
            f"{seen.unused_bytes / 1e9:.1f} GB of device memory were never used, {share:.0%} of the "
            "state on the host; the exposed copies in proportion."
        )
        yield _advice(seen, "exposed_host_copies", "offload.fraction", fraction, exposed * share, text)


def _larger(seen: Evidence) -> Iterator[Advice]:
    """What a step, or a micro-batch, costs whatever its tokens."""
    microbatches = seen["train.microbatches"]
    # Over tensor it is activations that move, and they grow with the tokens.
    parameters = seen.exposed("all-gather", "reduce-scatter") if seen.tensor == 1 else 0.0
    fixed = {
        "exposed_communication": (min(seen.line("exposed_communication"), parameters), "gathered parameters"),
        "host_gap": (seen.line("host_gap") if seen.layered else 0.0, "the host dispatching layer by layer"),
        "dependency": (seen.line("dependency") if seen.gpu else 0.0, "gaps between kernels"),
    }
    if microbatches == 1 and seen.layered:
        fixed["exposed_host_copies"] = seen.line("exposed_host_copies"), "the state on its way"
    if (lost := seen.ledger.matmul.inefficiency_seconds) and seen.tokens_at_once < FEW_TOKENS:
        fixed["inefficiency"] = lost, f"weights read for {seen.tokens_at_once:,.0f} tokens"
    least = floor(seen.ledger)
    fixed = {cause: (seconds, what) for cause, (seconds, what) in fixed.items() if seconds >= least}
    if not fixed:
        return
    gain = sum(seconds for seconds, _ in fixed.values()) / 2
    cause = max(fixed, key=lambda each: fixed[each][0])
    said = ", ".join(f"{what} ({1e3 * seconds:.1f} ms)" for seconds, what in fixed.values())
    if microbatches > 1:
        key, value, more = "train.microbatches", microbatches // 2, "Half the micro-batches halve"
    else:
        key, value, more = "train.rows", 2 * seen["train.rows"], "Twice the rows halve, for each token,"
    text = f"{more} what does not grow with them: {said}. `plan memory` says whether they fit."
    yield _advice(seen, cause, key, value, gain, text)


def _lighter(state: str) -> str | None:
    """Returns the format with the same master whose moments are in 8 bits, None if they are."""
    master = FORMATS[state].master
    found = (name for name, each in FORMATS.items() if (each.master, each.moments) == (master, "int8"))
    return next((name for name in found if FORMATS[state].moments != "int8"), None)


def _recomputation(seen: Evidence) -> Iterator[Advice]:
    now, unused = seen["remat.policy"], seen.unused_bytes
    again = seen.ledger.matmul.recomputation_seconds
    again = seen.scoped("recomputation", "matmul") if again is None else again
    cheaper = POLICIES[POLICIES.index(now) + 1 :]
    if not cheaper:
        if seen["data.packing"] == "best_fit":
            text = "Nothing is recomputed: the rest is padding, and rows cut anywhere have none."
            yield _advice(seen, "recomputation", "data.packing", "split", again, text)
        return
    fitting = [policy for policy in cheaper if unused is not None and seen.kept(policy) <= unused]
    policy = fitting[-1] if fitting else cheaper[0]
    before, after = seen.ledger.model.recomputed[now], seen.ledger.model.recomputed[policy]
    gain = again * (1 - after / before) if before else 0.0
    if now == "full":
        gain += seen.scoped("recomputation", "attention")
    if policy == "none":
        gain += seen.scoped("recomputation", "other_kernels")
    extra = seen.kept(policy) / 1e9
    fits = f"; {unused / 1e9:.1f} GB were never used" if unused is not None else ""
    fits += "" if fitting else "; `plan memory` says whether it fits"
    text = (
        f"Keep more activations: about {extra:.1f} GB{fits}. Of the seconds recomputed, the share of FLOPs "
        "that this policy does not repeat."
    )
    yield _advice(seen, "recomputation", "remat.policy", policy, gain, text)


def _frequency(seen: Evidence) -> Iterator[Advice]:
    lost = seen.ledger.matmul.frequency_seconds
    if lost is None or seen["precision.matmul"] == "fp8" or not FLOAT8.search(seen.ledger.run.device_kind):
        return
    reasons = seen.ledger.clock.cap_reasons
    why = f" ({max(reasons, key=reasons.__getitem__)})" if reasons else ""
    text = (
        f"The clock was held down{why}. In float8 a matrix product takes 1/{FLOAT8_SPEED} of the time, and "
        "loses so much less to the clock; that it has fewer cycles to run comes on top."
    )
    yield _advice(seen, "frequency", "precision.matmul", "fp8", lost * (1 - 1 / FLOAT8_SPEED), text)


def _inefficiency(seen: Evidence) -> Iterator[Advice]:
    matmul = seen.line("matmul")
    lost = seen.ledger.matmul.inefficiency_seconds
    if lost is None:
        return
    for name, width in seen.ledger.model.widths.items():
        split = seen.tensor if name in seen.ledger.model.split_widths else 1
        if (size := width / split) % TILE:
            whole = math.ceil(size / TILE) * TILE
            text = f"{size:g} on a device is no multiple of {TILE}: the empty part of the last tile."
            gain = min(lost, matmul * (1 - size / whole))
            yield _advice(seen, "inefficiency", f"model.{name}", whole * split, gain, text)


def _attention(seen: Evidence) -> Iterator[Advice]:
    peak, run = seen.ledger.matmul.peak_flops, seen.ledger.run
    if not (seen.gpu and peak and seen["kernels.attention"] in ("reference", "xla")):
        return
    span = run.attention_span_per_token * run.tokens_per_step
    needed = seen.ledger.model.flops(0, span) / run.devices / peak
    gain = max(0.0, seen.line("attention") - needed)
    text = (
        "A kernel made for GPUs visits only what documents allow. At most what lies above its FLOPs at peak."
    )
    yield _advice(seen, "attention", "kernels.attention", "auto", gain, text)


def _other_kernels(seen: Evidence) -> Iterator[Advice]:
    line = seen.line("other_kernels")
    state, update = seen["optim.state"], seen.scoped("optimizer", "other_kernels")
    if (lighter := _lighter(state)) is not None:
        # An update reads a float32 gradient, and reads and writes weight, master and moments.
        moved = {name: 4 + 2 * sum(FORMATS[name].bytes_per_parameter()) for name in (state, lighter)}
        share = 1 - moved[lighter] / moved[state]
        text = f"The update runs at the speed of memory: {share:.0%} fewer bytes, and as much less time."
        yield _advice(seen, "other_kernels", "optim.state", lighter, min(line, update) * share, text)
    if seen["model.loop"] == "scan":
        slices = re.compile(r"dynamic[-_](update[-_])?slice")
        copies = {entry.instruction for entry in seen.ledger.lint if _stacked(seen, entry)}
        seconds = sum(
            each.seconds
            for each in seen.ledger.kernels
            if each.line == "other_kernels"
            and (each.hlo in copies or slices.search(f"{each.name} {each.hlo}"))
        )
        text = (
            "A loop over layers cuts parameters out of stacks, and stacks and copies what is kept: all of it."
        )
        gain = seen.painted("other_kernels", seconds)
        yield _advice(seen, "other_kernels", "model.loop", "unroll", gain, text)


def _precision(seen: Evidence) -> Iterator[Advice]:
    if seen.gpu and seen["precision.compute"] == "float32":
        text = "Tensor cores multiply bfloat16 at twice the rate of TF32: half of the matrix products' time."
        yield _advice(seen, "matmul", "precision.compute", "bfloat16", seen.line("matmul") / 2, text)


REMEDIES = {
    "float32_matmuls": ("matmul", "precision.compute", "bfloat16", "Cast its operands to the compute type."),
    "not_donated": (None, "donate_argnums", "the state", "Donate it, so that the result takes its memory."),
    "collectives": ("exposed_communication", "mesh", "its operands' axes", "State its operands' sharding."),
    "attention_again": ("attention", "remat.policy", "attention", "Keep the attention kernel's results."),
    "copies": ("other_kernels", "layout", "that of the producer", "Avoid the layout that needs the copy."),
    "loops": (None, "model.loop", "scan", "Give the loop a length that is known when it is compiled."),
}
"""Lint rule -> the line that pays, None where it is memory or not known; key, value, and what to do."""


def _lint(seen: Evidence) -> Iterator[Advice]:
    for rule, (line, key, value, what) in REMEDIES.items():
        entries = [entry for entry in seen.ledger.lint if _remedy(seen, entry) == (rule, key)]
        if not entries:
            continue
        known = [entry.seconds for entry in entries if entry.seconds is not None]
        gain = seen.painted(line, sum(known)) if known and line else None
        worst = max(entries, key=lambda entry: (entry.seconds or 0.0, entry.bytes or 0.0))
        held = sum(entry.bytes or 0.0 for entry in entries)
        text = f"{worst.text[:1].upper()}{worst.text[1:].rstrip('.')}. {what} "
        text += f"{len(entries)} such, in all {held / 1e6:,.0f} MB. " if len(entries) > 1 else ""
        text += "At most their share of the line." if gain is not None else "Time not known."
        yield _advice(seen, rule, key, value, gain, text)


def _remedy(seen: Evidence, entry: Lint) -> tuple[str, str]:
    """Returns the cause and the key of the advice that counts a finding."""
    if _stacked(seen, entry):
        return "other_kernels", "model.loop"
    if entry.rule == "attention_again" and seen["remat.policy"] == "full":
        return "recomputation", "remat.policy"
    return entry.rule, REMEDIES[entry.rule][1] if entry.rule in REMEDIES else ""


def _stacked(seen: Evidence, entry: Lint) -> bool:
    """Says whether a copy is of what a loop over the layers has stacked: see _other_kernels."""
    stacked = f"[{seen.ledger.model.layers}," in entry.text
    return entry.rule == "copies" and seen["model.loop"] == "scan" and stacked


Rule = Callable[[Evidence], Iterator[Advice]]
RULES: tuple[Rule, ...] = (
    *(_data_wait, _host_gap, _communication, _host_copies, _larger, _recomputation, _frequency),
    *(_inefficiency, _attention, _other_kernels, _precision, _lint),
)
