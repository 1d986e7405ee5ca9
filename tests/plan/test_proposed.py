"""What `plan memory` says of the formats and levels that fit."""

from jaxthru.build.least_offload import Proposal
from jaxthru.build.memory_estimate import MemoryPlan
from jaxthru.plan import memory
from jaxthru.profile.read.buffers import CATEGORIES

PLAN = MemoryPlan(dict.fromkeys(CATEGORIES, 0) | {"loss": 1 << 30}, dict.fromkeys(CATEGORIES, 0), 1 << 30, 0)


def test_where_no_format_needs_offload_a_line_takes_the_place_of_a_table():
    proposals = [Proposal("none", state, 0.0, PLAN, 0) for state in ("float32", "int8")]
    table, lines = memory.proposed(proposals)
    assert table is None
    assert lines == [
        "Without offload (offload.level = none) these formats of optim.state fit: float32, int8."
    ]
    proposals.append(Proposal("optimizer", "split_master", 0.5, PLAN, 10**9))
    table, lines = memory.proposed(proposals)
    assert table.row_count == 3 and not lines
    assert memory.proposed([]) == (None, ["Nothing fits, at any level and in any format."])


def test_what_is_empty_has_no_row():
    table = memory.table(PLAN)
    assert [*table.columns[0].cells] == ["loss", "peak"]
