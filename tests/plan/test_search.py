"""The search of `auto` for shapes that nobody has tuned for: what it chooses is what it always chose."""

import dataclasses

import pytest
from runs import ROOT

from jaxthru import config as configuration
from jaxthru.build import least_offload, memory_estimate
from jaxthru.build.confirmed import fastest
from jaxthru.build.memory_estimate import MemoryPlan, Room
from jaxthru.build.proposals import HIDDEN, PCIE, Candidate, candidates
from jaxthru.build.refusal import nothing_fits

GIB = 2**30
ROOM = Room(round(134.2 * GIB), 120 * GIB)
SETTINGS = "remat.policy=auto model.loop=auto offload.level=auto optim.state=split_master_int8"

# Of scripts/bench/suites/drawn_shapes.py; by commit 3f80678, whose search halved the interval and rehearsed
# each leaf alone: policy, level, parts on the host, and bytes on the device and on the host. What says
# which tokens are of documents, a byte a token, came later.
CHOSEN = {
    ("714cf85bbbbb", 0): ("none", "none", 0, 112061026308, 0),
    ("714cf85bbbbb", 2): ("gate", "parameters", 44, 142681313534, 102610599936),
    ("714cf85bbbbb", 4): ("attention", "optimizer", 65, 143672149330, 113944166400),
    ("714cf85bbbbb", 5): ("attention", "optimizer", 39, 143869270266, 109573201920),
    ("970aaefccccc", 0): ("gate", "parameters", 55, 143115631398, 65871872000),
    ("970aaefccccc", 2): ("projections", "optimizer", 59, 144026731302, 66578800640),
    ("970aaefccccc", 4): ("full", "optimizer", 37, 143184458026, 78831427584),
    ("970aaefccccc", 5): ("attention", "optimizer", 50, 143677285706, 101632966656),
}


def drawn(bench, commit: str, number: int):
    fitting, too_large = bench("suites.drawn_shapes").shapes(commit)
    shape = (*fitting, *too_large)[number].settings.split()
    path = ROOT / "configs" / "llama3_8b_8layer.py"
    return configuration.load(path, [*SETTINGS.split(), "optim.clip_rule=previous", *shape])


@pytest.mark.parametrize(
    ("as_compiled", "taken", "compiled"),
    [
        ({"a": 1.0}, "a", "a"),
        ({"a": None, "b": 1.1}, "b", "ab"),
        ({"a": 1.005}, "a", "a"),  # more offload, whose copies are as good as hidden
        ({"a": 1.3, "b": 1.1}, "b", "ab"),  # more offload, whose copies the next does without
        ({"a": 1.15, "b": None, "c": 1.2}, "a", "ab"),
        ({"a": 1.3, "b": 1.25, "c": 1.2}, "c", "abc"),
        ({"a": 1.3, "b": None, "c": None}, "a", "abc"),  # near ones are compiled where nothing else fits
        ({"a": None, "b": None, "c": None, "near": 0.9}, "near", "abcnear"),
        ({"a": None, "b": None, "c": None, "near": None}, None, "abcnear"),
    ],
)
def test_what_takes_more_offload_as_compiled_is_set_against_the_next(as_compiled, taken, compiled):
    config = configuration.load(ROOT / "configs" / "quickstart.py")
    proposed = {
        name: Candidate(config, None, seconds, 0)
        for name, seconds in zip("abc", (1.0, 1.1, 1.2), strict=True)
    } | {"near": Candidate(config, None, 0.9, 0, near=True)}
    tried = []

    def confirm(candidate):
        (name,) = (name for name, each in proposed.items() if each is candidate)
        tried.append(name)
        seconds = as_compiled[name]
        # As long as so many bytes take over PCIe, where products hide HIDDEN of their own time.
        moved = seconds and round((seconds - candidate.matmuls * (1 - HIDDEN)) * PCIE)
        return seconds and (dataclasses.replace(candidate, moved=moved), name)

    found = fastest(proposed.values(), confirm)
    assert (found and found[1], "".join(tried)) == (taken, compiled)
    assert found is None or found[0].seconds == pytest.approx(as_compiled[taken])


@pytest.mark.parametrize(
    ("commit", "number"),
    [pytest.param(*key, marks=[pytest.mark.slow] * (key not in [*CHOSEN][:1])) for key in CHOSEN],
)
def test_the_search_chooses_what_it_chose(bench, commit, number, monkeypatch):
    monkeypatch.setattr(least_offload, "GAPS", 1.0)  # which commit 3f80678 knew nothing of
    monkeypatch.setattr(memory_estimate, "FULL", 1.0)
    config = drawn(bench, commit, number)
    found = next(candidates(config, ROOM, segments=32))
    offload, parts = found.config.offload, config.model.layers + 2
    hosted = round(offload.fraction * parts) if offload.layered else 0
    said = found.config.remat.policy, offload.level, hosted, found.plan.peak_device, found.plan.peak_host
    assert said == CHOSEN[commit, number]


@pytest.mark.parametrize(
    ("number", "taken"),
    [(0, ("none", "none", 0)), (2, ("attention", "optimizer", 40))],
    ids=["fits", "offloads"],
)
def test_gaps_are_proposed_for(bench, number, taken):
    """By bytes alone the second would be `gate` at level `parameters`, which copies hardly take longer."""
    config = drawn(bench, "714cf85bbbbb", number)
    found = next(candidates(config, ROOM, segments=32))
    offload, parts = found.config.offload, config.model.layers + 2
    hosted = round(offload.fraction * parts) if offload.layered else 0
    assert (found.config.remat.policy, offload.level, hosted) == taken
    assert ROOM.full.holds(found.plan)


class Gaps:
    """A step of 10 stages of 10 GiB, of which those on the host take none of the device; by bytes, and with
    the gaps that `gaps` says of so many on the host, in GiB. asked: of each rehearsal, how many are there."""

    def __init__(self, gaps, host: int = 0):
        self.gaps, self.host, self.asked = gaps, host, []

    def __call__(self, offload, memory: int = 0):
        hosted = round(offload.fraction * 10)
        self.asked += [hosted] * bool(memory)
        peak = 100 - 10 * hosted + (self.gaps(hosted) if memory else 0)
        return MemoryPlan({}, {}, peak * GIB, self.host * hosted * GIB, ()), hosted


@pytest.mark.parametrize(
    ("gaps", "host", "found", "asked"),
    [
        (lambda hosted: 0, 0, 5, [5]),
        (lambda hosted: 4, 0, 5, [5]),
        (lambda hosted: 6, 0, 6, [5, 10, 6]),
        (lambda hosted: 27, 0, 8, [5, 10, 8, 7]),
        (lambda hosted: 16 if hosted < 7 else 0, 0, 7, [5, 10, 6, 7]),
        (lambda hosted: 60 if hosted < 6 else 4, 0, 6, [5, 10, 8, 7, 6]),  # one large array, behind the end
        (lambda hosted: 60, 0, None, [5, 10]),  # not even with all of them
        (lambda hosted: 16, 1, None, [5, 10, 7, 6]),  # the host holds six
    ],
)
def test_gaps_put_more_on_the_host(gaps, host, found, asked):
    config = configuration.load(ROOT / "configs" / "quickstart.py", ["model.layers=8"])
    planned = Gaps(gaps, host)
    proposal = least_offload.least(config, "optimizer", Room(54 * GIB, 6 * GIB), planned)
    assert (proposal and round(10 * proposal.fraction), planned.asked) == (found, asked)


def test_a_level_that_moves_more_is_not_looked_at_closely():
    config = configuration.load(ROOT / "configs" / "quickstart.py", ["model.layers=8"])
    planned = Gaps(lambda hosted: 6)
    found = least_offload.cheapest(config, least_offload.LEVELS[1:], Room(54 * GIB, GIB), planned)
    assert (found.level, found.moved) == ("optimizer", 6)
    assert planned.asked == [5, 10, 6, 5, 5], "with 6 on the host they move no less"


def test_what_is_far_too_large_is_refused_without_a_search(bench, monkeypatch):
    config = drawn(bench, "970aaefccccc", 7)
    monkeypatch.setattr(least_offload, "least", lambda *_: pytest.fail("rehearsed a level that has no room"))
    assert next(candidates(config, ROOM, segments=32), None) is None
    said = nothing_fits(config, ROOM, 1, 32)
    assert "no narrower optim.state fits" in said and "\n" not in said
