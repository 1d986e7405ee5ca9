"""The sentences at the head of the report: what they are held against, and when they judge nothing."""

import dataclasses
import json
import re

import pytest
import sample

from jaxthru.profile.account.ledger import Ledger
from jaxthru.profile.explain.unit import Unit
from jaxthru.profile.explain.verdict import (
    BF16,
    FLOAT8,
    nothing_to_win,
    shares,
    sustained,
    verdict,
)
from jaxthru.profile.show.html import report

RECORD = json.loads((sample.ROOT / "scripts/bench/results/one_gpu_h200.json").read_text())["summary"]["rows"]
WORDS = {
    "jaxthru_causal": "good",
    "hf": "good",
    "torchtitan": "good",
    "plain_jax": "good",
    "hf_default": "fair",
    "jaxthru_fp8": "good",
    "torchtitan_fp8": "good",
}


def bounds(ledger: Ledger) -> str:
    """Returns what the report says that the verdict goes by."""
    found = re.search(r"Verdict: .*?low: less\.", re.sub(r"\s+", " ", report(ledger)))
    return found[0] if found else ""


def at(rate: float, *, float8: bool = False) -> Ledger:
    """Returns the ledger of one H200 whose step runs needed FLOPs at a rate, in FLOP/s."""
    ledger = sample.ledger(**({"ideal": 0.215 / 1.7} if float8 else {}))
    run = dataclasses.replace(ledger.run, devices=1)
    span = run.attention_span_per_token * run.tokens_per_step
    step = ledger.model.flops(run.tokens_per_step, span) / rate
    matmul = dataclasses.replace(ledger.matmul, model_flops=ledger.matmul.model_flops / 2)
    window = dataclasses.replace(ledger.window, step_seconds=step)
    return dataclasses.replace(ledger, run=run, matmul=matmul, window=window)


def test_what_an_h200_sustains_is_what_was_measured():
    for against, row in ((BF16, "gemm_bf16"), (FLOAT8, "gemm_fp8")):
        assert against.flops / 1e12 == pytest.approx(RECORD[row]["tflops"], rel=1e-3)


@pytest.mark.parametrize("row", WORDS)
def test_published_steps_are_what_they_are_called(row):
    of = RECORD[row]
    said = verdict(at(1e12 * of["tflops"], float8=of["precision"] == "fp8"))
    kind = "float8" if of["precision"] == "fp8" else "bf16"
    assert said == (
        f"{of['share_of_gemm']:.0%} of what this GPU sustains in large {kind} matmuls: {WORDS[row]}."
    )


def test_a_slow_step_is_low_and_its_bounds_are_said():
    slow = at(0.3 * BF16.flops)
    assert verdict(slow).startswith("30% of") and verdict(slow).endswith(": low.")
    assert "Good: from 75%" in bounds(slow) and "fair: from 60%" in bounds(slow)
    assert "1,293 TFLOP/s" in bounds(at(1e14, float8=True))


def test_kernels_that_multiply_and_communicate_do_not_look_like_float8():
    ledger = at(5e14, float8=True)
    lines = tuple(
        dataclasses.replace(line, seconds=0.1 if line.name == "collective_matmul" else line.seconds)
        for line in ledger.lines
    )
    assert sustained(ledger) is FLOAT8
    assert sustained(dataclasses.replace(ledger, lines=lines)) is BF16


@pytest.mark.parametrize(
    ("kind", "platform", "said"),
    [
        ("cpu", "cpu", "its speed is not judged"),
        ("NVIDIA A100-SXM4-80GB", "gpu", r"^\d+% of the data sheet's peak\. Not judged"),
        ("NVIDIA H200 NVL", "gpu", r"^\d+% of the data sheet's peak\. Not judged"),
        ("a new device", "gpu", "Not judged: the peak of a new device is not known"),
    ],
)
def test_where_nothing_was_measured_nothing_is_judged(kind, platform, said):
    ledger = sample.ledger()
    run = dataclasses.replace(ledger.run, device_kind=kind, platform=platform)
    matmul = dataclasses.replace(ledger.matmul, peak_flops=None)
    ledger = dataclasses.replace(ledger, run=run, matmul=matmul)
    assert re.search(said, verdict(ledger))
    assert bounds(ledger) == ""


def test_tokens_that_were_not_recorded_are_no_rate_of_zero():
    ledger = sample.ledger()
    ledger = dataclasses.replace(ledger, run=dataclasses.replace(ledger.run, tokens_per_step=0.0))
    assert "%" not in verdict(ledger)
    assert bounds(ledger) == ""


def test_the_largest_of_the_rest_is_named_where_it_is_above_the_noise():
    ledger = sample.ledger()
    unit = Unit.of(ledger.window.step_seconds)
    said = shares(ledger, unit).replace("\N{NO-BREAK SPACE}", " ")
    assert said == (
        "Of a step of 491.0 ms, the needed matmuls at peak take 44%. Largest of the rest: attention "
        "(66.0 ms, 13.4%)."
    )
    assert "No other part" in shares(sample.ledger(noise=0.5), unit)


@pytest.mark.parametrize(
    ("window", "said"),
    [
        ({"noise": 0.004}, "more than the noise of this run, 2.0 ms (0.4% of the step)."),
        ({"noise": 0.3}, "147.3 ms (30.0% of the step). Its steps differ by that much: profile on an idle"),
        ({"noise": 0.0, "loop_seconds": None}, "to win more than 1.0 ms (0.2% of the step)."),
    ],
)
def test_noise_is_named_where_it_is_known(window, said):
    ledger = sample.ledger()
    ledger = dataclasses.replace(ledger, window=dataclasses.replace(ledger.window, **window))
    words = nothing_to_win(ledger, Unit.of(0.491)).replace("\N{NO-BREAK SPACE}", " ")
    assert said in words
    assert words.endswith(("of the step).", "to see smaller gains."))
