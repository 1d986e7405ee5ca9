"""What is said of a step that took much longer than those before it."""

import logging

import pytest

from jaxthru.training.stalls import FEWEST, QUIET, Stalls

GIB = 2**30
HALF_FULL = {"bytes_limit": 100 * GIB, "peak_bytes_in_use": 50 * GIB, "bytes_in_use": 20 * GIB}
FULL = {"bytes_limit": 100 * GIB, "peak_bytes_in_use": 95 * GIB, "bytes_in_use": 40 * GIB}
WAITS = ("data_wait_seconds", "checkpoint_seconds", "host_gap_seconds")


def row(step: int, seconds: float = 0.5, **waits: float | None) -> dict:
    return {"step": step, "step_seconds": seconds} | dict.fromkeys(WAITS, 0.01) | waits


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def said(rows: list[dict], caplog, memory=lambda: None, steady: int = FEWEST, between: float = 0.0) -> list:
    """Returns the lines that rows bring after so many steady ones. between: seconds between two rows."""
    clock = Clock()
    stalls = Stalls(memory, clock)
    with caplog.at_level(logging.WARNING, "jaxthru"):
        for each in [row(step) for step in range(1, steady + 1)] + rows:
            stalls.step(each)
            clock.now += between
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("waits", "words"),
    [
        ({"data_wait_seconds": 0.9}, ("0.89 s of it waiting for data (data.loaders)",)),
        ({"checkpoint_seconds": 0.8}, ("saving a checkpoint", "checkpoint.every")),
        ({"host_gap_seconds": 0.6}, ("the device had no work",)),
        ({"data_wait_seconds": 0.3, "host_gap_seconds": None}, ("on the device", "memory is unknown")),
    ],
)
def test_the_cause_is_what_took_most_of_the_excess(waits, words, caplog):
    (line,) = said([row(9, 1.5, **waits)], caplog)
    assert line.startswith("stalled: step 9 took 1.50 s, the median is 0.50 s: ")
    assert all(word in line for word in words)


@pytest.mark.parametrize(
    ("memory", "words", "absent"),
    [
        (HALF_FULL, ("50% full", "its clock"), "in one piece"),
        (FULL, ("95% full", "no room in one piece: offload.level"), "GiB in one piece"),
        (FULL | {"largest_free_block_bytes": 10 * GIB}, ("10.0 GiB in one piece of the 60.0",), "clock"),
        (FULL | {"largest_free_block_bytes": 55 * GIB}, ("95% full",), "GiB in one piece"),
    ],
)
def test_of_a_stall_on_the_device_the_memory_is_told(memory, words, absent, caplog):
    (line,) = said([row(9, 1.0)], caplog, lambda: memory)
    assert all(word in line for word in words) and absent not in line


def test_only_steps_far_beyond_the_median_are_stalled(caplog):
    assert not said([row(9, 0.74), row(10, 0.7)], caplog)
    tiny = [row(step, 0.01) for step in range(20, 90)]
    assert not said([*tiny, row(90, 0.15)], caplog)  # fifteen times the median, and 0.14 s


def test_nothing_is_said_before_there_is_a_median(caplog):
    assert not said([row(9, 5.0)], caplog, steady=FEWEST - 1)


def test_what_stalls_again_and_again_is_counted_and_told_once_a_minute(caplog):
    stalling = [row(step, 2.0 if step % 3 == 0 else 0.5) for step in range(9, 40)]
    lines = said(stalling, caplog, between=QUIET / 10)
    assert [line.split()[2] for line in lines] == ["9", "21", "33"]
    assert "more since" not in lines[0] and all("(3 more since" in line for line in lines[1:])
