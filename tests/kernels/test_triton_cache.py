"""Kernels of Triton that are kept on the disk from one start to the next."""

import contextlib
import dataclasses
import threading
import types

import jax
import pytest

from pallas_kernels import triton_cache
from pallas_kernels.triton_cache import kept


@dataclasses.dataclass
class Result:
    """As jax-triton's."""

    binary: str
    name: str
    shared_mem_bytes: int
    ttgir: str | None
    llir: str | None


@dataclasses.dataclass(frozen=True)
class Hashed:
    """A backend or options."""

    text: str
    debug: bool = False

    def hash(self):
        return self.text


class Library:
    """Stands for jax-triton's module, and counts what it compiles."""

    CompilationResult = Result
    _JAX_TRITON_DUMP_DIR = None

    def __init__(self):
        self.compiled = []

    def compile(self, ttir, backend, options, capability, platform):
        self.compiled.append(str(ttir))
        return Result(f"ptx of {ttir} for {capability}", f"name of {ttir}", 1024, None, None)

    def __call__(
        self, ttir="kernel", options="warps 4", capability=90, platform="cuda", backend="sm_90", debug=False
    ):
        how = Hashed(backend), Hashed(options, debug), capability, platform
        return kept(self.compile, self, ttir, *how)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Returns the library with an empty cache in `tmp_path`, and a Triton of a version."""
    monkeypatch.setattr(triton_cache, "importlib", triton_of())
    monkeypatch.delenv("TRITON_ALWAYS_COMPILE", raising=False)
    triton_cache._warn.cache_clear()
    with kept_in(tmp_path):
        yield Library()


def triton_of(version="3.6.0", jax_triton="0.3.1", **settings):
    modules = {
        "jax_triton": types.SimpleNamespace(__version__=jax_triton),
        "triton": types.SimpleNamespace(__version__=version),
        "triton._C.libtriton": types.SimpleNamespace(get_cache_invalidating_env_vars=settings.copy),
    }
    return types.SimpleNamespace(import_module=modules.__getitem__)


@contextlib.contextmanager
def kept_in(folder):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", folder and str(folder))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_the_next_start_finds_what_the_first_compiled(library):
    first, second = library(), Library()
    assert second() == first and first.binary == "ptx of kernel for 90"
    assert (library.compiled, second.compiled) == (["kernel"], [])


def test_whatever_changes_a_kernel_compiles_it(library, monkeypatch):
    library()
    others = {"ttir": "another"}, {"options": "warps 8"}, {"capability": 100}, {"backend": "12.9-sm_90"}
    for number, other in enumerate(others, start=2):
        library(**other)
        assert len(library.compiled) == number, other
    installed = triton_of("3.7.0"), triton_of(jax_triton="0.3.2"), triton_of(DISABLE_LLVM_OPT="1")
    for number, other in enumerate(installed, start=6):
        monkeypatch.setattr(triton_cache, "importlib", other)
        library()
        assert len(library.compiled) == number


@pytest.mark.parametrize("damage", [b"", b"null", b"\xff\x00", "half", "bit"])
def test_a_damaged_file_is_compiled_again_and_mended(library, tmp_path, damage, caplog):
    first = library()
    (path,) = (tmp_path / "triton").iterdir()
    whole = path.read_bytes()
    halves = {"half": whole[: len(whole) // 2], "bit": whole.replace(b"ptx", b"pty")}
    path.write_bytes(halves.get(damage, damage))
    assert library() == first and library() == first
    assert len(library.compiled) == 2 and path.read_bytes() == whole
    assert caplog.text.count("files were damaged") == 1


def test_nothing_is_kept_where_jax_keeps_nothing(library, tmp_path):
    with kept_in(None):
        library()
    with kept_in("gs://bucket/programs"):
        library()
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        library()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    library(platform="rocm")
    library(debug=True)  # prints as it compiles
    assert len(library.compiled) == 5 and not (tmp_path / "triton").exists()


def test_a_folder_that_cannot_be_used_costs_no_run_and_is_told(library, tmp_path, caplog):
    (tmp_path / "triton").write_text("no folder")
    assert library().shared_mem_bytes == library(ttir="another").shared_mem_bytes == 1024
    assert len(library.compiled) == 2
    assert "are compiled again: Not a directory" in caplog.text


def test_threads_that_load_kernels_hook_jax_triton_once(monkeypatch):
    jax_triton = types.SimpleNamespace(compile_ttir_inplace=Library().compile)
    first, both = jax_triton.compile_ttir_inplace, threading.Barrier(2)

    def importing(name):
        both.wait()
        return jax_triton

    monkeypatch.setattr(triton_cache, "importlib", types.SimpleNamespace(import_module=importing))
    threads = [threading.Thread(target=triton_cache.keep_compiled) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hook = jax_triton.compile_ttir_inplace
    assert hook.func is kept and hook.args == (first, jax_triton)


def test_threads_with_a_kernel_in_common_compile_it_once(library):
    begun, go_on = threading.Event(), threading.Event()
    compile_now = library.compile

    def slowly(*given):
        begun.set()
        go_on.wait()
        return compile_now(*given)

    library.compile = slowly
    found = []
    threads = [threading.Thread(target=lambda: found.append(library())) for _ in range(3)]
    threads[0].start()
    begun.wait()
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(library.compiled) == 1 and found == [found[0]] * 3


@pytest.mark.gpu
def test_jax_triton_compiles_nothing_that_was_kept(tmp_path, monkeypatch):
    """The real thing: a kernel that jax-triton has forgotten is found, and computes the same."""
    from jax_triton import triton_lib

    from pallas_kernels.rms_norm import rms_norm

    def norm():
        x_ND = jax.numpy.arange(1024.0).reshape(2, 512)
        return jax.jit(lambda x, w: rms_norm(x, w, epsilon=1e-6, implementation="triton"))(x_ND, x_ND[0])

    with kept_in(tmp_path):
        first = norm()
        triton_lib._COMPILED_KERNEL_CACHE.clear()
        for name in ("compile_ttir_to_ptx_inplace", "compile_ttir_to_hsaco_inplace"):
            monkeypatch.setattr(triton_lib, name, None)
        assert list((tmp_path / "triton").iterdir())
        assert (norm() == first).all()
