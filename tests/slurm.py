"""A Slurm of two nodes on this machine, real but for its hardware: `from slurm import Cluster, missing`.

It needs Debian's slurmctld, slurmd, slurm-client and slurm-wlm-basic-plugins, and to be root: the nodes live
in namespaces of their own, in which their names can be looked up, and end with them.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

NODES = ("n0", "n1")
# JAX's coordinator listens at a port by the job's id: clusters of one machine start with ids of their own.
CONFIGURATION = """
ClusterName=tests
FirstJobId={controller}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port={first}-{last} CPUs=2 RealMemory=1000
PartitionName=low Nodes=n[0-1] Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=high Nodes=n[0-1] PriorityTier=9 PreemptMode=OFF MaxTime=INFINITE State=UP
"""
START = """
mount --bind {folder}/hosts /etc/hosts
slurmctld -D & {nodes}
wait
"""


def missing() -> str:
    """Returns what keeps a cluster from running here; nothing if it can."""
    programs = [name for name in ("slurmctld", "slurmd", "sbatch", "unshare") if not shutil.which(name)]
    if programs or os.geteuid() != 0:
        return f"needs {', '.join(programs) or 'to be root'}"
    allowed = subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    return "" if allowed else "namespaces are not allowed here"


UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


SETTLES = 5.0
"""Seconds after which a job that is queued again may start: a node refuses one that it has just killed."""


class Cluster:
    """A context manager. folder: a new one, for its files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._revived: list[subprocess.Popen] = []
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
        port = 20_000 + port % 9_000  # below those that are given to whoever asks for any
        settings = {"host": socket.gethostname(), "folder": folder}
        settings |= {"controller": port, "first": port + 1, "last": port + 2}
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**settings))
        hosts = Path("/etc/hosts").read_text()
        (folder / "hosts").write_text(f"{hosts}\n127.0.0.1 {' '.join(NODES)}\n")
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "Cluster":
        nodes = " ".join(f"slurmd -D -N {node} &" for node in NODES)
        script = START.format(folder=self.folder, nodes=nodes)
        with (self.folder / "started.log").open("w") as log:
            self._all = subprocess.Popen(
                [*UNSHARE, "bash", "-c", script],
                env=self.environment,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        self.until(lambda: self.asked("sinfo", "-h", "-o", "%t %D") == "idle 2", 60)
        return self

    def __exit__(self, *_) -> None:
        self._all.kill()  # and with it all that runs in its namespaces
        for process in (self._all, *self._revived):
            process.wait()

    def asked(self, *command: str, check: bool = True, **environment: str) -> str:
        """Returns what a command of Slurm's says."""
        done = subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, *words: str, **environment: str) -> str:
        """Returns the id of a new job."""
        return self.asked("sbatch", "--parsable", *words, **environment)

    def job(self, job: str) -> dict[str, str]:
        """Returns what Slurm says of a job."""
        words = self.asked("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def hurry(self, job: str) -> None:
        """Takes away the two minutes that a job waits for when it is queued again."""
        self.asked("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)

    def kill(self, node: str) -> None:
        """Ends a node as a power cut would: its daemon, and all that this has started there."""
        daemons, tasks = [], []
        for process in Path("/proc").glob("[0-9]*"):
            words = (read(process / "cmdline") or b"").split(b"\0")
            if words[:4] == [b"slurmd", b"-D", b"-N", node.encode()] and self._ours(process):
                daemons.append(process)
            elif f"SLURMD_NODENAME={node}".encode() in (read(process / "environ") or b"").split(b"\0"):
                tasks += [process] * self._ours(process)
        assert daemons and tasks
        parents = {parent(task) for task in tasks}
        steps = [each for each in parents if b"slurmstepd" in (read(Path(f"/proc/{each}/cmdline")) or b"")]
        for process in (*(int(each.name) for each in daemons), *steps, *(int(each.name) for each in tasks)):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def revive(self, node: str) -> None:
        """Has a node's daemon run again."""
        inner = Path(f"/proc/{self._all.pid}/task/{self._all.pid}/children").read_text().split()[0]
        command = ["nsenter", "--target", inner, "--mount", "--pid", "slurmd", "-D", "-N", node]
        with (self.folder / "started.log").open("a") as log:
            how = {"env": self.environment, "stdout": log, "stderr": log, "cwd": self.folder}
            self._revived.append(subprocess.Popen(command, **how))

    def _ours(self, process: Path) -> bool:
        return f"SLURM_CONF={self.folder}/slurm.conf".encode() in (read(process / "environ") or b"").split(
            b"\0"
        )

    def until(self, done, seconds: float, job: str = "") -> None:
        """Waits until `done()`; hurries a job meanwhile."""
        deadline, pending = time.monotonic() + seconds, 0.0
        while not done():
            now = time.monotonic()
            assert now < deadline, self.said(job)
            if job and self.job(job)["JobState"] == "PENDING":
                pending = pending or now
                if now - pending > SETTLES:
                    self.hurry(job)
            else:
                pending = 0.0
            time.sleep(0.2)

    def said(self, job: str = "") -> str:
        """Returns the ends of the logs, and what Slurm knows of a job."""
        logs = [path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.log")]
        return "\n".join([*logs, str(self.job(job)) if job else ""])


def read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return None


def parent(process: Path) -> int:
    stat = read(process / "stat") or b"0 (x) S 0"
    return int(stat.rpartition(b")")[2].split()[1])
