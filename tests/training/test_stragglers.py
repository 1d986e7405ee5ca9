"""The log names the process that all others wait for, and no other."""

from jaxthru.profile.account.build import slowest
from jaxthru.training.stragglers import QUIET, Stragglers


class Hosts:
    def host(self, process: int) -> str:
        return f"host-{process}"


def row(slowest: float, median: float = 0.01, process: int | None = 3) -> dict:
    fields = {
        "slowest_process": process,
        "slowest_process_seconds": slowest,
        "median_process_seconds": median,
    }
    return {"step": 1, "step_seconds": 1.0, **fields}


def test_a_straggler_is_named_once_a_minute(caplog):
    clock = [100.0]
    stragglers = Stragglers(Hosts(), lambda: clock[0])
    for each in (row(0.2), row(0.9, 0.8), {"step": 1, "step_seconds": 1.0}, row(None, None, None)):
        stragglers.step(each)
    assert not caplog.records
    for seconds in (0.0, 1.0, QUIET):
        clock[0] += seconds
        stragglers.step(row(0.7))
    assert [record.getMessage()[:76] for record in caplog.records] == [
        "straggler: the others wait for process 3 (host-3): its host takes 0.70 s for"
    ] * 2
    stragglers.evaluation({})


def test_the_ledger_has_the_one_that_was_the_slowest_in_most_steps():
    rows = [row(0.5), row(0.7), row(9.0, process=1), row(None, process=None), {"step": 1}]
    assert slowest(rows) == {"slowest_process": 3, "slowest_process_seconds": 0.6}
    assert slowest(rows[-2:]) == {}
