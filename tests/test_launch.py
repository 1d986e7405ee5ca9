"""The launchers start the one command, leave NVLink multicast alone, and say what schedulers accept."""

import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "scripts/launch"
LAUNCHERS = sorted(LAUNCH.iterdir())
NO_MULTICAST = ("NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
VALUES = {"IMAGE": "registry.example/jaxthru:1", "NODES": "2", "GPUS": "8"}
VALUES |= {"CONFIG": "configs/quickstart.py", "RUN": "/shared/run"}
TRAIN = ["python", "-m", "jaxthru.train", "--config", VALUES["CONFIG"], "--run-dir", VALUES["RUN"]]
KUBERNETES = ("1.31", "1.37")
RECORDER = """#!{python} -S
import json, os, sys
seen = {{name: os.environ[name] for name in os.environ if name.startswith(("JAX_", "NCCL_", "SLURM_"))}}
with open({file!r}, "a") as file:
    print(json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], seen]), file=file)
{more}
"""


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.name)
def test_launcher(path):
    text = path.read_text()
    assert "jaxthru.train" in text
    if "tpu" not in path.name:
        assert all(name in text for name in NO_MULTICAST)
    if path.suffix == ".sh":
        subprocess.run(["bash", "-n", str(path)], check=True)
        assert os.access(path, os.X_OK)


def manifests(name: str) -> list[dict]:
    """Returns the objects of a manifest, with the values that `envsubst` would put in."""
    text = re.sub(r"\$\{(\w+)\}", lambda found: VALUES[found[1]], (LAUNCH / name).read_text())
    assert "${" not in text
    return list(yaml.safe_load_all(text))


@pytest.fixture(params=KUBERNETES)
def accepted(request):
    """Checks an object against Kubernetes' own schema, in which no unknown field may stand."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    return lambda manifest: kubernetes_validate.validate(manifest, request.param, strict=True)


def job_of_jobset() -> tuple[dict, dict]:
    """Returns the JobSet, and the Job that it makes: its own kind has no schema among Kubernetes'."""
    (jobset,) = manifests("jobset.yaml")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    name = f"{jobset['metadata']['name']}-{replicated['name']}-0"
    return jobset, {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}} | replicated[
        "template"
    ]


def test_kubernetes_accepts_the_job(accepted):
    service, job = manifests("kubernetes.yaml")
    accepted(service)
    accepted(job)
    job["spec"]["completions"] = "two"
    with pytest.raises(Exception, match="two"):
        accepted(job)


def test_kubernetes_accepts_the_job_of_a_jobset(accepted):
    _, job = job_of_jobset()
    accepted(job)
    job["spec"]["podFailurePolicy"]["rule"] = []
    with pytest.raises(Exception, match="rule"):
        accepted(job)


def decided(rules: list[dict], code: int | None) -> tuple[int | None, str]:
    """Returns (index, action) of the first rule that fits an exit code; None is a disruption."""
    for index, rule in enumerate(rules):
        if "onPodConditions" in rule:
            (condition,) = rule["onPodConditions"]
            assert condition == {"type": "DisruptionTarget", "status": "True"}
            met = code is None
        else:
            codes = rule["onExitCodes"]
            assert codes["operator"] == "In" and codes["containerName"] == "train"
            met = code in codes["values"]
        if met:
            return index, rule["action"]
    return None, "Count"


@pytest.mark.parametrize(
    ("code", "action"),
    [
        (1, "FailJob"),
        (2, "FailJob"),
        (None, "Ignore"),
        (143, "Ignore"),
        (160, "Ignore"),
        (70, "Count"),
        (137, "Count"),
    ],
)
def test_what_a_job_does_on_each_ending(code, action):
    _, job = manifests("kubernetes.yaml")
    assert decided(job["spec"]["podFailurePolicy"]["rules"], code)[1] == action
    assert job["spec"]["backoffLimit"] > 0 and job["spec"]["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    ("code", "action"),
    [
        (1, "FailJobSet"),
        (2, "FailJobSet"),
        (None, "RestartJobSetAndIgnoreMaxRestarts"),
        (143, "RestartJobSetAndIgnoreMaxRestarts"),
        *((code, "RestartJobSet") for code in (70, 137, 160)),
    ],
)
def test_what_a_jobset_does_on_each_ending(code, action):
    jobset, job = job_of_jobset()
    policy, spec = jobset["spec"]["failurePolicy"], job["spec"]
    assert policy["maxRestarts"] >= 1 and spec["backoffLimit"] == 0
    index, of_job = decided(spec["podFailurePolicy"]["rules"], code)
    # What the controller of jobs writes of its failure: the reason, and a message.
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    if index is not None:
        assert of_job == "FailJob"
        reason = "PodFailurePolicy"
        message = f"Container train for pod default/jaxthru-workers-0-1 failed with exit code {code} "
        message += f"matching FailJob rule at index {index}"
    chosen = "RestartJobSet"  # where no rule fits
    for rule in policy["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(each, message) for each in patterns):
            chosen = rule["action"]
            break
    assert chosen == action


def test_pods_find_each_other():
    jobset, job_of_set = job_of_jobset()
    service, job = manifests("kubernetes.yaml")
    first = {"job": f"{job['metadata']['name']}-0.{service['metadata']['name']}"}
    first["jobset"] = f"{job_of_set['metadata']['name']}-0.{jobset['metadata']['name']}"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    for name, one in (("job", job), ("jobset", job_of_set)):
        spec = one["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        env = {each["name"]: each.get("value") for each in container["env"]}
        assert container["command"] == TRAIN
        assert env["JAX_COORDINATOR_ADDRESS"] == f"{first[name]}:8476"
        assert env["JAX_NUM_PROCESSES"] == str(spec["completions"]) == str(spec["parallelism"])
        assert spec["completionMode"] == "Indexed" and spec["podReplacementPolicy"] == "Failed"
        assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= 300


class Fakes:
    """Programs on the PATH that write down how they are called."""

    def __init__(self, folder: Path):
        self.folder, self.record = folder, folder / "calls.jsonl"

    def add(self, name: str, more: str = "") -> None:
        path = self.folder / name
        path.write_text(RECORDER.format(python=sys.executable, file=str(self.record), more=more))
        path.chmod(0o755)

    def run(self, command: list[str], code: int = 0, **environment) -> list[list]:
        """Returns (name, arguments, environment) of each call, once the command has ended with this code."""
        self.record.unlink(missing_ok=True)
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            command, env=os.environ | {"PATH": path} | environment, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        self.said = done.stderr
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in self.record.read_text().splitlines()]
        return []


@pytest.fixture
def fakes(tmp_path):
    return Fakes(tmp_path)


@pytest.mark.parametrize("of", [["--tpu-type", "v5litepod-256", "--num-slices", "2"], ["--num-nodes", "4"]])
def test_xpk(fakes, of):
    fakes.add("xpk")
    train = ["--config", "configs/F.py", "--run-dir", "/shared/my run", "--set", "train.steps=7"]
    ((_, words, _),) = fakes.run([str(LAUNCH / "xpk.sh"), "--cluster", "c", *of, "--", *train])
    assert words[:2] == ["workload", "create"] and words[-2] == "--command" and "--dry-run" not in words
    given = dict(itertools.pairwise(words))
    assert (given["--restart-on-exit-codes"], int(given["--max-restarts"]) > 0) == ("70", True)
    assert int(given["--termination-grace-period-seconds"]) >= 300 and given[of[0]] == of[1]
    assert sum(word == "--env" for word in words) == len(NO_MULTICAST)
    command = words[-1]
    assert '"' not in command and "\\" not in command
    # As XPK's shell in a pod would run it, on a TPU host and on a GPU node.
    fakes.add("python")
    ((name, said, seen),) = fakes.run(["bash", "-c", f"({command}) & wait $!"])
    assert (name, said) == ("python", ["-m", "jaxthru.train", *train]) and "JAX_PROCESS_ID" not in seen
    variables = {
        "NNODES": "4",
        "NODE_RANK": "3",
        "JAX_COORDINATOR_ADDRESS": "w-0-0.w",
        "JAX_COORDINATOR_PORT": "6002",
    }
    ((_, said, seen),) = fakes.run(["bash", "-c", f"({command}) & wait $!"], **variables)
    assert said == ["-m", "jaxthru.train", *train]
    assert [seen[f"JAX_{what}"] for what in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")] == [
        "w-0-0.w:6002",
        "4",
        "3",
    ]


def test_xpk_dry_run_and_missing_arguments(fakes):
    fakes.add("xpk")
    ((_, words, _),) = fakes.run(
        [str(LAUNCH / "xpk.sh"), "--cluster", "c", "--", "--config", "f"], DRY_RUN="out.yaml"
    )
    assert words[words.index("--dry-run") :][:3] == ["--dry-run", "--output-manifest-file", "out.yaml"]
    for less in ([], ["--cluster", "c"], ["--cluster", "c", "--"], ["--", "--config", "f"]):
        assert fakes.run([str(LAUNCH / "xpk.sh"), *less], code=2) == []
        assert fakes.said.startswith("xpk.sh: give XPK's options") and fakes.said.count("\n") == 1


def test_skypilot(fakes):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    known = {"name", "num_nodes", "workdir", "resources", "envs", "volumes", "setup", "run"}
    assert set(task) == known
    recovery = task["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [70, 143, 160] and recovery["max_restarts_on_errors"] == 3
    fakes.add("python")
    variables = {
        "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.7",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
    }
    variables |= task["envs"] | {"PYTHON": "python"}
    ((_, said, seen),) = fakes.run(["bash", "-c", task["run"]], **variables)
    assert said == [
        "-m",
        "jaxthru.train",
        "--config",
        task["envs"]["CONFIG"],
        "--run-dir",
        task["envs"]["RUN"],
    ]
    assert (seen["JAX_COORDINATOR_ADDRESS"], seen["JAX_NUM_PROCESSES"], seen["JAX_PROCESS_ID"]) == (
        "10.0.0.4:8476",
        "2",
        "1",
    )
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)


@pytest.mark.parametrize("form", ["{}", "{}:0:10.128.0.{}"])
def test_tpu_pod(fakes, form):
    endpoints = ",".join(form.format(f"t1k-{n}", n) for n in range(4))
    answers = {"worker-network-endpoints": endpoints, "agent-worker-number": "2"}
    fakes.add("curl", f"sys.stdout.write({answers!r}[sys.argv[-1].rpartition('/')[2]])")
    fakes.add("python")
    calls = fakes.run([str(LAUNCH / "tpu_pod.sh"), "--config", "f", "--run-dir", "r"], PYTHON="python")
    (name, said, seen), asked = calls[-1], calls[:-1]
    train = ["python", "-m", "jaxthru.train", "--config", "f", "--run-dir", "r"]
    assert (name, said) == ("python", ["-m", "jaxthru.supervise", "--pause", "60", "--", *train])
    assert float(said[3]) > 30  # that all processes take to end
    assert all("Metadata-Flavor: Google" in words for _, words, _ in asked) and len(asked) == 2
    first = "10.128.0.0" if ":" in form else "t1k-0"
    assert (seen["JAX_COORDINATOR_ADDRESS"], seen["JAX_NUM_PROCESSES"], seen["JAX_PROCESS_ID"]) == (
        f"{first}:8476",
        "4",
        "2",
    )


@pytest.mark.parametrize(
    ("code", "requeued"), [(0, False), (143, True), (160, True), (137, True), (2, False)]
)
def test_slurm_requeues_what_a_restart_can_mend(fakes, tmp_path, code, requeued):
    fakes.add("srun", f"sys.exit({code})")
    fakes.add("scontrol")
    words = ["--config", "f", "--run-dir", str(tmp_path / "run")]
    variables = {
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_ID": "71",
        "PYTHON": sys.executable,
    }
    calls = fakes.run([str(LAUNCH / "slurm.sh"), *words], code=0 if requeued else code, **variables)
    name, said, seen = calls[0]
    assert name == "srun" and said[-7:] == [sys.executable, "-m", "jaxthru.train", *words]
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpu-bind=none"} <= set(said)
    assert seen["JAX_LOCAL_DEVICE_IDS"] == "0,1,2,3" and seen["NCCL_NVLS_ENABLE"] == "0"
    assert calls[1:] == ([["scontrol", ["requeue", "71"], calls[1][2]]] if requeued else [])
    assert fakes.said.count("supervise:") == (code != 0)


def test_slurm_gives_up_a_step_that_fails_three_times(fakes, tmp_path):
    fakes.add("srun", "sys.exit(70)")
    fakes.add("scontrol")
    variables = {"SLURM_JOB_ID": "71", "PYTHON": sys.executable}
    command = [str(LAUNCH / "slurm.sh"), "--config", "f", "--run-dir", str(tmp_path / "run")]
    assert [len(fakes.run(command, code, **variables)) for code in (0, 0, 70)] == [2, 2, 1]
    assert "step 1 has failed 3 times" in fakes.said
    assert len(fakes.run(command, 0, **variables)) == 2  # submitted again, by a person


def test_slurm_options():
    lines = (LAUNCH / "slurm.sh").read_text().splitlines()
    options = {word for line in lines if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]}
    assert {"--requeue", "--open-mode=append", "--signal=TERM@300", "--exclusive"} <= options
