"""python -m jaxthru.plan cost: what a run comes to, by a rate that was measured, given or predicted."""

import json

import pytest

from jaxthru.engine.terms import METRICS_FIELDS
from jaxthru.plan import cost
from jaxthru.plan.__main__ import main
from jaxthru.training.cost import CostConfig
from jaxthru.training.run_directory import RunDirectory

PRICE = CostConfig(dollars_per_device_hour=3.0)


def made(path, joules=18.4, steps=20, own=None, devices=2, first=5.0):
    """Returns the directory of a run of 1,000 tokens a step, half a second each, but for the first ones."""
    run = RunDirectory(path)
    for step in range(1, steps + 1):
        seconds = first if step <= 5 else 0.5
        row = {"step": step, "tokens": 1000, "tokens_per_second": 1000 / seconds, "step_seconds": seconds}
        run.append_metrics(dict.fromkeys(METRICS_FIELDS) | row | {"joules": joules, "goodput": 0.8})
    run.config.write_text(json.dumps({"cost": own or {}}))
    run.environment.write_text(json.dumps({"devices": {"kind": "NVIDIA H200", "count": devices}}))
    return run


def command(capsys, *arguments, config="quickstart"):
    code = main(["cost", "--config", config, *arguments])
    return code, capsys.readouterr()


def test_a_bill_is_arithmetic():
    found = cost.bill(7.2e9, cost.given(1e6, 64), PRICE)
    assert (found.hours, found.device_hours, found.dollars) == (2.0, 128.0, 384.0)
    assert (found.mwh, found.joules_per_token) == (None, None)
    assert found.dollars_per_million_tokens == pytest.approx(384 / 7200)


def test_what_devices_do_not_count_is_added_once():
    rate = cost.Rate(10, 100.0, 100.0, 100.0, (), joules_per_token=50.0)
    prices = CostConfig(watts_beside=200.0, pue=1.25)
    found = cost.bill(3.6e6, rate, prices)  # 36,000 s of 10 devices
    assert found.mwh * 3.6e9 == pytest.approx((50 * 3.6e6 + 200 * 10 * 36_000) * 1.25)
    whole = cost.Rate(10, 100.0, 100.0, 100.0, (), joules_per_token=50.0, whole=True)
    assert cost.bill(3.6e6, whole, prices).joules_per_token == 50.0


def test_the_published_run_costs_what_its_record_says(capsys):
    """37,556 tokens/s at 691 W (docs/results.md), at 3 dollars an hour as an example."""
    words = ("--tokens", "1e6", "--tokens-per-second", "37556", "--joules-per-token", "0.0184")
    code, said = command(capsys, *words, "--set", "cost.dollars_per_device_hour=3", "--json")
    found = json.loads(said.out)
    assert code == 0
    assert found["dollars"] == pytest.approx(0.0222, abs=5e-5)
    assert found["mwh"] * 3.6e9 == pytest.approx(18_400)


def test_a_run_s_own_rate_and_joules_are_taken(tmp_path, capsys):
    run = made(tmp_path, first=1000.0)
    rate = cost.measured(run)
    assert (rate.devices, rate.tokens_per_second, rate.low, rate.high) == (2, 2000, 2000, 2000)
    assert rate.joules_per_token == pytest.approx(0.0184)
    code, said = command(capsys, "--run", str(run.path), "--tokens", "7.2e6")
    assert code == 0
    assert "measured: the median of 15 steps" in said.out
    assert "18.4 mJ a token" in said.out
    assert "goodput 80.0%" in said.out and "1.25 hours" in said.out
    assert "no price" in said.out and "none is assumed" in said.out


def test_the_goodput_of_a_short_run_says_nothing_of_a_long_one(tmp_path):
    assert cost.measured(made(tmp_path)).goodput is None


def test_joules_that_a_run_has_made_whole_are_said_so(tmp_path):
    rate = cost.measured(made(tmp_path, own={"pue": 1.2, "watts_beside": None}), devices=8)
    assert rate.whole and rate.tokens_per_second == 8000
    assert any("cost.pue = 1.2" in line for line in rate.said)
    assert any("an upper bound" in line for line in rate.said)
    found = cost.bill(1e6, rate, CostConfig(pue=1.1))
    assert any("add nothing" in line for line in cost.lines(found, CostConfig(pue=1.1)))
    assert not any("add nothing" in line for line in cost.lines(found, CostConfig()))


def test_a_run_without_joules_has_hours_alone(tmp_path, capsys):
    code, said = command(capsys, "--run", str(made(tmp_path, joules=None).path))
    assert code == 0
    assert "energy is not known" in said.out


def test_a_prediction_says_that_it_is_one(capsys):
    code, said = command(capsys, "--devices", "64", config="llama3_70b")
    assert code == 0
    assert "predicted by plan limits, not measured" in said.out
    assert " hours, and dollars in proportion" in said.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--run", "no_such_run"), "no metrics.jsonl"),
        (("--run", "a", "--tokens-per-second", "3"), "not both"),
        (("--tokens", "0"), "--tokens 0"),
        (("--devices", "0"), "--devices 0"),
        (("--joules-per-token", "-1"), "--joules-per-token -1"),
        (("--set", "cost.pue=0.5"), "cost.pue"),
        (("--set", "cost.price=1"), "cost.price"),
        (("--devices", "7"), "--devices 7"),
        (("--tokens", "inf"), "--tokens inf"),
        (("--devices", "64", "--fabric", "ethernet_pair"), "--devices 64: the fabric has 16"),
        (("--device", "h300"), "h300"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, words):
    code, said = command(capsys, *arguments, config="llama3_8b_8layer")
    assert code == 2
    assert words in said.err
    assert said.err.count("\n") == 1


def test_a_run_without_its_devices_is_refused(tmp_path, capsys):
    run = made(tmp_path)
    run.environment.write_text("{}")
    code, said = command(capsys, "--run", str(run.path))
    assert code == 2
    assert "environment.json" in said.err
