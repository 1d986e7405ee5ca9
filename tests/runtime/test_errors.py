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
            "Out of memory allocating 9 bytes; more train.microbatches, another remat.policy or "
            "offload.level make a step take less, and `python -m jaxthru.plan memory` says how much",
        ),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
    ids=["input", "failure", "memory", "interrupt"],
)
def test_exit_codes(error, code, said, capsys):
    assert exit_code(raises(error), (OSError,), "stopped") == code
    assert capsys.readouterr().err == f"jaxthru: {said}\n"


@pytest.mark.parametrize("said", ["INTERNAL: a bug", "RESOURCE_EXHAUSTED: Shared memory size limit exceeded"])
def test_what_nobody_foresaw_keeps_its_traceback(said):
    with pytest.raises(jax.errors.JaxRuntimeError, match=said):
        exit_code(raises(jax.errors.JaxRuntimeError(said)))
    assert exit_code(lambda: None) == 0


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
