"""Whole training runs in processes of their own, on a small corpus: `from runs import Workplace`."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import forked
from processes import job

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "jaxthru.train"]
Process = subprocess.Popen | forked.Process

SETTINGS = {
    "model.vocabulary": 320,
    "model.layers": 2,
    "model.embed": 32,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.head_dim": 16,
    "model.mlp": 64,
    "data.sequence": 64,
    "train.rows": 8,
    "train.steps": 40,
    "evaluate.rows": 8,
    "evaluate.prompts": "[]",
    "checkpoint.every": 5,
    "metrics.tensorboard": "false",
    "kernels.attention": "auto",
}


@dataclasses.dataclass(frozen=True)
class Workplace:
    """A folder with a mix of real text; its store is shared by all of its runs. platform: cpu or cuda.
    settings: of all runs. xla_flags: by default those of the tests, which compile fast. forks: processes are
    forked from one that has imported all, and begin three seconds sooner."""

    folder: Path
    platform: str = "cpu"
    settings: dict[str, Any] = dataclasses.field(default_factory=lambda: SETTINGS)
    xla_flags: str = os.environ["XLA_FLAGS"]
    forks: bool = False
    _inode_before: dict[str, int | None] = dataclasses.field(default_factory=dict)

    def command(self, run_dir: str, *arguments: str, **settings) -> list[str]:
        """settings: `group__key=value`."""
        keys = self.settings | {"data.mix": self.folder / "mix.toml", "data.store": self.folder / "store"}
        keys |= {name.replace("__", "."): value for name, value in settings.items()}
        overrides = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        config = str(ROOT / "configs" / "quickstart.py")
        where = ["--run-dir", str(self.folder / run_dir)]
        return [*COMMAND, "--config", config, *where, *arguments, *overrides]

    def start(self, run_dir: str, *arguments: str, devices: int = 1, **settings) -> Process:
        self._inode_before[run_dir] = inode(self.folder / run_dir / "metrics.jsonl")
        return self._begin(self.command(run_dir, *arguments, **settings), self.environment(devices))

    def start_job(
        self,
        run_dir: str,
        count: int,
        more: Sequence[dict] = (),
        programs: Mapping[int, Sequence[str]] = MappingProxyType({}),
        **settings,
    ) -> list[Process]:
        """Starts a run of several processes. more: further variables of each one's environment. programs: by
        process, the words that take the place of `python -m jaxthru.train`."""
        self._inode_before[run_dir] = inode(self.folder / run_dir / "metrics.jsonl")
        command = self.command(run_dir, **settings)
        return [
            self._begin(
                [*programs.get(index, command[:3]), *command[3:]],
                self.environment() | said | dict(*more[index : index + 1]),
            )
            for index, said in enumerate(job(count))
        ]

    def _begin(self, words: list[str], environment: dict[str, str]) -> Process:
        if self.forks and words[:3] == COMMAND:
            return forked.start(words[3:], environment)
        pipe = subprocess.PIPE
        return subprocess.Popen(words, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def environment(self, devices: int = 1) -> dict[str, str]:
        flags = f"{self.xla_flags} --xla_force_host_platform_device_count={devices}"
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled")}
        # On a GPU the tests' own process holds most of the memory.
        memory = {"XLA_CLIENT_MEM_FRACTION": "0.1"}
        return os.environ | cache | memory | {"JAX_PLATFORMS": self.platform, "XLA_FLAGS": flags}

    def run(self, run_dir: str, *arguments: str, code: int = 0, devices: int = 1, **settings) -> str:
        """Returns what a run printed, once it has ended with this exit code."""
        process = self.start(run_dir, *arguments, devices=devices, **settings)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == code, f"exit code {process.returncode}:\n{output}"
        return output

    def metrics(self, run_dir: str) -> list[dict]:
        path = self.folder / run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def losses(self, run_dir: str) -> dict[int, tuple[float, float]]:
        """Returns {step: (loss, gradient norm)}; each step must have exactly one row."""
        rows = self.metrics(run_dir)
        found = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows}
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        return found

    def checkpoints(self, run_dir: str) -> list[int]:
        folder = self.folder / run_dir / "checkpoints"
        return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal()) if folder.is_dir() else []

    def wait_for_step(self, process: Process, run_dir: str, step: int) -> None:
        """Returns once a run has booked a step itself: resuming, it first replaces the record it finds."""
        path = self.folder / run_dir / "metrics.jsonl"
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[0]
            replaced = inode(path) not in (None, self._inode_before[run_dir])
            if replaced and path.read_bytes().count(b"\n") >= step:
                return
            time.sleep(0.002)
        process.kill()
        raise AssertionError(f"step {step} never came:\n{process.communicate()[0]}")


def make_workplace(folder: Path, platform: str = "cpu", **settings) -> Workplace:
    """Makes a mix of two sources: modules of the standard library, and what they say of themselves."""
    (folder / "mix.toml").write_text(
        "held_out = 0.2\n[tokenizer]\nvocabulary = 300\n"
        "[sources.python_stdlib]\nweight = 0.7\ncap_bytes = 300_000\n"
        "[sources.prose]\nweight = 0.3\npackages = []\ncap_bytes = 100_000\n"
    )
    return Workplace(folder, platform, **settings)


def inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def kill(process: Process) -> str:
    """Ends a process as a power cut would; returns what it had printed."""
    process.send_signal(signal.SIGKILL)
    return process.communicate(timeout=60)[0]


def compiled(output: str) -> int:
    """Returns how many programs a run with --verbose says it compiled, rather than took from the cache."""
    (line,) = (line for line in output.splitlines() if line.endswith(" from the cache"))
    return int(line.split(" ")[1])


def resumed_from(output: str) -> int:
    """Returns the step that a run says it resumed from, 0 if it started anew."""
    lines = [line for line in output.splitlines() if line.startswith("resumed from step ")]
    assert len(lines) <= 1
    return int(lines[0].rsplit(" ", 1)[1]) if lines else 0
