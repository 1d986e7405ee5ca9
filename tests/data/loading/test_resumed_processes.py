"""A run killed, and resumed by another number of processes, trains on the batches of an undisturbed one."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from processes import finish, start_processes
from recorded_train import RECORDED, recorded_rows
from runs import inode, make_workplace, resumed_from

MIX = """
held_out = 0.2
[tokenizer]
vocabulary = 300
[sources.python_stdlib]
weight = [[0, 0.9], [30, 0.2]]
cap_bytes = 300_000
[sources.prose]
weight = [[10, 0.1], [20, 0.5]]
packages = []
cap_bytes = 100_000
"""


class Runs:
    """Runs of the same configuration, each by so many processes, and the records that they leave."""

    def __init__(self, folder: Path):
        self.folder, self.place = folder, make_workplace(folder)
        (folder / "plain.toml").write_text(MIX)
        (folder / "online.toml").write_text(MIX.replace("weight =", "online = true\nweight ="))

    def start(self, name: str, mix: str, count: int, loaders: int) -> list:
        settings = {"mesh__data": count, "mesh__fsdp": 1, "data__loaders": loaders, "evaluate__rows": 0}
        settings |= {"data__mix": self.folder / mix, "data__packing": "best_fit", "model__layers": 1}
        arguments = self.place.command(name, **settings)[3:]
        self.place._inode_before[name] = inode(self.folder / name / "metrics.jsonl")
        records = str(self.folder / f"records-{name}-{count}")
        return start_processes(RECORDED, records, *arguments, count=count, forks=True)

    def rows(self, name: str, count: int) -> dict[int, dict[str, int]]:
        """Returns {step: {row: checksum}}, of the rows that devices were given before the end."""
        return recorded_rows(self.folder / f"records-{name}-{count}")


def token_workers(folder: Path) -> list[Path]:
    """Returns the token workers that work with the stores in this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue  # it has ended meanwhile
        if "jaxthru.data.loading.worker" in words and any(word.startswith(str(folder)) for word in words):
            found.append(process)
    return found


def in_shared_memory(process: Path) -> list[str]:
    """Returns what a process has mapped of /dev/shm, which would stay there if it were killed."""
    return [line for line in (process / "maps").read_text().splitlines() if "/dev/shm/" in line]


@pytest.mark.slow(minutes=0.5)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_killed_and_resumed_by_other_processes_the_batches_are_the_same(tmp_path):
    """With a schedule of weights, and tokens made while training; the undisturbed run has them stored."""
    runs = Runs(tmp_path)
    finish(runs.start("whole", "plain.toml", 1, loaders=1), timeout=300)
    whole = runs.rows("whole", 1)
    assert list(whole) == list(range(1, 41)) and all(len(rows) == 8 for rows in whole.values())
    last = 0
    for count, loaders, until in ((2, 2, 12), (1, 3, 24)):
        processes = runs.start("killed", "online.toml", count, loaders)
        runs.place.wait_for_step(processes[0], "killed", until)
        makers = token_workers(tmp_path)
        assert len(makers) == loaders  # of all processes, which share this host
        assert not any(map(in_shared_memory, [*makers, *(Path(f"/proc/{p.pid}") for p in processes)]))
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        assert resumed_from(processes[0].communicate(timeout=60)[0]) == last
        for process in processes[1:]:
            process.communicate(timeout=60)
        deadline = time.monotonic() + 20
        while token_workers(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not token_workers(tmp_path)
        found = runs.rows("killed", count)
        assert min(found) == last + 1 and max(found) >= until
        # What the killed run had just been given may be written down by some of its processes alone.
        assert all(found[step].items() <= whole[step].items() for step in found)
        assert all(found[step] == whole[step] for step in range(last + 1, until + 1))
        last = max(runs.place.checkpoints("killed"))
        assert 0 < last < max(found) + 1
    outputs = finish(runs.start("killed", "online.toml", 2, loaders=1), timeout=300)
    assert resumed_from(outputs[0]) == last
    found = {step: rows for step, rows in runs.rows("killed", 2).items() if step > last}
    assert found == {step: whole[step] for step in range(last + 1, 41)}
