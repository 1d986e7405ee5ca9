"""A disk that is full, at each moment that a run writes: one line, soon, and nothing is lost.

On small file systems in memory, which only an administrator can make; elsewhere these tests are skipped, and
those of each writer (test_checkpoint, test_metrics, test_run_directory, test_store) remain.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import SETTINGS, Workplace, make_workplace, resumed_from

pytestmark = pytest.mark.slow(minutes=0.15)
SOON = 10.0  # seconds from the full disk to the end of the process
START = 20.0  # seconds that a start may take on busy cores
ENDLESS = {"train__steps": 100_000, "checkpoint__last": "false"}
NO_ROOM = "No space left on device"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    settings = SETTINGS | {"evaluate.rows": 0}
    place = make_workplace(tmp_path_factory.mktemp("runs"), settings=settings, forks=True)
    place.run("whole", train__steps=12)  # prepares, and compiles
    return place


@pytest.fixture
def disk(place) -> Iterator[Callable[[str], Path]]:
    """Mounts a disk of so many bytes on an empty folder of the workplace."""
    folder = place.folder / "disk"
    folder.mkdir(exist_ok=True)

    def mount(size: str) -> Path:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True
        )
        if made.returncode:
            pytest.skip(f"cannot mount a small file system here: {made.stderr.strip()}")
        return folder

    yield mount
    subprocess.run(["umount", "-l", folder], capture_output=True)


def fill(disk: Path, left: int = 0) -> None:
    """Leaves so many bytes of a disk."""
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while (free := os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize) > left:
            file.write(bytes(min(1 << 16, free - left)))


def ended(
    place: Workplace, disk: Path, code: int | set[int], full_at: int = 0, run: str = "disk/run", **settings
) -> str:
    """Starts a run and fills the disk at a step; returns the one line with which it ends, soon."""
    started = time.time()
    process = place.start(run, **settings)
    if full_at:
        place.wait_for_step(process, run, full_at)
        fill(disk)
    full = time.time() if full_at else None
    output = process.communicate(timeout=120)[0]
    ended_at, rows = time.time(), place.folder / run / "metrics.jsonl"
    if full is None:  # since its last row, or since it could have begun
        last = rows.stat().st_mtime if rows.exists() else 0.0
        full = last if last > started else started + START
    took = ended_at - full
    codes = code if isinstance(code, set) else {code}
    assert process.returncode in codes and took < SOON, f"{process.returncode} after {took} s: {output}"
    (line,) = (line for line in output.splitlines() if line.startswith("jaxthru: "))
    assert output.splitlines()[-1] == line and NO_ROOM in line
    noise = ("Traceback", "Exception", "ERROR", "Error", "WARNING", "Warning")
    assert not [word for word in noise if word in output], output
    print(f"exit {process.returncode}, {took:.1f} s, checkpoints {place.checkpoints(run)}: {line}")
    return line


def goes_on(place: Workplace, disk: Path, **settings) -> int:
    """Starts the run again with room for it; returns the step that it resumed from."""
    (disk / "filler").unlink(missing_ok=True)
    subprocess.run(["mount", "-o", "remount,size=40m", disk], check=True)
    output = place.run("disk/run", train__steps=12, **settings)
    assert len(place.losses("disk/run")) == 12
    return resumed_from(output)


@pytest.mark.parametrize(("left", "code"), [(0, 2), (12288, 2), (49152, 1)])
def test_at_the_start(place, disk, left, code):
    """Nothing was trained, so that it is the place that was badly chosen: 2; but for the very last files."""
    fill(disk("400k"), left)
    ended(place, place.folder / "disk", code, train__steps=12)
    assert goes_on(place, place.folder / "disk") == 0
    assert place.losses("disk/run") == place.losses("whole")


def test_in_the_preparation(place, disk):
    small = disk("400k")
    line = ended(place, small, 2, train__steps=12, data__store=small / "store")
    assert str(small / "store") in line
    assert goes_on(place, small, data__store=small / "store") == 0
    assert place.losses("disk/run") == place.losses("whole")


def test_at_a_row_of_metrics(place, disk):
    """Beside which TensorBoard's rows find no room either."""
    small = disk("400k")
    settings = ENDLESS | {"checkpoint__every": 0, "metrics__tensorboard": "true"}
    assert "metrics.jsonl" in ended(place, small, 1, full_at=5, **settings)
    assert goes_on(place, small) == 0


def test_at_a_row_of_tensorboard(place, disk):
    """It has a disk of its own here, as a link may give it; the run goes on without it."""
    small, run = disk("400k"), place.folder / "linked"
    run.mkdir()
    (run / "tensorboard").symlink_to(small)
    process = place.start("linked", metrics__tensorboard="true", train__steps=120, checkpoint__every=40)
    place.wait_for_step(process, "linked", 20)
    fill(small)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and "Traceback" not in output, output
    assert output.count(NO_ROOM) == output.count("tensorboard: cannot be written") == 1
    assert len(place.losses("linked")) == 120 and place.checkpoints("linked") == [80, 120]
    shutil.rmtree(run)


def test_at_the_first_checkpoint(place, disk):
    small = disk("300k")
    line = ended(place, small, 1, **ENDLESS, checkpoint__every=5, metrics__tensorboard="true")
    assert line.endswith(f"checkpoint 5 was not saved: {NO_ROOM}") and not place.checkpoints("disk/run")
    assert goes_on(place, small) == 0


@pytest.mark.parametrize("size", ["2000k", "2500k"])  # it is full at another file each time
def test_at_a_later_checkpoint(place, disk, size):
    small = disk(size)
    settings = ENDLESS | {"checkpoint__every": 2, "metrics__tensorboard": "true"}
    line = ended(place, small, 1, **settings, checkpoint__keep=50)
    newest = place.checkpoints("disk/run")[-1]
    assert newest >= 4 and line.endswith(f"checkpoint {newest + 2} was not saved: {NO_ROOM}")
    # Again, with the disk still full: what is left may not do for the files that a start writes.
    ended(place, small, {1, 2}, **settings, checkpoint__keep=50)
    newest = place.checkpoints("disk/run")[-1]
    assert goes_on(place, small, checkpoint__keep=2) == newest
