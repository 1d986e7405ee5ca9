import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.mixture.sampler import MixtureSampler, Supply
from jaxthru.runtime.errors import InputError


def names(count):
    return [f"s{index}" for index in range(count)]


def sampler(schedule, supplies, rows=8, seed=0, sequence=100):
    """supplies: {source: rows} or {source: Supply}; schedule: [(step, tree)]."""
    full = {n: s if isinstance(s, Supply) else Supply(s, s * sequence, s) for n, s in supplies.items()}
    made = tuple((step, Mixture.from_tree(tree)) for step, tree in schedule)
    return MixtureSampler(full, made, seed=seed, rows=rows, sequence=sequence)


def one(sources, **keys):
    return [(0, {**keys, "sources": sources})]


def counts_of(made, start, stop, sources):
    return np.bincount(np.concatenate([made.sources(s) for s in range(start, stop)]), minlength=sources)


weights = st.floats(0, 4) | st.just(0.0)
points = st.lists(st.tuples(st.integers(0, 400), weights), min_size=2, max_size=3, unique_by=lambda p: p[0])
share = st.fixed_dictionaries(
    {"weight": weights | points.map(lambda found: sorted(map(list, found)))},
    optional={"max_epochs": st.floats(0.2, 3)},
)


def log_normal(count, seed=0):
    """Weights of so many sources, a few of them large, most small."""
    return np.random.default_rng(seed).lognormal(0, 1, count)


def weighted(values, **keys):
    return {f"s{number:04}": {"weight": float(value), **keys} for number, value in enumerate(values)}


def farthest(made, steps):
    """Returns by how many rows a source is off what is asked of it, at worst."""
    return max(np.abs(made.taken(step) - made.asked(step)).max() for step in steps)


@settings(deadline=None, max_examples=25)
@given(
    count=st.integers(1, 40),
    seed=st.integers(0, 99),
    start=st.integers(0, 10**7),
    rows=st.sampled_from([1, 2, 8, 64]),
)
def test_while_weights_stand_no_source_is_a_row_off(count, seed, start, rows):
    """A thousandth more was found once in 266,000 steps of 2 to 12 sources, of which one has most rows."""
    values = log_normal(count, seed)
    sources = weighted(values)
    made = sampler(one(sources), dict.fromkeys(sources, 50), rows=rows)
    for step in range(start, start + 100):
        asked = values / values.sum() * (step * rows)
        assert np.abs(made.taken(step) - asked).max() < 1.01
        assert made.asked(step) == pytest.approx(asked, rel=1e-9)


@pytest.mark.parametrize(
    ("count", "steps"),
    [
        (3, 2000),
        (100, 2000),
        (1000, 500),
        *(pytest.param(count, 10**5, marks=pytest.mark.slow) for count in (3, 100)),
        *(pytest.param(count, 2 * 10**4, marks=pytest.mark.slow) for count in (1000, 3000)),
    ],
)
def test_no_source_is_a_row_off_at_any_step(count, steps):
    values = log_normal(count)
    sources = weighted(values)
    made = sampler(one(sources), dict.fromkeys(sources, 1000), rows=64)
    share = values / values.sum() * 64
    assert max(np.abs(made.taken(step) - share * step).max() for step in range(steps)) <= 1
    far = range(10**8 // 64 - 20, 10**8 // 64)  # to 10^8 rows
    assert max(np.abs(made.taken(step) - share * step).max() for step in far) <= 1


def test_any_step_of_a_thousand_sources_is_found_in_50_ms():
    sources = weighted(log_normal(1000))
    made = sampler(one(sources), dict.fromkeys(sources, 1000), rows=64)
    took = []
    for step in (77_777, 10**6 + 1, 123, 10**9):
        began = time.process_time()
        source, _ = made.rows_of(step)
        took.append(time.process_time() - began)
        assert len(source) == 64
    print([f"{1e3 * each:.1f} ms" for each in took])
    assert max(took) <= 0.05  # 7 to 12 ms


@pytest.mark.parametrize("count", [3, 100, 1000])
def test_ten_resumes_of_a_little_change_owe_no_more(count):
    """Each changes every weight by up to 1 %, after few steps or many."""
    draw, values, schedule = np.random.default_rng(7), log_normal(count), []
    steps = [0, *np.cumsum(draw.integers(1, 60, 10)).tolist()]
    asked = np.zeros(count)
    for step in steps:
        values = values * (1 + draw.uniform(-0.01, 0.01, count))
        schedule.append((step, {"sources": weighted(values)}))
    made = sampler(schedule, dict.fromkeys(weighted(values), 1000), rows=64)
    for (start, tree), end in zip(schedule, [*steps[1:], steps[-1] + 60], strict=True):
        now = np.array([each["weight"] for each in tree["sources"].values()])
        for step in range(start, end + 1):
            off = made.taken(step) - asked - now / now.sum() * (step - start) * 64
            assert np.abs(off).max() <= 2
        asked = asked + now / now.sum() * (end - start) * 64


@settings(deadline=None, max_examples=25)
@given(
    count=st.integers(2, 40),
    seed=st.integers(0, 99),
    cap=st.sampled_from([None, 0.5, 3]),
    interpolate=st.sampled_from(["linear", "staged"]),
    change=st.integers(1, 300),
    rows=st.sampled_from([1, 8, 64]),
)
def test_stages_caps_and_other_mixes_leave_no_source_far_behind(count, seed, cap, interpolate, change, rows):
    draw = np.random.default_rng(seed)

    def tree():
        sources = {}
        for name in weighted(range(count)):
            weight = [[at, float(draw.choice([0, 1, 1]) * draw.lognormal())] for at in (0, 40, 50, 200)]
            capped = {"max_epochs": cap} if cap and draw.random() < 0.3 else {}
            sources[name] = {"weight": weight, **capped}
        sources["always"] = {"weight": 0.5}
        return {"interpolate": interpolate, "sources": sources}

    schedule = [(0, tree()), (change, tree()), (change + 30, tree())]
    made = sampler(schedule, dict.fromkeys(schedule[0][1]["sources"], 100), rows=rows)
    assert farthest(made, range(400)) <= 4


def test_a_change_to_few_sources_gives_them_no_more_than_their_own():
    """What hundreds that leave are owed would be rows of those that stay, and the other way round later."""
    off = {name: {"weight": [[0, 1.0 + number % 7], [50, 0]]} for number, name in enumerate(names(500))}
    stay = {"x": {"weight": 1}, "y": {"weight": 2}}
    made = sampler(one(off | stay, interpolate="staged"), dict.fromkeys(off | stay, 100), rows=8)
    assert farthest(made, range(200)) <= 1
    assert (counts_of(made, 50, 200, 502)[:500] == 0).all()


@pytest.mark.parametrize("exhausted", ["drop", "stop"])
def test_at_the_end_of_a_run_each_has_what_was_asked(exhausted):
    sources = weighted(log_normal(100), max_epochs=2, exhausted=exhausted)
    made = sampler(
        one(sources), {name: 20 + 13 * len(sources) // (at + 1) for at, name in enumerate(sources)}
    )
    assert made.end and farthest(made, range(max(0, made.end - 300), made.end + 1)) <= 1


def test_a_thousand_sources_on_a_thousand_stairs_start_soon():
    pairs = zip(log_normal(1000), log_normal(1000, 1), strict=True)
    sources = {
        f"s{at:04}": {"weight": [[0, float(a)], [50_000, float(b)]]} for at, (a, b) in enumerate(pairs)
    }
    began = time.process_time()
    made = sampler(one(sources), dict.fromkeys(sources, 1000), rows=64)
    took = time.process_time() - began
    assert farthest(made, range(0, 60_000, 1999)) <= 1
    print(f"{took:.2f} s of CPU")
    assert took < 3


@settings(deadline=None, max_examples=60)
@given(
    shares=st.lists(share, min_size=1, max_size=5),
    unit=st.sampled_from(["steps", "tokens"]),
    interpolate=st.sampled_from(["linear", "staged"]),
    supply=st.integers(20, 400),
    change=st.integers(1, 300),
)
def test_counts_agree_with_rows_and_caps_hold(shares, unit, interpolate, supply, change):
    shares.append({"weight": 1.0})
    tree = {"unit": unit, "interpolate": interpolate, "sources": dict(zip(names(6), shares, strict=False))}
    other = {"sources": {name: {"weight": 1 + len(name)} for name in tree["sources"]}}
    number = len(shares)
    supplies = dict.fromkeys(tree["sources"], supply)
    for schedule in ([(0, tree)], [(0, tree), (change, other)]):
        made = sampler(schedule, supplies)
        assert made.end is None
        before = np.zeros(number, np.int64)
        for step in sorted({1, 50, change, 301, 402}):
            taken = made.taken(step)
            assert taken.sum() == step * 8 and (taken >= before).all()
            before = taken
        at = max(0, change - 20)
        assert (made.taken(at) + counts_of(made, at, at + 60, number) == made.taken(at + 60)).all()
        source, which = np.concatenate([made.rows_of(step) for step in range(at, at + 60)], axis=1)
        for index in range(number):
            span = np.arange(made.taken(at)[index], made.taken(at + 60)[index])
            assert (which[source == index] == span).all()
    plain = sampler([(0, tree)], supplies)
    for index, keys in enumerate(shares):
        if "max_epochs" in keys:
            assert plain.taken(10_000)[index] <= keys["max_epochs"] * supply + 1e-3
    assert all((plain.sources(s) == made.sources(s)).all() for s in range(max(0, change - 5), change))


def test_a_linear_schedule_gives_its_integral():
    sources = {
        "a": {"weight": 1},
        "b": {"weight": [[0, 0], [10_000, 1]]},
        "c": {"weight": [[5000, 1], [5001, 0]]},
    }
    made = sampler(one(sources), dict.fromkeys("abc", 1000))
    steps = np.arange(10_000) + 0.5
    b, c = steps / 10_000, steps < 5000.5
    total = 1 + b + c
    expected = 8 * np.array([(1 / total).sum(), (b / total).sum(), (c / total).sum()])
    assert np.abs(made.taken(10_000) / expected - 1).max() < 0.002
    assert made.taken(20_000)[1] - made.taken(10_000)[1] == pytest.approx(40_000, abs=20)


def test_nothing_drifts_over_many_short_stairs_of_many_sources():
    sources = {
        name: {"weight": [[0, 1 + index % 7], [3000, 1 + index % 3]]} for index, name in enumerate(names(306))
    }
    made = sampler(one(sources), dict.fromkeys(sources, 50), rows=64)
    taken = made.taken(3000)
    assert len(made._stages[0].at) == 1 + 1025  # a stair each
    step = (np.arange(3000) + 0.5)[:, None] / 3000
    weight = 1 + np.arange(306) % 7 + step * ((1 + np.arange(306) % 3) - (1 + np.arange(306) % 7))
    expected = 64 * (weight / weight.sum(1, keepdims=True)).sum(0)
    assert np.abs(taken - expected).max() < 1.1  # of which stairs are a part


@pytest.mark.parametrize("heavy", [0.9, 0.3, 1e-4])
@pytest.mark.parametrize("cap", [1, 2.5])
def test_a_capped_source_gives_exactly_its_cap_and_leaves_its_share(heavy, cap):
    sources = {"a": {"weight": heavy, "max_epochs": cap}, "b": {"weight": 0.06}, "c": {"weight": 0.04}}
    supply = 300 if heavy == 1e-4 else 40_000
    made = sampler(one(sources), {"a": supply, "b": 100, "c": 100})
    total = int(cap * supply)
    ends = total / (8 * heavy / (heavy + 0.1))
    before, after, late = (
        made.taken(step) for step in (int(ends * 0.98), int(ends * 1.02) + 8, int(ends) + 100_000)
    )
    assert before[0] < total == after[0] == late[0]
    assert before[0] / before.sum() == pytest.approx(heavy / (heavy + 0.1), abs=0.001)
    gained = (late - after)[1:]
    assert gained / gained.sum() == pytest.approx([0.6, 0.4], abs=1e-3)


@pytest.mark.parametrize("far", [1e12, 1e18, 1e300])
@pytest.mark.parametrize("interpolate", ["staged", "linear"])
def test_a_point_that_no_run_reaches_changes_nothing_before_it(far, interpolate):
    made = sampler(
        one({"a": {"weight": [[0, 1], [far, 0]]}, "b": {"weight": 1}}, interpolate=interpolate),
        {"a": 100, "b": 100},
    )
    assert made.end is None
    assert made.taken(256 * 10**6) == pytest.approx([1024 * 10**6] * 2, rel=1e-3)


def test_a_cap_that_no_run_reaches_changes_nothing_before_it():
    rare = {"weight": 6, "max_epochs": 2.5}
    made = sampler(one({"a": rare, "b": {"weight": 2**24 - 6}}), {"a": 50_000, "b": 9})
    assert made.end is None and made.taken(10**9)[0] == round(8e9 * 6 / 2**24)


def test_what_a_source_leaves_at_its_end_goes_to_the_others_by_their_weights():
    sources = {"a": {"weight": 0.9, "max_epochs": 1}, "b": {"weight": 0.0999}, "c": {"weight": 0.0001}}
    made = sampler(one(sources), {"a": 1000, "b": 500, "c": 100}, rows=512)
    assert made.taken(3)[0] == 1000 and made.taken(3)[2] <= 1


@settings(deadline=None, max_examples=40)
@given(
    sources=st.lists(
        st.tuples(
            st.sampled_from([1e-5, 0.01, 0.3, 1, 5]),
            st.sampled_from([0.3, 1, 2.5]),
            st.sampled_from([4, 7, 100, 1000]),
        ),
        min_size=1,
        max_size=5,
    ),
    rows=st.sampled_from([1, 8, 64]),
)
def test_sources_that_all_end_give_all_but_the_rows_of_a_last_step(sources, rows):
    shares = {f"s{at}": {"weight": each, "max_epochs": cap} for at, (each, cap, _) in enumerate(sources)}
    supplies = {f"s{at}": supply for at, (_, _, supply) in enumerate(sources)}
    caps = np.array([int(cap * supply) for _, cap, supply in sources])
    assume(caps.sum() >= rows)
    made = sampler(one(shares), supplies, rows=rows)
    assert made.end == caps.sum() // rows and (made.taken(made.end) <= caps).all()
    assert (counts_of(made, 0, made.end, len(caps)) == made.taken(made.end)).all()


def test_stop_ends_the_run_when_the_source_has_given_all():
    sources = {"a": {"weight": 1, "exhausted": "stop"}, "b": {"weight": 3}}
    made = sampler(one(sources), {"a": 1000, "b": 10})
    assert made.ended_by == "a" and 498 <= made.end <= 502
    assert made.taken(made.end)[0] == 1000
    assert made.taken(made.end + 50).tolist() == made.taken(made.end).tolist()
    assert sampler(one({"a": {"weight": 1}, "b": {"weight": 3}}), {"a": 1000, "b": 10}).end is None


def test_stop_ends_a_run_that_is_resumed_with_less_than_the_source_has_given():
    before = {"sources": {name: {"weight": 1} for name in "ab"}}
    less = {"sources": {"a": {"weight": 1, "max_epochs": 2, "exhausted": "stop"}, "b": {"weight": 1}}}
    made = sampler([(0, before), (300, less)], {"a": 100, "b": 100})
    assert made.taken(300)[0] > 200 and (made.end, made.ended_by) == (300, "a")


def test_the_run_ends_when_every_source_is_dropped():
    sources = {name: {"weight": 1, "exhausted": "drop"} for name in "ab"}
    made = sampler(one(sources), {"a": 1000, "b": 100})
    assert made.end == 1100 // 8 and (made.taken(made.end) <= [1000, 100]).all()


def test_a_new_mixture_after_the_end_goes_on():
    stop = {"sources": {"a": {"weight": 1, "exhausted": "stop"}}}
    ended = sampler([(0, stop)], {"a": 100}).end
    assert ended == 12
    made = sampler([(0, stop), (ended, {"sources": {"a": {"weight": 1}}})], {"a": 100})
    assert made.end is None and made.taken(100)[0] == 800


def test_a_cap_in_tokens_and_weights_by_what_is_counted():
    supplies = {"a": Supply(1000, 90_000, 100), "b": Supply(1000, 45_000, 4000)}
    sources = {name: {"weight": 1} for name in "ab"}
    steps = 4096
    for count, each in (("tokens", (90, 45)), ("documents", (0.1, 4))):
        given = sampler(one(sources, count=count), supplies).taken(steps) * each
        assert given[0] / given[1] == pytest.approx(1, abs=0.001)
    capped = one({"a": {"weight": 1, "max_tokens": 180_000}, "b": {"weight": 1}})
    assert sampler(capped, supplies).taken(10**6)[0] == 2000


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"a": {"weight": 1, "max_tokens": 99}}, "sources.a.max_tokens = 99: less than one row"),
        ({"a": {"weight": 1, "max_epochs": 0.001}}, "sources.a.max_epochs = 0.001"),
        (
            {"a": {"weight": 1, "max_epochs": 0.01}},
            "source a is exhausted before one step has its train.rows = 8",
        ),
        ({"aa": {"weight": 1}}, "names source 'aa'; did you mean 'a'"),
    ],
)
def test_refuses(sources, message):
    with pytest.raises(InputError, match=message):
        sampler(one(sources), {"a": 100})


@settings(deadline=None, max_examples=40)
@given(
    known=st.sampled_from([1, 3, 32, 45, 64]),
    new=st.integers(0, 3),
    capped=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_steps_before_a_resume_stay_when_sources_are_added_or_change_places(known, new, capped, order):
    old = {f"s{number}": {"weight": 1 + number % 3} for number in range(known)}
    if capped:
        old["s0"] = {"weight": 9, "max_epochs": 1.5}  # whose share the others get
    supplies = {name: Supply(300 + len(name), 30_000 + number, 40) for number, name in enumerate(old)}
    began = sampler(one(old), supplies)
    added = {f"{'arz'[number]}{number}": {"weight": 1.0} for number in range(new)}
    names = [*old, *added]
    order.shuffle(names)
    both = {name: (old | added)[name] for name in names}
    supplies = {name: supplies.get(name, Supply(77, 9_999_999, 5)) for name in names}
    went_on = sampler([*one(old), (200, {"sources": both})], supplies)
    places = np.array([names.index(name) for name in old])
    for step in (0, 1, 150, 199):
        (source, number), (source_now, number_now) = began.rows_of(step), went_on.rows_of(step)
        assert (places[source] == source_now).all() and (number == number_now).all()
    assert (began.taken(200) == went_on.taken(200)[places]).all()


def test_rows_are_those_of_every_version():
    """Runs are resumed by newer versions, of this and of NumPy: see `test_shuffle.py`."""
    made = sampler(one({"b": {"weight": 1}, "a": {"weight": [[0, 1], [50, 3]]}}), {"b": 90, "a": 70})
    source, number = made.rows_of(40)
    assert (source.tolist(), number.tolist()) == (
        [1, 1, 0, 1, 0, 1, 0, 1],
        [202, 203, 118, 204, 119, 205, 120, 206],
    )
