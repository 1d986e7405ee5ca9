"""When to save: by steps, or by time, which several processes agree on without waiting."""

import itertools
import random

import pytest

from jaxthru.runtime.errors import InputError
from jaxthru.training.checkpoint_config import CheckpointConfig, LocalTierConfig, seconds
from jaxthru.training.save_times import SaveTimes


class Board:
    """Announcements of one process to all, kept as the job's store keeps them: the last two."""

    def __init__(self, texts: dict[int, str], speaks: bool):
        self.texts, self.speaks = texts, speaks

    def publish(self, number: int, text: str) -> None:
        self.texts[number] = text
        self.texts.pop(number - 2, None)

    def read(self, number: int) -> str:
        return self.texts[number]  # KeyError: a process would have to wait


def saved(every: str, pace, processes: int, steps: int, seed: int = 0) -> tuple[list[tuple], int]:
    """Returns [(step, second)] of the saves of processes that run up to a step apart, as results of a step
    need all of them, and how many announcements there were. pace: seconds of a step, by step."""
    draw, now, texts = random.Random(seed), [0.0], {}
    read = []

    class Counted(Board):
        def read(self, number):
            read.append(number)
            return super().read(number)

    times = [SaveTimes(every, lambda: now[0], Counted(texts, not index)) for index in range(processes)]
    asked, found = [0] * processes, [[] for _ in range(processes)]
    while min(asked) < steps:
        # Who asks about a step has the result of the one before, for which all have dispatched that.
        able = [k for k in range(processes) if asked[k] < steps and asked[k] <= min(asked) + 1]
        index = draw.choice(able)
        asked[index] += 1
        if index == 0:
            now[0] += pace(asked[0])
        if times[index].due(asked[index]):
            found[index].append((asked[index], now[0]))
    assert all([step for step, _ in each] == [step for step, _ in found[0]] for each in found)
    return found[0], len(set(read))


@pytest.mark.parametrize("pace", [0.02, 1.0, 45.0])
@pytest.mark.parametrize("processes", [2, 5])
def test_several_processes_save_at_the_same_steps_when_the_time_has_come(pace, processes):
    steps = 3000 if pace < 1 else 400
    saves, looks = saved("90s" if pace >= 1 else "9s", lambda step: pace, processes, steps)
    every = 90 if pace >= 1 else 9
    apart = [b[1] - a[1] for a, b in itertools.pairwise(saves)]
    assert len(saves) >= steps * pace / max(every, 3 * pace) - 2
    assert all(abs(each - every) <= 3 * pace + 0.05 * every for each in apart), apart
    assert looks <= len(saves) * 12 + 2 * steps / SaveTimes.APART


def test_steps_that_become_slower_do_not_put_a_save_off_for_long():
    saves, _ = saved("60s", lambda step: 0.1 if step < 300 else 2.0, 3, 900)
    apart = [b[1] - a[1] for a, b in itertools.pairwise(saves)]
    assert max(apart) <= 60 + SaveTimes.APART * 2.0 and apart[-1] <= 65


def test_one_process_goes_by_its_own_clock():
    now = [0.0]
    times, found = SaveTimes("90s", lambda: now[0]), []
    for step in range(1, 30):
        now[0] += 20.0
        found += [step] * times.due(step)
    assert found == [6, 11, 16, 21, 26]  # from the first step on
    assert [step for step in range(1, 10) if SaveTimes(4).due(step)] == [4, 8]
    assert not any(SaveTimes(0).due(step) for step in range(9))


def test_intervals_are_read():
    assert [seconds(each) for each in ("90s", "10m", "1.5h", "2 h", 500)] == [90, 600, 5400, 7200, None]
    assert CheckpointConfig(every="500").every == 500 and CheckpointConfig(every="10m").every == "10m"
    for bad in ("soon", "10 min", "-5m", "1d", "5m ", "0.5", "", "nan s", "٣m", "9" * 30 + "s"):
        with pytest.raises(InputError, match=r"^checkpoint.every = .*must be steps, as 500, or a time"):
            CheckpointConfig(every=bad)
    with pytest.raises(InputError, match=r"^checkpoint.local.every = '0s': must be above 0; 0 for none"):
        LocalTierConfig("disk", every="0s")
    with pytest.raises(InputError, match=r"^checkpoint.local.keep = 1: must be at least 2"):
        LocalTierConfig("disk", keep=1)
    with pytest.raises(InputError, match=r"^checkpoint.local.directory: is empty; for none: "):
        LocalTierConfig("")
