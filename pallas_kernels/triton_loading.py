"""Triton and an operation's kernels in it, loaded when a kernel is first needed, once in a process."""

import contextlib
import functools
import importlib
import sys
import threading
from types import ModuleType

from pallas_kernels import triton_cache
from pallas_kernels.dispatch import Unsupported


@functools.cache
def load_triton(package: str) -> tuple[ModuleType, ModuleType]:
    """Returns jax_triton and `<package>.triton_kernels`. Late, for neither is of use off a GPU.

    Raises Unsupported without jax-triton.
    """
    try:
        found = importlib.import_module("jax_triton"), importlib.import_module(f"{package}.triton_kernels")
    except ImportError as error:
        raise Unsupported(f"needs jax-triton (pip install 'jaxthru[gpu]'): {error}") from error
    _specialise_without_torch()
    triton_cache.keep_compiled()
    return found


def _specialise_without_torch() -> None:
    """Has Triton note how it tells arguments' types apart while PyTorch cannot be found.

    It notes that at the first kernel, and imports PyTorch where that is installed, to know its tensors: 5 s
    of each start on an H200's host. Nothing here is such a tensor. Triton finds those of a program that
    imports PyTorch later by their `data_ptr`.
    """
    with _TORCH_HIDDEN:  # steps and what is compiled beside them are traced on threads
        if "torch" in sys.modules:
            return
        triton = importlib.import_module("triton._C.libtriton")
        sys.modules["torch"] = None  # `import torch` then says that there is none
        try:
            with contextlib.suppress(AttributeError, TypeError):  # another Triton may do without
                triton.native_specialize_impl(None, 1, False, True, True)
        finally:
            del sys.modules["torch"]


_TORCH_HIDDEN = threading.Lock()
