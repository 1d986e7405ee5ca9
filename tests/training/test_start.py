"""The parts of a start."""

import time

from jaxthru.training import start


def test_python_started_for_the_first_start_of_a_process_alone(monkeypatch):
    """Of a script that trains twice, the second run's account does not hold the first run."""
    monkeypatch.setattr(start, "process_seconds", lambda: 40.0)
    monkeypatch.setattr(start.StartTimes, "_first", True)
    before = time.monotonic()
    first, second = start.StartTimes(), start.StartTimes()
    assert first.parts == {"python": 40.0} and first.began < before - 39
    assert second.parts == {} and second.began >= before
