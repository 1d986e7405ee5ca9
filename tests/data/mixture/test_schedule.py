import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxthru.data.mixture.configuration import Mixture, Share
from jaxthru.data.mixture.schedule import STAIRS, stairs
from jaxthru.runtime.errors import InputError

RAMP = {"unit": "steps", "sources": {"a": {"weight": 1}, "b": {"weight": [[100, 0], [300, 1]]}}}


def stairs_of(tree, start=0, tokens_per_step=10):
    return list(stairs(Mixture.from_tree(tree), start, tokens_per_step))


def test_linear_weights_rise_between_their_points():
    found = stairs_of(RAMP)
    assert [first for first, _, _ in found[1:]] == [last for _, last, _ in found[:-1]]
    assert found[0] == (0, 100, {"a": 1, "b": 0}) and found[-1] == (300, None, {"a": 1, "b": 1})
    assert len(found) == 202
    assert found[1][2]["b"] == 0 and found[101][2]["b"] == pytest.approx(0.5)


def test_staged_weights_hold_until_the_next_point():
    assert stairs_of(RAMP | {"interpolate": "staged"}) == [
        (0, 100, {"a": 1, "b": 0}),
        (100, 300, {"a": 1, "b": 0}),
        (300, None, {"a": 1, "b": 1}),
    ]


def test_points_in_tokens_are_reached_at_the_step_that_has_seen_them():
    staged = RAMP | {"interpolate": "staged", "unit": "tokens"}
    assert [stair[:2] for stair in stairs_of(staged)] == [(0, 10), (10, 30), (30, None)]
    assert [stair[:2] for stair in stairs_of(staged, tokens_per_step=7)] == [(0, 15), (15, 43), (43, None)]
    assert len(stairs_of(RAMP | {"unit": "tokens"})) == 22


points = st.lists(
    st.tuples(st.integers(0, 5000), st.floats(0, 5)), min_size=1, max_size=5, unique_by=lambda p: p[0]
)


@settings(deadline=None)
@given(points=points, start=st.integers(0, 6000), interpolate=st.sampled_from(["linear", "staged"]))
def test_stairs_follow_the_points(points, start, interpolate):
    points = sorted(map(list, points))
    tree = {"interpolate": interpolate, "sources": {"a": {"weight": 1}, "b": {"weight": points}}}
    mixture = Mixture.from_tree(tree)
    found = list(stairs(mixture, start, 10))
    assert found[0][0] == start and found[-1][1] is None and len(found) <= (STAIRS + 1) * 5
    where, weights = zip(*points, strict=True)
    for (first, last, weight), following in zip(found, [*found[1:], None], strict=True):
        assert last == (following and following[0]) and (last is None or last > first)
        for step in (first, first if last is None else last - 1):
            if interpolate == "linear":
                steepest = np.abs(np.diff(weights) / np.diff(where)).max(initial=0)
                width = 0 if last is None else np.diff(where).max(initial=0) / STAIRS + 1
                assert weight["b"] == pytest.approx(
                    np.interp(step, where, weights), abs=steepest * width + 1e-9
                )
            else:
                past = [value for at, value in points if at <= step]
                assert weight["b"] == (past[-1] if past else weights[0])


def test_json_round_trip():
    tree = RAMP | {"count": "documents", "interpolate": "staged"}
    tree["sources"]["c"] = {"weight": 0.1, "max_epochs": 2.5, "max_tokens": 10, "exhausted": "stop"}
    mixture = Mixture.from_tree(tree)
    assert mixture.shares["c"] == Share(((0.0, 0.1),), 2.5, 10.0, "stop")
    assert Mixture.from_tree(json.loads(json.dumps(mixture.to_tree()))) == mixture
    assert mixture.to_tree()["sources"]["b"]["weight"] == [[100, 0], [300, 1]]


def test_defaults_of_a_cap():
    def share(**keys):
        return Mixture.from_tree({"sources": {"a": {"weight": 1, **keys}}}).shares["a"]

    assert share() == Share(((0.0, 1.0),))
    assert share(max_tokens=5).exhausted == "drop"
    assert share(exhausted="stop").max_epochs == 1 == share(exhausted="drop").max_epochs


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ({"weight": -1}, r"mix: sources.a.weight = -1: must be a number >= 0, or a list"),
        ({"weight": True}, "weight = True"),
        ({}, "weight is missing"),
        ({"weight": []}, r"weight = \[\]: must be a list of \[when, weight\]"),
        ({"weight": [[0, 1], [5]]}, r"must be a list of \[when, weight\]"),
        ({"weight": [[0, 1], [5, -1]]}, r"must be a list of \[when, weight\]"),
        ({"weight": [[5, 1], [5, 2]]}, "must rise"),
        ({"weight": [[0, 1], [5, 0]]}, "sum to 0 at steps 5"),
        ({"weight": 0}, "sum to 0"),
        ({"weight": 1, "max_epochs": 0}, "max_epochs = 0: must be a number > 0"),
        ({"weight": 1, "max_tokens": "x"}, "max_tokens = x"),
        ({"weight": 1, "exhausted": "dropp"}, "did you mean 'drop'"),
        ({"weight": 1, "exhausted": "repeat", "max_epochs": 1}, "contradicts its cap"),
    ],
)
def test_refuses(share, message):
    with pytest.raises(InputError, match=message):
        Mixture.from_tree({"sources": {"a": share}}, "mix: ")


@pytest.mark.parametrize("key", ["interpolate", "unit", "count"])
def test_refuses_a_choice_that_there_is_not(key):
    with pytest.raises(InputError, match=f"{key} = 'linera'"):
        Mixture.from_tree({key: "linera", "sources": {"a": {"weight": 1}}})
