"""Strict settings for every test: eight CPU devices, no silent promotion of dtypes or ranks."""

import gc
import importlib.util
import itertools
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
# Tests compile much and compute little. Without optimisation, and with the emitters that make no MLIR context
# for each fusion, compiling takes a quarter of the time; in one piece a sixth less than that, because the
# other cores are busy with other tests.
UNOPTIMISED = (
    "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    " --xla_cpu_parallel_codegen_split_count=1"
)
MAPPINGS = 12_000  # above these, a worker that is done with a file lets go of its programs
COMPILERS = {"cuda": "jax_cuda13_plugin", "triton": "triton", "tpu": "libtpu"}  # for what, and its package


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compilers",
        action="store_true",
        help="what lacks its compiler fails, and is not skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Runs before any test module imports JAX. GPU tests alone see a GPU."""
    flags = [os.environ.get("XLA_FLAGS", ""), EIGHT_DEVICES]
    if not on_gpu(config):
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags.append(UNOPTIMISED)
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
    kept = tempfile.mkdtemp(prefix="jaxthru-compiled-")
    config.add_cleanup(lambda: shutil.rmtree(kept, ignore_errors=True))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = kept  # and not the user's own
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        # Each of the many processes that tests start would compile JAX and jaxthru anew: 5 s in place of 2.
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(kept) / "bytecode"))
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = (
        "1"  # workers compile for TPUs beside each other, and open none
    )
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # loading a kernel could wait for one that waits for it
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"


def on_gpu(config: pytest.Config) -> bool:
    """Says whether the tests asked for are those that need a GPU."""
    return "gpu" in config.option.markexpr.replace("not gpu", "")


def pytest_collection_finish() -> None:
    """What is there now stays: the garbage collector need not look at it after every few hundred objects."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_itemcollected(item: pytest.Item) -> None:
    """What compiles for a device that is not here takes long, whatever is installed."""
    if item.get_closest_marker("compiles_for"):
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)  # when only the tests asked for are left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files go to workers in this order: what takes minutes is not begun last, when the others have ended."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)

    def first(tests: list[pytest.Item]) -> tuple[float, int]:
        marks = itertools.chain.from_iterable(test.iter_markers("slow") for test in tests)
        return -sum(mark.kwargs.get("minutes", 0) for mark in marks), -len(tests)

    items[:] = itertools.chain.from_iterable(sorted(files.values(), key=first))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("compiles_for"):
        (device,) = mark.args
        if importlib.util.find_spec(COMPILERS[device]) is None:
            said = f"compiling for {device} needs {COMPILERS[device]}: pip install 'jaxthru[aot]'"
            (pytest.fail if item.config.option.compilers else pytest.skip)(said)


@pytest.hookimpl(optionalhook=True)  # `-o addopts=` runs tests without pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """All of the tests share the cores. Those on a GPU take all of it, and a few named ones are done before
    workers have started: they run in this process."""
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return min(len(os.sched_getaffinity(0)), 4) if everything and not on_gpu(config) else 0


@pytest.hookimpl(trylast=True)  # when the last test of a file is over, and what its fixtures held is gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A program compiled for a CPU takes 9 mappings of memory or more, and a process may have 65530: LLVM
    aborts the worker that asks for another. JAX holds all that were compiled until it is told not to."""
    jax = sys.modules.get("jax")
    if jax and nextitem and nextitem.path != item.path and mappings() > MAPPINGS:
        jax.clear_caches()
        gc.collect()


def mappings() -> int:
    """Returns how many mappings of memory this process has: 0 where the system does not say."""
    said = Path("/proc/self/maps")
    return said.read_bytes().count(b"\n") if said.exists() else 0


@pytest.fixture(autouse=True)
def only_what_compiles_long_is_kept():
    """A command keeps every program that it compiles. Once one has run within this process, all tests after
    it would write theirs, which costs time."""
    yield
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)  # JAX's own


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """A command has what is logged printed, and nothing else hear of it: only until its test is over."""
    log = logging.getLogger("jaxthru")
    before = log.handlers, log.propagate, log.level
    yield
    log.handlers, log.propagate = before[:2]
    log.setLevel(before[2])


def importing_from(folder: Path, monkeypatch):
    """Yields a function that imports a module of a folder, as a script there would; forgets them after."""
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module
    for script in folder.glob("**/*.py"):
        parts = script.relative_to(folder).with_suffix("").parts
        for end in range(1, len(parts) + 1):  # a package remembers its modules
            sys.modules.pop(".".join(parts[:end]), None)


@pytest.fixture
def bench(monkeypatch):
    """Imports from scripts/bench."""
    # Or a suite that is told a commit would tell all tests that come.
    monkeypatch.setenv("JAXTHRU_BENCH_COMMIT", "")
    yield from importing_from(SCRIPTS / "bench", monkeypatch)


@pytest.fixture
def script(monkeypatch):
    """Imports from scripts."""
    yield from importing_from(SCRIPTS, monkeypatch)


@pytest.fixture(scope="module")
def study_script():
    """Imports from scripts/study, once for a file of tests: its small studies take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        yield from importing_from(SCRIPTS / "study", patch)


@pytest.fixture
def bit_exact(monkeypatch):
    """Compiles with the emitters that runs have: then programs of the same arithmetic agree to the bit."""
    import jax
    from jax._src import compiler

    get_compile_options = compiler.get_compile_options

    def with_all_emitters(*arguments, env_options_overrides=None, **others):
        overrides = (env_options_overrides or {}) | {"xla_backend_extra_options": ""}
        return get_compile_options(*arguments, env_options_overrides=overrides, **others)

    monkeypatch.setattr(compiler, "get_compile_options", with_all_emitters)
    jax.clear_caches()
    yield
    jax.clear_caches()
