"""Under a real Slurm of two nodes a run goes on by itself, and ends as if nothing had happened."""

import concurrent.futures
import sys
import time
from pathlib import Path

import pytest
from runs import ROOT, Workplace, make_workplace
from slurm import Cluster, missing
from test_supervise import SETTINGS, Supervised

from jaxthru.training import goodput
from jaxthru.training.supervisor import steps_done

STEPS = 240
FEW = 100
SLURM_SH = ROOT / "scripts/launch/slurm.sh"


def starts_of(run):
    return goodput.read(run).starts


@pytest.fixture(scope="module")
def fewer(tmp_path_factory):
    """The run of which a node does not come back, from the first test on: most of both is waiting."""
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        yield beside.submit(lose_a_node, tmp_path_factory.mktemp("fewer"))


def lose_a_node(folder: Path) -> Workplace:
    place = make_workplace(folder)
    (folder / "slurm").mkdir()
    with Cluster(folder / "slurm") as cluster:
        job = submitted(cluster, place, folder, FEW, "--nodes=1-2")
        cluster.until(lambda: steps_done(folder / "run") >= 12, 240, job)
        cluster.kill("n1")
        cluster.until(lambda: cluster.job(job)["JobState"] == "COMPLETED", 400, job)
        assert int(cluster.job(job)["Restarts"]) >= 1
    return place


def submitted(cluster: Cluster, place: Workplace, folder: Path, steps: int, *options: str) -> str:
    """Returns the id of a job that trains."""
    words = place.command("run", **SETTINGS, train__steps=steps)[3:]
    variables = place.environment() | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    options = (*options, f"--output={folder / 'job.log'}", f"--chdir={ROOT}")
    return cluster.submit(*options, str(SLURM_SH), *words, **variables)


@pytest.mark.slow(minutes=2)
@pytest.mark.skipif(bool(missing()), reason=f"two nodes of Slurm: {missing()}")
def test_preempted_stopped_and_robbed_of_a_node_it_ends_as_if_it_was_not(fewer, tmp_path):
    """A job of higher priority takes its nodes; it is told to stop, as at its time limit; a node dies."""
    place = make_workplace(tmp_path)
    whole = Supervised(place, "whole", "--processes", "2", train__steps=STEPS)
    while not steps_done(tmp_path / "whole"):  # then what both read is prepared
        assert whole.process.poll() is None, whole.said()
        time.sleep(0.05)
    (tmp_path / "slurm").mkdir()
    with Cluster(tmp_path / "slurm") as cluster:
        path, job = tmp_path / "run", submitted(cluster, place, tmp_path, STEPS, "--nodes=2")

        def goes_on(starts: int, steps: int) -> None:
            """Returns once the job runs for so many times, and has got so many steps further."""
            cluster.until(lambda: cluster.job(job)["Restarts"] == str(starts), 120, job)
            cluster.until(lambda: len(starts_of(path)) > starts, 240, job)
            begun = steps_done(path)
            cluster.until(lambda: steps_done(path) >= begun + steps, 120, job)

        goes_on(0, 4)
        other = cluster.submit(
            "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1", "--output=/dev/null"
        )
        cluster.until(lambda: cluster.job(other)["JobState"] == "COMPLETED", 120)
        goes_on(1, 2)
        cluster.asked("scancel", "--signal=TERM", job)  # as --signal=TERM@300 does
        goes_on(2, 2)
        cluster.kill("n1")
        cluster.until(lambda: cluster.job(job)["Restarts"] == "3", 120)
        cluster.revive("n1")
        cluster.until(lambda: cluster.job(job)["JobState"] == "COMPLETED", 300, job)
        assert cluster.job(job)["ExitCode"] == "0:0" and cluster.job(job)["Restarts"] == "3"
    assert len(starts_of(path)) == 4
    assert whole.finish() == []
    assert place.losses("run") == place.losses("whole")


@pytest.mark.slow(minutes=1)
@pytest.mark.skipif(bool(missing()), reason=f"two nodes of Slurm: {missing()}")
def test_a_node_that_does_not_come_back_is_done_without(fewer):
    """Of --nodes=1-2 the job takes two, and one after the loss; no person is there."""
    place = fewer.result()
    assert [start.processes for start in starts_of(place.folder / "run")] == [2, 1]
    assert len(place.losses("run")) == FEW
