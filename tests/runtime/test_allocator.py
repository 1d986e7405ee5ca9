"""What a process frees stays its own where its devices are CPUs alone."""

import os
import platform
import runpy
import subprocess
import sys
import types

import pytest

from jaxthru.runtime import allocator

ALLOCATES_TWICE = """
import resource, threading
from jaxthru.runtime import allocator
print(allocator.keep_freed())

def allocate():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert len(b"x" * (200 << 20))
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

faults = []
allocate()
thread = threading.Thread(target=allocate)  # XLA's steps run on whatever thread is free
thread.start()
thread.join()
print(faults[1] < faults[0] / 10)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
@pytest.mark.parametrize(
    ("environment", "kept"),
    [
        ({"JAX_PLATFORMS": "cpu"}, True),
        ({"JAX_PLATFORMS": "cuda"}, False),
        ({"JAX_PLATFORMS": "cpu", "MALLOC_ARENA_MAX": "4"}, False),
        ({"JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}, False),
    ],
)
def test_only_a_process_on_cpus_keeps_what_it_frees(environment, kept):
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", ALLOCATES_TWICE]
    done = subprocess.run(command, env=own | environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(kept), str(kept)]


def test_another_c_library_is_left_alone(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(allocator, "on_cpus_alone", lambda: True)
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: pytest.fail("looked for mallopt"))
    assert allocator.keep_freed() is False


def test_the_training_command_keeps_what_it_frees_before_it_does_anything(monkeypatch, capsys):
    called = []
    monkeypatch.setattr(allocator, "keep_freed", lambda: called.append(capsys.readouterr().out))
    monkeypatch.setattr(sys, "argv", ["train", "--help"])
    monkeypatch.delitem(sys.modules, "jaxthru.train", raising=False)  # or it would be run a second time
    with pytest.raises(SystemExit):
        runpy.run_module("jaxthru.train", run_name="__main__")
    assert called == [""] and "--config" in capsys.readouterr().out


def test_nothing_installed_but_cpus(monkeypatch):
    config = types.SimpleNamespace(jax_platforms="")
    monkeypatch.setattr(allocator, "jax", types.SimpleNamespace(config=config))
    monkeypatch.setattr(allocator.util, "find_spec", lambda name: None)
    monkeypatch.setattr(allocator.metadata, "entry_points", lambda group: [])
    assert allocator.on_cpus_alone()
    monkeypatch.setattr(allocator.metadata, "entry_points", lambda group: ["a plugin"])
    assert not allocator.on_cpus_alone()
