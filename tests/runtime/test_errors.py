"""What ends a command is said in one line."""

import contextlib
import errno
import subprocess
import sys

import jax
import pytest

from jaxthru.runtime import errors, hardware, termination
from jaxthru.runtime.errors import InputError, TrainingError, exit_code


def raises(error: BaseException):
    def command():
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("train.rows = 0"), 2, "train.rows = 0"),
        (InputError("a\nb\ud800" + "c" * 10_000), 2, f"a\\nb\\ud800{'c' * 485} ... {'c' * 500}"),
        (TrainingError("step 3: the loss\nwas not finite"), 1, "step 3: the loss\\nwas not finite"),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), 1, "a/b: No space left on device"),
        (OSError(errno.EFBIG, "File too large"), 1, "a file: File too large"),
        (
            MemoryError(),
            1,
            "out of memory: the host, or a limit on this process (`ulimit -v`, a container's), has no more",
        ),
        (
            RuntimeError("can't start new thread"),
            1,
            "no more threads can be started: raise this process's limits (`ulimit -u`, `ulimit -v`)",
        ),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore"),
            1,
            "Out of memory allocating 9 bytes; more train.microbatches, another remat.policy or "
            "offload.level make a step take less, and `python -m jaxthru.plan memory` says how much",
        ),
        (KeyboardInterrupt(), 130, "stopped"),
        (termination.Terminated(), 143, termination.SAID),
    ],
    ids=[
        "input",
        "long",
        "training",
        "disk",
        "file size",
        "host memory",
        "threads",
        "device memory",
        "interrupt",
        "terminated",
    ],
)
def test_exit_codes(error, code, said, capsys):
    assert exit_code(raises(error), "stopped") == code
    assert capsys.readouterr().err == f"jaxthru: {said}\n"


def test_a_call_that_found_no_memory_says_what_python_would(capsys):
    codes = [exit_code(raises(error)) for error in (MemoryError(), OSError(errno.ENOMEM, "Cannot allocate"))]
    first, second = capsys.readouterr().err.splitlines()
    assert codes == [1, 1] and first == second and "out of memory" in first


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("INTERNAL: a bug"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded"),
        RuntimeError("a bug"),
        OSError(errno.ENOENT, "No such file"),
    ],
    ids=str,
)
def test_what_nobody_foresaw_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        exit_code(raises(error))
    assert exit_code(lambda: None) == 0


def test_a_line_that_cannot_be_said_changes_no_exit_code(monkeypatch):
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a log on the disk that is full
        monkeypatch.setattr(sys, "stderr", full)
        assert exit_code(raises(InputError("train.rows = 0"))) == 2
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


LEFT = """
import atexit, sys, threading
from jaxthru.runtime.errors import leave
threading.Thread(target=threading.Event().wait).start()  # a library's, that waits for ever
atexit.register(print, "said at the end")
print("written")
leave(int(sys.argv[1]))
"""


def test_a_process_that_failed_waits_for_no_thread():
    left = subprocess.run([sys.executable, "-c", LEFT, "1"], capture_output=True, text=True, timeout=60)
    assert (left.returncode, left.stdout, left.stderr) == (1, "written\n", "")
    with pytest.raises(SystemExit) as ended:
        errors.leave(2)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("error", "asked", "said"),
    [
        (
            AssertionError(),
            "cuda",
            "JAX_PLATFORMS = cuda: no device: none is here; leave it unset, or install",
        ),
        (RuntimeError("The TPU is in use by 12\nmore"), "", "no device: The TPU is in use by 12"),
    ],
)
def test_a_platform_without_devices_is_one_line(error, asked, said, monkeypatch):
    monkeypatch.setattr(jax, "devices", raises(error))
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", asked)
    try:
        with pytest.raises(InputError) as refused:
            hardware.devices()
    finally:
        jax.config.update("jax_platforms", before)
    assert str(refused.value).startswith(said) and "more" not in str(refused.value)
