"""The planted cause comes first, with its size; what is under the noise of both runs is not named."""

import dataclasses

import pytest
import sample

from jaxthru.profile.account.ledger import LINES, Collective, Scope
from jaxthru.profile.explain.breakdown import step_parts
from jaxthru.profile.explain.compare import compare
from jaxthru.profile.explain.settings import FINDINGS, SETTINGS, TITLES

CLEAN = sample.ledger()
CONFIG = sample.config()


def compared(planted, config=CONFIG):
    return compare(CLEAN, planted, CONFIG, config)


def test_sleep_in_the_loader():
    found = compared(sample.ledger(data_wait=0.112))
    assert found.top.name == "data_wait"
    assert found.top.seconds == pytest.approx(0.1)
    assert found.top.share == pytest.approx(0.1 / CLEAN.window.step_seconds)
    assert "loader" in found.top.cause


def test_host_synchronisation():
    found = compared(sample.ledger(host_gap=0.054, dependency=0.005))
    assert (found.top.name, found.top.seconds) == ("host_gap", pytest.approx(0.05))
    assert "synchronisation" in found.top.cause


def test_float32_matmul_is_one_change():
    planted = sample.with_lint(
        sample.ledger(inefficiency=0.09, frequency=0.060), "float32_matmuls", 0.06, "model/layer/mlp"
    )
    found = compared(planted)
    assert (found.top.name, found.top.rule) == ("matmul", "float32_matmuls")
    assert found.top.seconds == pytest.approx(0.06)
    assert "model/layer/mlp" in found.top.cause


def test_extra_all_gather():
    extra = Collective("all-gather.99", "all-gather", 469e6, 1.0, 0.031, 0.03, 0.0)
    planted = sample.ledger(exposed_communication=0.048)
    planted = dataclasses.replace(planted, collectives=(*planted.collectives, extra))
    found = compared(sample.with_lint(planted, "collectives", 0.03))
    assert (found.top.name, found.top.rule) == ("exposed_communication", "collectives")
    assert found.top.seconds == pytest.approx(0.03)
    assert "all-gather of 469 MB" in found.top.cause


def test_straggler():
    slow = [dataclasses.replace(each, wait_seconds=0.04, last="cuda:1") for each in CLEAN.collectives]
    planted = dataclasses.replace(sample.ledger(exposed_communication=0.08), collectives=tuple(slow))
    assert "waiting for cuda:1" in compared(planted).top.cause


def test_repeated_attention_with_all_that_it_repeats():
    planted = sample.ledger(attention=0.096, recomputation=0.040, other_kernels=0.057)
    again = (
        Scope("attention", "recomputation", "attention", 0.030),
        Scope("norm", "recomputation", "other_kernels", 0.005),
    )
    planted = dataclasses.replace(planted, scopes=(*planted.scopes, *again))
    found = compared(sample.with_lint(planted, "attention_again", 0.03), sample.config(remat__policy="full"))
    assert (found.top.name, found.top.rule) == ("recomputation", "attention_again")
    assert found.top.seconds == pytest.approx(0.050)
    assert "remat.policy 'projections' → 'full'" in found.top.cause
    assert [change.name for change in found.changes] == ["recomputation"]


def test_products_that_are_computed_again_count_with_all_they_take():
    """At the peak they take 40 ms more; with what the clock and kernels add, as much in proportion."""
    planted = sample.ledger(recomputation=0.065, frequency=0.054, inefficiency=0.0488)
    longer = [
        dataclasses.replace(scope, seconds=0.033 * 65 / 25) if scope.line == "matmul" else scope
        for scope in planted.scopes
        if scope.line != "matmul" or scope.phase == "recomputation"
    ]
    found = compared(dataclasses.replace(planted, scopes=tuple(longer)))
    assert (found.top.name, found.top.seconds) == ("recomputation", pytest.approx(0.033 * 40 / 25))
    total = sum(change.seconds for change in found.changes) + found.rest
    assert total == pytest.approx(found.step_after - found.step_before)


def test_repeated_attention_without_a_peak():
    """On a CPU matmuls are not taken apart, and what is recomputed shows in the scopes alone."""

    def cpu(ledger):
        nothing = dict.fromkeys(f"{name}_seconds" for name in ("ideal", "recomputation", "frequency"))
        return dataclasses.replace(ledger, matmul=dataclasses.replace(ledger.matmul, **nothing))

    planted = sample.ledger(attention=0.096)
    again = Scope("attention", "recomputation", "attention", 0.030)
    planted = dataclasses.replace(planted, scopes=(*planted.scopes, again))
    found = compare(cpu(CLEAN), cpu(planted), CONFIG, CONFIG)
    assert (found.top.name, found.top.seconds) == ("recomputation", pytest.approx(0.030))


def test_operands_that_change_the_clock():
    planted = sample.ledger(frequency=0.008)
    planted = dataclasses.replace(planted, clock=dataclasses.replace(planted.clock, mean_mhz=1785.0))
    found = compared(planted)
    assert (found.top.name, found.top.seconds) == ("frequency", pytest.approx(-0.04))
    assert "1,540 to 1,785 MHz" in found.top.cause
    assert "operands" in found.top.cause
    assert ("clock, MHz", 1540.0, 1785.0) in found.figures


def test_changes_add_up_to_the_step():
    planted = sample.ledger(attention=0.08, data_wait=0.02, frequency=0.04, host_gap=0.0045)
    found = compared(planted)
    total = sum(change.seconds for change in found.changes) + found.rest
    assert total == pytest.approx(found.step_after - found.step_before)
    assert [abs(change.seconds) for change in found.changes] == sorted(
        (abs(change.seconds) for change in found.changes), reverse=True
    )
    assert "host_gap" not in {change.name for change in found.changes}


def test_equal_runs_have_no_top_change():
    found = compared(sample.ledger(data_wait=0.0125))
    assert found.top is None
    assert found.config == ()
    assert compare(sample.ledger(noise=0.2), sample.ledger(data_wait=0.1), CONFIG, CONFIG).top is None


def test_other_steps_are_compared_by_token():
    planted = sample.ledger(data_wait=0.012)
    twice = dataclasses.replace(planted, run=dataclasses.replace(planted.run, tokens_per_step=65536.0))
    found = compared(twice)
    assert found.tokens == 2
    assert found.step_after == pytest.approx(found.step_before / 2)


def test_configuration_differences_leave_out_the_profile():
    changed = sample.config(remat__policy="none", profile__at=30, optim__learning_rate=1.0)
    assert compared(CLEAN, changed).config == (
        ("optim.learning_rate", 0.0003, 1.0),
        ("remat.policy", "projections", "none"),
    )


def test_other_devices_and_versions_are_said():
    run = dataclasses.replace(CLEAN.run, devices=4, device_kind="NVIDIA H100", versions={"jax": "0.12.0"})
    found = compared(dataclasses.replace(sample.ledger(attention=0.2), run=run))
    assert found.config == (
        ("devices", "2 × NVIDIA H200", "4 × NVIDIA H100"),
        ("jax", "0.11.2", "0.12.0"),
    )
    assert "4 × NVIDIA H100" in found.top.cause
    assert "0.12.0" in found.top.cause


@pytest.mark.parametrize("part", ["attention", "other_kernels", "host_gap", "data_wait"])
def test_settings_that_move_no_time_are_no_cause(part):
    still = sample.config(train__steps=7, train__seed=5, train__skip_limit=3, optim__learning_rate=1.0)
    found = compared(sample.ledger(**{part: 0.3}), still)
    assert len(found.config) == 4
    assert found.top.name == part
    assert not any(key in found.top.cause for key, _, _ in found.config)


def test_the_keys_of_causes_are_of_the_configuration():
    keys = {f"{group}.{name}" for group, part in CONFIG.items() for name in part}
    assert {
        key for found in SETTINGS.values() for key in found if not any(of.startswith(key) for of in keys)
    } == set()
    assert set(LINES) - {"unclassified"} <= set(SETTINGS)


def test_all_parts_have_names():
    assert set(SETTINGS) <= set(TITLES)
    assert {part for found in FINDINGS.values() for part in found.parts} <= set(TITLES)
    assert set(LINES) <= set(TITLES)
    assert set(step_parts(CLEAN)) <= set(TITLES)
    assert sum(step_parts(CLEAN).values()) == pytest.approx(CLEAN.window.step_seconds)
