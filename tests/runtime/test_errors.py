"""What ends a command is said in one line."""

import jax
import pytest

from jaxthru.runtime import hardware
from jaxthru.runtime.errors import InputError, exit_code


def raises(error: BaseException):
    def command():
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("train.rows = 0"), 2, "train.rows = 0"),
        (OSError("disk full"), 1, "disk full"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore"),
            1,
            "Out of memory allocating 9 bytes. More train.microbatches, another remat.policy or "
            "offload.level make a step take less; `python -m jaxthru.plan memory` says what it takes",
        ),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
    ids=["input", "failure", "memory", "interrupt"],
)
def test_exit_codes(error, code, said, capsys):
    assert exit_code(raises(error), (OSError,), "stopped") == code
    assert capsys.readouterr().err == f"jaxthru: {said}\n"


def test_what_nobody_foresaw_keeps_its_traceback():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        exit_code(raises(jax.errors.JaxRuntimeError("INTERNAL: a bug")))
    assert exit_code(lambda: None) == 0


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("Unable to initialize backend")])
def test_a_platform_without_devices_is_one_line(error, monkeypatch):
    monkeypatch.setattr(jax, "devices", raises(error))
    with pytest.raises(InputError, match=r"JAX_PLATFORMS = .*: no such device can be used here; leave it"):
        hardware.devices()
