"""All operations register in one way, and a configuration offers what they have."""

import dataclasses
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
import time
import types
import typing
from concurrent.futures import ThreadPoolExecutor

import pytest

import pallas_kernels
from jaxthru.models.kernels import KernelsConfig
from pallas_kernels import dispatch, triton_loading

NAMES = [module.name for module in pkgutil.iter_modules(pallas_kernels.__path__) if module.ispkg]
CHOICES = {field.name: typing.get_args(field.type) for field in dataclasses.fields(KernelsConfig)}
MORE = {"collective_matmul": ("fused", "none")}
FACTS = {"attention": {"elements": 1, "max_segments": 1}}  # what an order depends on beside the platform


def operation_of(name: str) -> dispatch.Operation:
    return importlib.import_module(f"pallas_kernels.{name}").OPERATION


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_is_its_folder(name):
    operation = operation_of(name)
    assert isinstance(operation, dispatch.Operation) and operation.name == name
    assert "reference" in operation.names
    for known in operation.names:
        module = operation.implementations[known].module or known
        assert importlib.util.find_spec(f"pallas_kernels.{name}.{module}"), f"{known} has no file"
    for platform in ("cpu", "gpu", "tpu"):
        tried = operation.automatic(platform=platform, **FACTS.get(name, {}))
        assert tried and set(tried) <= set(operation.names)


def test_a_configuration_offers_what_the_operations_have():
    assert set(CHOICES) == set(NAMES)
    for name, choices in CHOICES.items():
        assert choices == ("auto", *MORE.get(name, ()), *operation_of(name).names)
        assert KernelsConfig().named(name) is None
        assert KernelsConfig(**{name: "reference"}).named(name) == "reference"


def test_writing_to_peers_is_known_from_the_configuration():
    known = {name: KernelsConfig(collective_matmul=name) for name in CHOICES["collective_matmul"]}
    writing = {name for name, config in known.items() if config.writes_to_peers}
    assert writing == {"fused", "mosaic_gpu", "mosaic_gpu_adds"}


def test_a_configuration_imports_no_kernels():
    """Mosaic takes two seconds to import."""
    code = "import sys, jaxthru.models.kernels; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    heavy = ("jax.experimental.pallas", "jax_triton", "triton")
    assert not set(found.stdout.split()) & set(heavy)


def test_threads_that_begin_with_triton_together_hide_pytorch_in_turn(monkeypatch):
    seen = []

    def specialise(*_):
        time.sleep(0.02)
        seen.append(sys.modules["torch"])

    fake = types.SimpleNamespace(native_specialize_impl=specialise)
    monkeypatch.setattr(triton_loading.importlib, "import_module", lambda name: fake)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with ThreadPoolExecutor(3) as threads:
        for each in [threads.submit(triton_loading._specialise_without_torch) for _ in range(3)]:
            each.result()
    assert seen == [None] * 3 and "torch" not in sys.modules
