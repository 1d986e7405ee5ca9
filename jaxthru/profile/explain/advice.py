"""Advice: which setting to change, and the seconds that it is expected to win back.

A gain is in seconds of a step's work (of a larger step, for as many tokens as this one has), never more than
the lines it comes from, and each text says how it was estimated. Two that take from the same line do not add
up. What lies below the noise of the run is not named.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from jaxthru.build.matmul_choice import account_of_run
from jaxthru.optim.formats import FORMATS
from jaxthru.profile.account.ledger import Advice, Ledger, Lint
from jaxthru.profile.explain.breakdown import noise_threshold
from jaxthru.profile.explain.run_facts import RunFacts
from jaxthru.profile.explain.settings import FINDINGS, TEXTS

HOPPER = re.compile(r"\b(h100|h200|h800|gh200)\b", re.I)
HOPPER_CAPABILITY = (9, 0)
FUSED_WINS = 0.7
"""Of the exposed seconds of gathers and scatters, what kernels that hide them within matmuls won back in the
8-layer step with mesh.tensor=2 on two H200s: 13.4 of 19.2 ms (docs/results.md)."""

POLICIES = ("full", "attention", "gate", "projections", "none")
TILE = 128
"""Tensor cores work on tiles; a dim that is no multiple of this leaves part of the last one empty."""

FEW_TOKENS = 1024
"""Fewer tokens at once on a device than this read the weights too often for the FLOPs they bring."""


def with_advice(ledger: Ledger, config: dict[str, Any]) -> Ledger:
    """Returns the ledger with what to change, the largest gain first, and what saves memory alone, whose gain
    is None, last; and with what its findings have to do with it: one rule, the noise of the run, decides on
    both. config: nested plain values of the run's config.json."""
    run, least = RunFacts(ledger, config), noise_threshold(ledger)
    found = {(each.cause, each.key): each for rule in ADVICE_RULES for each in rule(run)}
    named = [each for each in found.values() if each.gain_seconds is None or each.gain_seconds >= least]
    named.sort(key=lambda each: -(each.gain_seconds or 0.0))
    lint = []
    for entry in ledger.lint:
        remedy = found.get(_remedy(run, entry))
        gain, key = (remedy.gain_seconds, remedy.key) if remedy else (None, "")
        said = {"remedy": key, "gain_seconds": gain, "advised": remedy in named}
        lint.append(dataclasses.replace(entry, **said))
    return dataclasses.replace(ledger, advice=tuple(named), lint=tuple(lint))


def _advice(
    run: RunFacts, cause: str, key: str, value: Any, gain: float | None, text: str | None = None, **numbers
) -> Advice:
    """text: None is that of the table, with these numbers."""
    share = None if gain is None else gain / run.ledger.window.step_seconds
    text = TEXTS[cause][key].format(**numbers) if text is None else text
    return Advice(cause, key, str(value), gain, share, text)


def _data_wait(run: RunFacts) -> Iterator[Advice]:
    now = run["data.loaders"]
    value = 2 * now if now else "all cores"
    yield _advice(run, "data_wait", "data.loaders", value, run.line("data_wait"))


def _host_gap(run: RunFacts) -> Iterator[Advice]:
    if not run.layered:  # else see _larger
        yield _advice(run, "host_gap", "host synchronisation", "one step late", run.line("host_gap"))


def _communication(run: RunFacts) -> Iterator[Advice]:
    exposed, collectives = run.line("exposed_communication"), run.ledger.collectives
    if not collectives:
        return
    advice = functools.partial(_advice, run, "exposed_communication")
    waited = sum(min(each.wait_seconds, each.exposed_seconds) for each in collectives)
    if not run["data.balance"]:
        yield advice("data.balance", True, min(waited, exposed))
    again = run.mesh["fsdp"] > 1 and run["remat.policy"] != "none" and not run.float8
    if again and not run.layered and not run.config["remat"].get("keep_parameters"):
        need = run.gathered_bytes()
        if run.unused_bytes is not None and need <= run.unused_bytes:
            half = min(exposed, run.exposed("all-gather")) / 2
            yield advice("remat.keep_parameters", True, half, gigabytes=need / 1e9)
    if run.tensor > 1:
        if run.fused_fits and HOPPER.search(run.ledger.run.device_kind):
            won = FUSED_WINS * min(exposed, run.exposed("all-gather", "reduce-scatter"))
            yield advice("kernels.collective_matmul", "fused", won, share=FUSED_WINS)
        yield advice("mesh.tensor", run.tensor // 2, min(exposed, run.exposed("all-reduce")) / 2)


def _host_copies(run: RunFacts) -> Iterator[Advice]:
    if run["offload.level"] == "none":
        return
    exposed, state = run.line("exposed_host_copies"), run["optim.state"]
    advice = functools.partial(_advice, run, "exposed_host_copies")
    if (lighter := _lighter(state)) is not None:
        now, then = (FORMATS[name].bytes_per_parameter().state for name in (state, lighter))
        share = 1 - then / now
        yield advice("optim.state", lighter, exposed * share, share=share)
    pinned = run.ledger.memory.host_pinned_bytes if run.ledger.memory else 0
    if run.unused_bytes and pinned:
        share = min(1.0, run.unused_bytes / pinned)
        fraction = max(0.01, math.ceil(100 * run["offload.fraction"] * (1 - share)) / 100)
        numbers = {"share": share, "gigabytes": run.unused_bytes / 1e9}
        yield advice("offload.fraction", fraction, exposed * share, **numbers)


def _larger(run: RunFacts) -> Iterator[Advice]:
    """What a step, or a micro-batch, costs whatever its tokens."""
    microbatches = run["train.microbatches"]
    # Over expert and tensor it is activations that move, and they grow with the tokens.
    alone = run.tensor == run.mesh["expert"] == 1
    parameters = run.exposed("all-gather", "reduce-scatter") if alone else 0.0
    fixed = {
        "exposed_communication": (min(run.line("exposed_communication"), parameters), "gathered parameters"),
        "host_gap": (run.line("host_gap") if run.layered else 0.0, "the host dispatching layer by layer"),
        "dependency": (run.line("dependency") if run.gpu else 0.0, "gaps between kernels"),
    }
    if microbatches == 1 and run.layered:
        fixed["exposed_host_copies"] = run.line("exposed_host_copies"), "the state on its way"
    if (lost := run.ledger.matmul.inefficiency_seconds) and run.tokens_at_once < FEW_TOKENS:
        fixed["inefficiency"] = lost, f"weights read for {run.tokens_at_once:,.0f} tokens"
    least = noise_threshold(run.ledger)
    fixed = {cause: (seconds, what) for cause, (seconds, what) in fixed.items() if seconds >= least}
    if fixed:
        key, value = "train.rows", 2 * run["train.rows"]
        if microbatches > 1:
            key, value = "train.microbatches", microbatches // 2
        said = ", ".join(f"{what} ({1e3 * seconds:.1f} ms)" for seconds, what in fixed.values())
        gain = sum(seconds for seconds, _ in fixed.values()) / 2
        text = TEXTS["fixed"][key].format(said=said)
        yield _advice(run, max(fixed, key=lambda each: fixed[each][0]), key, value, gain, text)


def _lighter(state: str) -> str | None:
    """Returns the format with the same master whose moments are in 8 bits, None if they are."""
    master = FORMATS[state].master
    found = (name for name, each in FORMATS.items() if (each.master, each.moments) == (master, "int8"))
    return next((name for name in found if FORMATS[state].moments != "int8"), None)


def _recomputation(run: RunFacts) -> Iterator[Advice]:
    now, unused, model = run["remat.policy"], run.unused_bytes, run.ledger.model
    again = run.ledger.matmul.recomputation_seconds
    again = run.scoped("recomputation", "matmul") if again is None else again
    cheaper = POLICIES[POLICIES.index(now) + 1 :]
    if not cheaper:
        if run["data.packing"] == "best_fit":
            yield _advice(run, "recomputation", "data.packing", "split", again)
        return
    fitting = [policy for policy in cheaper if unused is not None and run.kept(policy) <= unused]
    policy = fitting[-1] if fitting else cheaper[0]
    before, after = model.recomputed[now], model.recomputed[policy]
    gain = again * (1 - after / before) if before else 0.0
    if now == "full":
        gain += run.scoped("recomputation", "attention")
    if policy == "none":
        gain += run.scoped("recomputation", "other_kernels")
    fits = f"; {unused / 1e9:.1f} GB were never used" if unused is not None else ""
    fits += "" if fitting else "; `plan memory` says whether it fits"
    numbers = {"gigabytes": run.kept(policy) / 1e9, "fits": fits}
    yield _advice(run, "recomputation", "remat.policy", policy, gain, **numbers)


def _frequency(run: RunFacts) -> Iterator[Advice]:
    """Of GPUs whose clock has a reference, Hopper's, see profile/account/frequency.py."""
    of, reasons = run.ledger.run, run.ledger.clock.cap_reasons
    lost = run.ledger.matmul.frequency_seconds
    if lost is None or lost <= 0 or not HOPPER.search(of.device_kind):
        return
    account = account_of_run(run.config, of.devices, of.device_kind, HOPPER_CAPABILITY)
    if account is None:
        return
    gain = min(account.saved, run.line("matmul"))
    why = f" ({max(reasons, key=reasons.__getitem__)})" if reasons else ""
    yield _advice(run, "frequency", "precision.matmul", "fp8", gain, why=why, account=account.parts)


def _inefficiency(run: RunFacts) -> Iterator[Advice]:
    lost, model = run.ledger.matmul.inefficiency_seconds, run.ledger.model
    for name, width in model.widths.items() if lost is not None else ():
        split = run.tensor if name in model.split_widths else 1
        if (size := width / split) % TILE:
            whole = math.ceil(size / TILE) * TILE
            gain = min(lost, run.line("matmul") * (1 - size / whole))
            text = TEXTS["inefficiency"]["model"].format(size=size, tile=TILE)
            yield _advice(run, "inefficiency", f"model.{name}", whole * split, gain, text)


def _attention(run: RunFacts) -> Iterator[Advice]:
    peak, of = run.ledger.matmul.peak_flops, run.ledger.run
    if run.gpu and peak and run["kernels.attention"] in ("reference", "xla"):
        span = of.attention_span_per_token * of.tokens_per_step
        needed = run.ledger.model.flops(0, span) / of.devices / peak
        gain = max(0.0, run.line("attention") - needed)
        yield _advice(run, "attention", "kernels.attention", "auto", gain)


def _other_kernels(run: RunFacts) -> Iterator[Advice]:
    line, state = run.line("other_kernels"), run["optim.state"]
    if (lighter := _lighter(state)) is not None:
        # An update reads a float32 gradient, and reads and writes weight, master and moments.
        now, then = (4 + 2 * sum(FORMATS[name].bytes_per_parameter()) for name in (state, lighter))
        share = 1 - then / now
        gain = min(line, run.scoped("optimizer", "other_kernels")) * share
        yield _advice(run, "other_kernels", "optim.state", lighter, gain, share=share)
    if run["model.loop"] == "scan":
        slices = re.compile(r"dynamic[-_](update[-_])?slice")
        copies = {entry.instruction for entry in run.ledger.lint if _stacked(run, entry)}
        kernels = [each for each in run.ledger.kernels if each.line == "other_kernels"]
        named = (each for each in kernels if each.hlo in copies or slices.search(f"{each.name} {each.hlo}"))
        gain = run.within_line("other_kernels", sum(each.seconds for each in named))
        yield _advice(run, "other_kernels", "model.loop", "unroll", gain)


def _precision(run: RunFacts) -> Iterator[Advice]:
    if run.gpu and run["precision.compute"] == "float32":
        yield _advice(run, "matmul", "precision.compute", "bfloat16", run.line("matmul") / 2)


def _lint(run: RunFacts) -> Iterator[Advice]:
    for rule, (_, line, key, value, what) in FINDINGS.items():
        entries = [entry for entry in run.ledger.lint if _remedy(run, entry) == (rule, key)]
        if not entries:
            continue
        known = [entry.seconds for entry in entries if entry.seconds is not None]
        gain = run.within_line(line, sum(known)) if known and line else None
        worst = max(entries, key=lambda entry: (entry.seconds or 0.0, entry.bytes or 0.0))
        held = sum(entry.bytes or 0.0 for entry in entries)
        text = f"{worst.text[:1].upper()}{worst.text[1:].rstrip('.')}. {what} "
        text += f"{len(entries)} such, in all {held / 1e6:,.0f} MB. " if len(entries) > 1 else ""
        text += "At most their share of the line." if gain is not None else "Time not known."
        yield _advice(run, rule, key, value, gain, text)


def _remedy(run: RunFacts, entry: Lint) -> tuple[str, str]:
    """Returns the cause and the key of the advice that counts a finding."""
    if _stacked(run, entry):
        return "other_kernels", "model.loop"
    if entry.rule == "attention_again" and run["remat.policy"] == "full":
        return "recomputation", "remat.policy"
    return entry.rule, FINDINGS[entry.rule].key if entry.rule in FINDINGS else ""


def _stacked(run: RunFacts, entry: Lint) -> bool:
    """Says whether a copy is of what a loop over the layers has stacked: see _other_kernels."""
    stacked = f"[{run.ledger.model.layers}," in entry.text
    return entry.rule == "copies" and run["model.loop"] == "scan" and stacked


Rule = Callable[[RunFacts], Iterator[Advice]]
ADVICE_RULES: tuple[Rule, ...] = (
    *(_data_wait, _host_gap, _communication, _host_copies, _larger, _recomputation, _frequency),
    *(_inefficiency, _attention, _other_kernels, _precision, _lint),
)
