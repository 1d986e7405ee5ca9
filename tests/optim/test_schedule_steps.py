"""Learning rates of each schedule, their hold after its end, and what another end does to them."""

import math

import numpy as np
import pytest

from jaxthru.optim.optimizer import OptimConfig
from jaxthru.optim.schedule_change import Plan, schedule_change
from jaxthru.optim.schedules import make_schedule
from jaxthru.runtime.errors import InputError


def config(schedule: str, **changes) -> OptimConfig:
    settings = {"learning_rate": 1.0, "warmup_ratio": 0.2, "decay_ratio": 0.4, "final_ratio": 0.1}
    return OptimConfig(schedule=schedule, **settings | changes)


def cosine(share: float) -> float:
    """From 1 to 0.1."""
    return 0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2


OVER_TEN = {
    "cosine": [0.5, 1, *(cosine(step / 8) for step in range(8)), 0.1, 0.1, 0.1],
    "wsd": [0.5, 1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1],
    "constant": [0.5, *[1] * 12],
}


@pytest.mark.parametrize("schedule", OVER_TEN)
@pytest.mark.parametrize(("steps", "span"), [(10, None), (13, 10), (1000, 10), (4, 10)])
def test_rates_are_those_of_the_steps_that_the_schedule_spans(schedule, steps, span):
    rates = make_schedule(config(schedule, schedule_steps=span), steps)
    found = [float(rates(made)) for made in range(13)]
    assert found == pytest.approx(OVER_TEN[schedule], rel=1e-6)


def test_no_schedule_spans_nothing():
    with pytest.raises(InputError, match=r"optim\.schedule_steps = 0: must be at least 1"):
        config("cosine", schedule_steps=0)


@pytest.mark.parametrize(
    ("schedule", "made", "steps", "said"),
    [
        ("cosine", 10, 20, ("stretched", cosine(7 / 8), cosine(6 / 16))),
        ("cosine", 6, 20, ("stretched", cosine(3 / 8), cosine(2 / 16))),
        ("cosine", 6, 7, ("compressed", cosine(3 / 8), cosine(5 / 6))),
        ("wsd", 9, 20, ("stretched", 0.55, 1)),
        ("wsd", 6, 20, None),  # it was still at its peak, and stays there
        ("constant", 6, 20, None),
        ("cosine", 0, 20, None),  # nothing is made yet
        ("cosine", 6, 10, None),
    ],
)
def test_another_end_says_what_it_does(schedule, made, steps, said):
    plan = config(schedule)
    line = schedule_change(Plan(plan, 10), Plan(plan, steps), made)
    if said is None:
        assert line == ""
        return
    how, before, after = said
    assert line == (
        f"the {schedule} schedule is {how}: the learning rate goes from {before:.1e} to {after:.1e} at step "
        f"{made + 1}; optim.schedule_steps=10 holds it"
    )


def test_held_nothing_changes():
    held = Plan(config("cosine", schedule_steps=10), 20)
    assert schedule_change(Plan(config("cosine"), 10), held, 10) == ""
    made = np.arange(20)
    assert held.rates(made)[10:] == pytest.approx(0.1)
    np.testing.assert_array_equal(held.rates(made)[:10], Plan(config("cosine"), 10).rates(made)[:10])


def test_a_lengthened_run_can_be_held_after_all():
    """As the log said it could, when its steps were stretched: whatever the steps between had."""
    stretched, held = Plan(config("cosine"), 4000), Plan(config("cosine", schedule_steps=20), 4000)
    assert "the cosine schedule is compressed" in schedule_change(stretched, held, 25)
    assert held.rates(np.array([25])) == pytest.approx(0.1)
