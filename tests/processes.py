"""Tests with several real processes: `from processes import start_processes, finish`."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import forked


def start_processes(
    script: Path, *arguments: str, count: int = 2, devices: int = 1, forks: bool = False
) -> list[subprocess.Popen | forked.Process]:
    """Starts a script in `count` processes that jaxthru.runtime.distributed.initialize() joins.

    devices: CPU devices in each process. forks: of one that has imported all of the command's modules.
    """
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    alone = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    environments = [os.environ | alone | more for more in job(count)]
    if forks:
        return [forked.start(arguments, each, str(script)) for each in environments]
    return [
        subprocess.Popen(
            [sys.executable, "-u", str(script), *arguments],
            env=each,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for each in environments
    ]


def job(count: int) -> list[dict[str, str]]:
    """Returns what the environment of each process of a job says of it; of one that is alone, nothing."""
    if count == 1:
        return [{}]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
    said = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
    return [said | {"JAX_PROCESS_ID": str(index)} for index in range(count)]


def finish(processes: list[subprocess.Popen | forked.Process], timeout: float = 120) -> list[str]:
    """Returns what each process printed. Fails if one fails; leaves none behind."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, f"exit code {process.returncode}:\n{output}"
    return outputs
