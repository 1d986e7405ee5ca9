import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache

from jaxthru.build import cache_prefetch
from jaxthru.build.cache_prefetch import CachePrefetch
from jaxthru.runtime import xla


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Returns a compilation cache of its own, of which everything is large."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    monkeypatch.setattr(cache_prefetch, "LEAST_BYTES", 1)
    monkeypatch.delitem(sys.modules, cache_prefetch.MOSAIC, raising=False)  # another test's
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    xla.keep_compiled(tmp_path / "cache")
    yield tmp_path / "cache"
    xla.keep_compiled(before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


@pytest.fixture
def reads(monkeypatch):
    """Returns what is read of the program: (whether beside the main thread, whether it was there)."""
    found, read = [], compilation_cache.get_executable_and_time

    def noted(key, *arguments):
        made = read(key, *arguments)
        if key.startswith("jit_program"):  # and not what makes its argument
            found.append((threading.current_thread() is not threading.main_thread(), made[0] is not None))
        return made

    monkeypatch.setattr(compilation_cache, "get_executable_and_time", noted)
    return found


BESIDE, HERE, COMPILED = (True, True), (False, True), (False, False)


def start(factor: float = 3.0, name: str = "one") -> float:
    """Compiles a program or finds it, as a start does, and returns what it makes."""
    jax.clear_caches()
    x = np.arange(4, dtype=np.float32)

    def program(x):
        return jnp.sum(x * factor)

    with CachePrefetch(name):
        compiled = jax.jit(program).lower(x).compile()
    return float(compiled(x))


def reads_of(reads: list, *arguments, **options) -> list:
    """Returns how a start comes by its program. It makes what the first start made."""
    reads.clear()
    assert start(*arguments, **options) == 6 * (arguments[0] if arguments else 3.0)
    # What is read in vain is not waited for.
    return [each for each in reads if each in (HERE, COMPILED)] or reads[:1]


def test_the_next_start_finds_its_programs_read(cache, reads):
    assert reads_of(reads) == [COMPILED]
    assert reads_of(reads) == [BESIDE]
    assert reads_of(reads) == [BESIDE]
    (listed,) = (cache / "prefetch").iterdir()
    assert listed.suffix == ".json"  # and nothing half-written beside it


def test_what_is_read_is_taken_for_the_same_program_alone(cache, reads):
    reads_of(reads)
    assert reads_of(reads, 5.0) == [COMPILED]
    assert reads_of(reads, 5.0) == [BESIDE]  # and the list has what the last start asked for
    assert reads_of(reads, 3.0) == [HERE]
    assert reads_of(reads, 3.0, name="another") == [HERE]


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_what_is_read_is_taken_on_the_same_devices_alone(cache, reads):
    """On a GPU the key of a program is the same on all devices."""
    reads_of(reads)
    (listed,) = (cache / "prefetch").iterdir()
    listed.write_text(listed.read_text().replace("[0]]", "[1]]"))
    assert reads_of(reads) == [HERE]


DAMAGED = '[["key", "x", [0]]]', '[["key", "eA==", [99]]]', '[[["key"], "eA==", [0]]]', "[" * 100_000


@pytest.mark.parametrize("text", ["", "[", "{}", "[[1]]", *DAMAGED], ids=lambda text: text[:30])
def test_a_damaged_list_costs_a_start_nothing(cache, reads, text):
    reads_of(reads)
    (listed,) = (cache / "prefetch").iterdir()
    whole = listed.read_text()
    listed.write_text(text)
    assert reads_of(reads) == [HERE]
    assert listed.read_text() == whole


def test_a_program_that_is_gone_or_damaged_is_compiled_anew(cache, reads):
    reads_of(reads)
    (entry,) = cache.glob("*-cache")
    whole = entry.read_bytes()
    entry.unlink()
    assert reads_of(reads) == [COMPILED]
    entry.write_bytes(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
        assert start() == 18


@pytest.mark.parametrize(
    ("name", "off"), [("jax_enable_compilation_cache", False), ("jax_compilation_cache_dir", None)]
)
def test_nothing_is_done_without_a_cache(cache, name, off):
    compilation_cache.reset_cache()
    before = getattr(jax.config, name)
    jax.config.update(name, off)
    try:
        assert start() == 18
    finally:
        jax.config.update(name, before)
        compilation_cache.reset_cache()
    assert not (cache / "prefetch").exists()


def test_a_start_that_is_cut_short_leaves_jax_and_the_list_as_they_were(cache, reads):
    read = compilation_cache.get_executable_and_time
    reads_of(reads)
    with pytest.raises(KeyError), CachePrefetch("one"):
        assert compilation_cache.get_executable_and_time is not read
        raise KeyError
    assert compilation_cache.get_executable_and_time is read
    assert reads_of(reads) == [BESIDE]


def test_what_waits_to_be_read_is_read_by_who_asks(cache, reads, monkeypatch):
    """Others, which this start may not ask for, are read meanwhile."""
    reads_of(reads)
    threads = ThreadPoolExecutor(1)
    monkeypatch.setattr(cache_prefetch, "ThreadPoolExecutor", lambda *_: threads)
    over = threading.Event()
    threads.submit(over.wait)
    assert reads_of(reads) == [HERE]
    over.set()


def test_programs_with_mosaic_kernels_are_not_read_before_they_are_asked_for(cache, reads, monkeypatch):
    monkeypatch.setitem(sys.modules, cache_prefetch.MOSAIC, None)
    reads_of(reads)
    assert reads_of(reads) == [HERE]
