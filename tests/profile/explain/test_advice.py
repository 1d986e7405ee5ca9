"""Advice names real keys, never promises more than the line it comes from, and nothing under the noise."""

import dataclasses

import pytest
import sample

from jaxthru import config as configuration
from jaxthru.profile.explain import lint
from jaxthru.profile.explain.advice import with_advice
from jaxthru.profile.explain.breakdown import noise_threshold, step_parts
from jaxthru.profile.explain.settings import FINDINGS, SETTINGS

OUTSIDE = {"host synchronisation", *(found.key for found in FINDINGS.values())}
OFFLOAD = {"offload__level": "optimizer", "offload__fraction": 1.0}

TENSOR = {"mesh__fsdp": 1, "mesh__tensor": 2}


def advised(ledger, config=None):
    """Returns the advice on a run of a model of this configuration."""
    config = config or sample.config()
    return with_advice(dataclasses.replace(ledger, model=sample.facts(config)), config).advice


def by_key(ledger, config=None):
    return {each.key: each for each in advised(ledger, config)}


@pytest.mark.parametrize(
    ("changes", "config", "key", "value"),
    [
        ({"data_wait": 0.05}, {}, "data.loaders", "all cores"),
        ({"data_wait": 0.05}, {"data__loaders": 3}, "data.loaders", "6"),
        ({"host_gap": 0.05}, {}, "host synchronisation", "one step late"),
        ({"host_gap": 0.05}, {"train__microbatches": 4, **OFFLOAD}, "train.microbatches", "2"),
        ({"host_gap": 0.05}, OFFLOAD, "train.rows", "8"),
        ({"exposed_communication": 0.1}, {}, "train.rows", "8"),
        ({"exposed_communication": 0.1}, {"train__microbatches": 2}, "train.microbatches", "1"),
        ({"exposed_communication": 0.1}, {"data__balance": False}, "data.balance", "True"),
        ({"exposed_communication": 0.1}, {"remat__policy": "gate"}, "remat.keep_parameters", "True"),
        ({"exposed_communication": 0.1}, TENSOR, "kernels.collective_matmul", "fused"),
        ({"exposed_host_copies": 0.1}, OFFLOAD, "optim.state", "int8"),
        ({"exposed_host_copies": 0.1}, OFFLOAD, "train.rows", "8"),
        ({"recomputation": 0.05}, {"remat__policy": "full"}, "remat.policy", "none"),
        (
            {"recomputation": 0.05},
            {"remat__policy": "none", "data__packing": "best_fit"},
            "data.packing",
            "split",
        ),
        ({"frequency": 0.08}, {}, "precision.matmul", "fp8"),
        ({"inefficiency": 0.08}, {"model__embed": 4000}, "model.embed", "4096"),
        ({"inefficiency": 0.08}, {"train__microbatches": 32}, "train.microbatches", "16"),
        ({"attention": 0.2}, {"kernels__attention": "xla"}, "kernels.attention", "auto"),
        ({"other_kernels": 0.1}, {}, "optim.state", "int8"),
        ({"other_kernels": 0.1}, {"model__loop": "scan"}, "model.loop", "unroll"),
        ({}, {"precision__compute": "float32"}, "precision.compute", "bfloat16"),
    ],
)
def test_cause_leads_to_its_setting(changes, config, key, value):
    found = by_key(sample.ledger(**changes), sample.config(**config))
    assert found[key].value == value
    assert found[key].gain_seconds > 0
    assert found[key].gain_share == found[key].gain_seconds / sample.ledger(**changes).window.step_seconds
    assert found[key].text.endswith(".")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"remat__policy": "full", "model__loop": "scan", "kernels__attention": "xla", "data__balance": False},
        {"train__microbatches": 32, "model__mlp": 14_300, "precision__compute": "float32", **OFFLOAD},
    ],
)
def test_no_gain_exceeds_its_lines(config):
    ledger = sample.ledger()
    for rule in FINDINGS:
        ledger = sample.with_lint(ledger, rule, 0.01)
    known = step_parts(ledger) | {line.name: line.seconds for line in ledger.lines}
    found = advised(ledger, sample.config(**config))
    gains = [each.gain_seconds for each in found]
    known_gains = [gain for gain in gains if gain is not None]
    assert known_gains == sorted(known_gains, reverse=True)
    assert gains == known_gains + [None] * gains.count(None)
    fixed = ("exposed_communication", "host_gap", "dependency", "exposed_host_copies", "inefficiency")
    for each in found[: len(known_gains)]:
        if each.key in ("train.rows", "train.microbatches"):
            assert each.gain_seconds <= sum(known[name] for name in fixed) / 2
        elif each.cause == "recomputation":  # beside matmuls, the attention and norms computed again
            again = (s.seconds for s in ledger.scopes if s.phase == "recomputation" and s.line != "matmul")
            assert each.gain_seconds <= known["recomputation"] + sum(again)
        elif each.key == "precision.matmul":  # the clock's share is a part of it
            assert each.gain_seconds <= known["matmul"]
        else:
            assert each.gain_seconds <= known.get(each.cause, 0.0121) + 1e-12


def test_what_moves_over_tensor_is_hidden_in_kernels_and_not_by_more_tokens():
    ledger = sample.ledger(exposed_communication=0.1)
    found = by_key(ledger, sample.config(**TENSOR))
    assert found["kernels.collective_matmul"].gain_seconds == pytest.approx(0.7 * 0.018)
    assert "gathered parameters" not in getattr(found.get("train.rows"), "text", "")
    for other in (
        {"kernels__collective_matmul": "fused"},
        {"precision__matmul": "fp8"},
        {"precision__compute": "float32"},
        OFFLOAD,
    ):
        assert "kernels.collective_matmul" not in by_key(ledger, sample.config(**TENSOR, **other))
    assert "kernels.collective_matmul" not in by_key(ledger, sample.config(mesh__fsdp=2))
    by_expert = by_key(ledger, sample.config(mesh__fsdp=1, mesh__expert=2))
    assert "gathered parameters" not in getattr(by_expert.get("train.rows"), "text", "")
    ampere = dataclasses.replace(ledger.run, device_kind="NVIDIA A100-SXM4-80GB")
    of_ampere = dataclasses.replace(ledger, run=ampere)
    assert "kernels.collective_matmul" not in by_key(of_ampere, sample.config(**TENSOR))


def test_every_key_is_one_of_the_configuration():
    tree = configuration.to_dict(configuration.load(sample.ROOT / "configs" / "quickstart.py"))
    keys = {f"{group}.{name}" for group, part in tree.items() for name in part}
    for config in ({}, OFFLOAD, {"model__loop": "scan", "data__balance": False, "remat__policy": "full"}):
        for each in advised(sample.ledger(noise=0.0), sample.config(**config)):
            assert each.key in keys | OUTSIDE, each
            if each.key not in OUTSIDE:  # so that a comparison knows what following it has changed
                assert each.key.startswith(SETTINGS[each.cause]), each
            if each.key in keys:
                group, _, name = each.key.partition(".")
                configuration.from_dict(tree | {group: tree[group] | {name: _typed(each.value)}})


def _typed(text: str):
    if text in ("True", "False"):
        return text == "True"
    if text == "all cores":
        return 8
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def test_nothing_under_the_noise_is_named():
    quiet, loud = sample.ledger(noise=0.0), sample.ledger(noise=0.02)
    found = advised(loud)
    assert 0 < len(found) < len(advised(quiet))
    assert all(each.gain_seconds >= noise_threshold(loud) for each in found)
    assert advised(sample.ledger(noise=0.9)) == ()


def test_policy_is_the_cheapest_that_fits():
    ledger = sample.ledger(recomputation=0.08)
    full = sample.config(remat__policy="full")
    assert by_key(ledger, full)["remat.policy"].value == "none"
    tight = dataclasses.replace(ledger, memory=dataclasses.replace(ledger.memory, peak_bytes=139_000_000_000))
    assert by_key(tight, full)["remat.policy"].value == "attention"
    assert "plan memory" in by_key(tight, full)["remat.policy"].text
    between = dataclasses.replace(
        ledger, memory=dataclasses.replace(ledger.memory, peak_bytes=131_000_000_000)
    )
    found = by_key(between, full)["remat.policy"]
    assert found.value in ("gate", "projections")
    assert (
        found.gain_seconds < by_key(ledger, full)["remat.policy"].gain_seconds or found.value == "projections"
    )


def test_unused_memory_takes_state_back():
    ledger = sample.ledger(exposed_host_copies=0.1)
    ledger = dataclasses.replace(
        ledger, memory=dataclasses.replace(ledger.memory, host_pinned_bytes=160_000_000_000)
    )
    found = by_key(ledger, sample.config(**OFFLOAD))["offload.fraction"]
    share = (0.95 * round(139.8 * 2**30) - 61.2e9) / 160e9
    assert float(found.value) == pytest.approx(1 - share, abs=0.01)
    assert found.gain_seconds == pytest.approx(0.1 * share)


@pytest.mark.parametrize("rule", FINDINGS)
def test_lint_becomes_advice(rule):
    """With its seconds, where it is known which line they are in."""
    ledger = dataclasses.replace(sample.ledger(), lint=())
    line = FINDINGS[rule].line
    for seconds in (0.01, None):
        found = advised(sample.with_lint(ledger, rule, seconds))
        gains = [each.gain_seconds for each in found if each.cause == rule]
        assert gains == [pytest.approx(seconds) if line and seconds else None]
    assert callable(getattr(lint, rule))


def test_lint_gains_no_more_than_its_line():
    """Kernels that overlap have more seconds of their own than the line has."""
    ledger = sample.with_lint(sample.ledger(), "copies", 5.0)
    gain = by_key(ledger)["layout"].gain_seconds
    assert gain == ledger.seconds("other_kernels")
    busy = sample.kernels()[2]
    several = dataclasses.replace(sample.ledger(), lint=(), kernels=(busy,) * 10)
    gain = by_key(sample.with_lint(several, "copies", busy.seconds))["layout"].gain_seconds
    assert gain == pytest.approx(several.seconds("other_kernels") / 10)


def test_copies_of_stacks_are_the_loops():
    stack = dataclasses.replace(sample.ledger().lint[0], text="copies f32[8,4,256]", instruction="dus.4")
    ledger = dataclasses.replace(sample.ledger(), lint=(stack,))
    found = by_key(ledger, sample.config(model__loop="scan"))
    assert "layout" not in found
    assert found["model.loop"].gain_seconds == pytest.approx(0.0157)


def test_a_cpu_is_not_told_about_gpus():
    run = dataclasses.replace(sample.ledger().run, platform="cpu", device_kind="cpu")
    found = advised(dataclasses.replace(sample.ledger(noise=0.0), run=run))
    assert not {"precision.matmul", "precision.compute"} & {each.key for each in found}


def test_float8_saves_what_its_account_says():
    """2 of 4 rows of 8,192 on each of two H200s: as 8 layers of Llama 3 8B are timed on one."""
    (advice,) = [each for each in advised(sample.ledger()) if each.key == "precision.matmul"]
    assert advice.gain_seconds == pytest.approx(428.9e-3 - 325.9e-3, rel=0.05)
    assert "by arithmetic a step's linear layers take 133 ms in place of 249" in advice.text


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("NVIDIA H200", {"precision__matmul": "fp8"}),
        ("NVIDIA H200", {"lora__rank": 16, "lora__base": "fp8"}),
        ("NVIDIA H200", {"mesh__transfers": "copies"}),
        ("NVIDIA A100-SXM4-80GB", {}),
    ],
)
def test_float8_is_advised_where_auto_would_take_it(kind, config):
    run = dataclasses.replace(sample.ledger().run, device_kind=kind)
    ledger = dataclasses.replace(sample.ledger(noise=0.0), run=run)
    assert "precision.matmul" not in by_key(ledger, sample.config(**config))


def test_float8_is_for_a_clock_that_was_held_down():
    assert "precision.matmul" not in by_key(sample.ledger(frequency=0.0))
    assert "precision.matmul" not in by_key(sample.ledger(frequency=-0.001))


@pytest.mark.parametrize(
    "changed", [{"a_key": "of another version"}, {"pretrained": "~nobody-of-this-name/x"}]
)
def test_a_configuration_that_is_no_more_read_has_other_advice(changed):
    config = sample.config()
    config["model"] |= changed
    known = sample.facts(sample.config())
    found = with_advice(dataclasses.replace(sample.ledger(), model=known), config).advice
    assert found and "precision.matmul" not in {each.key for each in found}


@pytest.mark.parametrize("noise", [0.0, 0.9])
@pytest.mark.parametrize(
    ("rule", "text", "config", "key"),
    [
        ("copies", "copies f32[64,64]", {}, "layout"),
        ("copies", "copies f32[8,4,256]", {"model__loop": "scan"}, "model.loop"),
        ("attention_again", "again", {"remat__policy": "full"}, "remat.policy"),
        ("float32_matmuls", "multiplies float32", {}, "precision.compute"),
    ],
)
def test_a_finding_knows_the_advice_that_counts_it(rule, text, config, key, noise):
    """The noise of the run decides on both alike."""
    entry = dataclasses.replace(sample.ledger().lint[0], rule=rule, text=text, instruction="dus.4")
    ledger = dataclasses.replace(sample.ledger(noise=noise), lint=(entry,))
    ledger = with_advice(ledger, sample.config(**config))
    (found,) = ledger.lint
    assert found.remedy == key
    assert found.advised is (noise == 0.0) is (key in {each.key for each in ledger.advice})
    assert found.gain_seconds > 0
    assert (found.gain_seconds >= noise_threshold(ledger)) is found.advised


def test_a_finding_whose_gain_is_not_known_is_advised_on():
    ledger = dataclasses.replace(sample.ledger(noise=0.9), lint=())
    (found,) = with_advice(sample.with_lint(ledger, "not_donated", None), sample.config()).lint
    assert (found.remedy, found.gain_seconds, found.advised) == ("donate_argnums", None, True)


def test_a_finding_of_another_version_has_no_advice():
    ledger = dataclasses.replace(sample.ledger(), lint=())
    (found,) = with_advice(sample.with_lint(ledger, "of_old", 0.1), sample.config()).lint
    assert (found.remedy, found.advised) == ("", False)
