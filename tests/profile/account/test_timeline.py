"""Every instant has one owner, whatever runs beside what."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from jaxthru.profile.account import timeline
from jaxthru.profile.account.ledger import LINES
from jaxthru.profile.account.timeline import RANK, Idle, Interval

KERNELS = LINES[: LINES.index("data_wait")]
spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20), st.sampled_from(KERNELS)).map(
        lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2])
    ),
    max_size=25,
).map(sorted)


@given(spans, st.integers(0, 30), st.integers(1, 50))
def test_each_instant_goes_to_the_first_line_that_runs(spans, start, length):
    end = start + length
    intervals, idle = timeline.assign_owners(spans, start, end)
    owner = dict.fromkeys(range(start, end))
    for piece in intervals:
        for at in range(piece.start, piece.end):
            assert owner[at] is None
            owner[at] = piece.line
            assert spans[piece.owner][0] <= at < spans[piece.owner][1]
    for at in range(start, end):
        running = [line for begun, over, line in spans if begun <= at < over]
        assert owner[at] == min(running, key=RANK.get, default=None)
    assert sum(gap.end - gap.start for gap in idle) == sum(line is None for line in owner.values())


@given(spans, st.lists(st.integers(0, 80), min_size=0, max_size=8, unique=True), st.integers(0, 80))
def test_lines_add_up_to_the_window(spans, edges, called):
    waits = list(zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False))
    intervals, idle = timeline.assign_owners(spans, 0, 80)
    whole = [*intervals, *timeline.split_idle(idle, waits, [called] * len(spans))]
    assert sum(timeline.totals(whole).values()) == 80
    assert len({at for piece in whole for at in range(piece.start, piece.end)}) == 80


def test_idle_time_has_a_cause():
    waits = [(5, 8), (21, 23), (30, 40)]
    gaps = [Idle(4, 10, 0), Idle(20, 24, 1), Idle(28, 50, 2), Idle(60, 61, None)]
    found = timeline.split_idle(gaps, waits, [9, 19, 45])
    assert found == [
        Interval(4, 5, "host_gap", None),
        Interval(5, 8, "data_wait", None),
        Interval(8, 10, "host_gap", None),
        Interval(20, 24, "dependency", None),  # the host had called before: it waits for a later batch
        Interval(28, 30, "host_gap", None),
        Interval(30, 40, "data_wait", None),
        Interval(40, 50, "host_gap", None),
        Interval(60, 61, "dependency", None),
    ]


def test_a_strip_is_short_and_whole():
    pieces = [Interval(at * 10, at * 10 + 10, LINES[at % 2], 0) for at in range(50)]
    pieces[0] = Interval(0, 1, LINES[0], 0)
    pieces[1] = Interval(1, 20, LINES[1], 0)
    strip = timeline.strip(pieces, 0, 7)
    assert len(strip) <= 7 and strip[0][0] == 0 and strip[-1][1] == 500e-9
    assert all(left[1] == right[0] for left, right in itertools.pairwise(strip))
