"""How much host memory XLA may pin, and that it does so before the first step."""

import math
import mmap
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxthru.runtime import pinned
from jaxthru.runtime.errors import InputError

GIB = 1 << 30


@pytest.fixture
def fresh(monkeypatch):
    """As if no backend had loaded and no limit were set."""
    monkeypatch.setenv(pinned.LIMIT, "1")  # noted, so that whatever is set meanwhile goes
    monkeypatch.delenv(pinned.LIMIT)
    monkeypatch.setattr(pinned, "_set_here", {})
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)


def test_pinned_memory_may_grow_to_what_is_needed_and_a_little_more(fresh):
    pinned.limit(90 * GIB, round(127.5 * GIB))
    assert os.environ[pinned.LIMIT] == "99"


def test_pinned_memory_may_grow_to_what_the_host_gives_where_no_need_is_known(fresh):
    pinned.limit(0, round(127.5 * GIB))
    assert os.environ[pinned.LIMIT] == "128"


def test_more_than_the_host_gives_names_the_setting(fresh):
    with pytest.raises(InputError, match=r"keeps 90.0 GiB on the host, which may pin 64.0 .offload.host_gib"):
        pinned.limit(90 * GIB, 64 * GIB)


def test_a_low_limit_in_the_environment_is_named(fresh, monkeypatch):
    monkeypatch.setenv(pinned.LIMIT, "80")
    with pytest.raises(InputError, match=f"{pinned.LIMIT} = 80 .as it is set.: .*at least 90"):
        pinned.limit(90 * GIB, 128 * GIB)
    pinned.limit(80 * GIB, 128 * GIB)
    assert os.environ[pinned.LIMIT] == "80"
    monkeypatch.setenv(pinned.LIMIT, "many")
    with pytest.raises(InputError, match="'many': must be a whole number of GiB"):
        pinned.limit(80 * GIB, 128 * GIB)


def test_a_later_run_in_the_same_process_sets_its_own_limit(fresh, monkeypatch):
    pinned.limit(0, 64 * GIB)
    assert os.environ[pinned.LIMIT] == "64"
    pinned.limit(90 * GIB, 128 * GIB)
    assert os.environ[pinned.LIMIT] == "99"
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: True)
    pinned.limit(95 * GIB, 128 * GIB)
    with pytest.raises(InputError, match=r"= 99 \(set by an earlier run in this process\): .* its own"):
        pinned.limit(100 * GIB, 128 * GIB)
    assert os.environ[pinned.LIMIT] == "99"


def test_a_limit_that_comes_too_late_is_not_set_in_vain(fresh, monkeypatch):
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: True)
    pinned.limit(64 * GIB, 128 * GIB)
    with pytest.raises(InputError, match=f"{pinned.LIMIT} = 64 .*too late.*at least 65"):
        pinned.limit(65 * GIB, 128 * GIB)


@pytest.mark.parametrize(
    ("gib", "limit", "regions"),
    [
        (72, 120, [8, 64]),
        (71.3, 120, [8, 64]),
        (81, 120, [8, 16, 64]),
        (45, 120, [16, 32]),
        (64, 120, [64]),
        (3, 120, [4]),
        (72, 74, [74]),  # what the limit is, where it was set for this size
        (119, 120, [120]),
        (99, 99, [99]),
    ],
)
def test_what_is_reserved_are_powers_of_two_from_the_smallest_or_the_limit(gib, limit, regions):
    assert pinned.regions(round(gib * GIB), limit) == regions


def test_little_more_than_asked_for_is_reserved_and_never_more_than_the_limit():
    for gib in range(1, 300):
        for limit in (gib, gib + 5, 2 * gib + 8):
            taken = pinned.regions(gib * GIB, limit)
            assert gib <= sum(taken) <= min(limit, gib * 1.125 + 8), (gib, limit)
            assert len(taken) <= 4 and taken == sorted(set(taken))


@pytest.fixture
def asked_for(monkeypatch):
    """The bytes that are asked for at once, none of which is taken, where nothing is reserved yet."""
    asked, empty = [], pinned.jax.lax.empty

    def little(shape, dtype):
        asked.append(math.prod(shape))
        return empty((1,), dtype)

    monkeypatch.setattr(pinned.jax.lax, "empty", little)
    monkeypatch.setattr(pinned, "_reserved", [])
    return asked


def test_a_region_is_asked_for_by_little_less_than_it_is_to_be(asked_for, monkeypatch, caplog):
    """The pool answers by the next power of two, or by what its limit leaves."""
    monkeypatch.setenv(pinned.LIMIT, "120")
    pinned.reserve(81 * GIB)
    assert [each < gib * GIB for each, gib in zip(asked_for, [8, 16, 64], strict=True)] == [True] * 3
    assert [1 << (each - 1).bit_length() for each in asked_for] == [8 * GIB, 16 * GIB, 64 * GIB]
    asked_for.clear()
    pinned.reserve(60 * GIB)  # which is there
    assert asked_for == [] and not caplog.records
    pinned.reserve(100 * GIB)  # gaps of the run before would serve for the request
    assert asked_for == [] and sum(pinned._reserved) == 88
    assert "an earlier run of this process pinned 88 GiB of host memory, and 100 are needed" in caplog.text
    monkeypatch.setattr(pinned, "_reserved", [])
    monkeypatch.setenv(pinned.LIMIT, "33")  # one GiB less would be the 32 of a smaller region
    pinned.reserve(33 * GIB)
    (whole,) = asked_for
    assert 32 * GIB < whole < 33 * GIB
    caplog.clear()
    pinned.reserve(72 * GIB)  # more than the pool may hold: it holds all that it may
    assert asked_for == [whole] and not caplog.records


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "limit", "regions"), [(6, 8, ["8.00GiB"]), (12, 40, ["4.00GiB", "8.00GiB"])]
)
def test_a_reserved_pool_of_pinned_memory_does_not_grow(size, limit, regions):
    """XLA's own log says when it does; arrays of many sizes come and go, each turn once the last is there."""
    script = f"""
import jax, jax.numpy as jnp
from jaxthru.runtime import pinned
pinned.reserve({size} << 30)
host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
kept = {{}}
for turn in range(60):
    for part in range(5):
        kept.pop(part, None)
        kept[part] = jax.device_put(jnp.zeros(((500 + 77 * (turn * part % 7)) << 20,), jnp.uint8), host)
    jax.block_until_ready(kept)
"""
    logged = {"TF_CPP_VMODULE": "bfc_allocator=1", "TF_CPP_MIN_LOG_LEVEL": "0", pinned.LIMIT: str(limit)}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | logged, capture_output=True, text=True, check=True
    )
    grown = re.findall(r"Extending allocation by (\S+) bytes for xla_gpu_host_bfc", ran.stderr)
    assert [size for size in grown if size.endswith("GiB")] == regions, grown


@pytest.mark.compiles_for("cuda")
def test_the_plugin_knows_the_limit_of_pinned_memory():
    plugin = find_spec("jax_plugins.xla_cuda13")
    binary = next(Path(plugin.submodule_search_locations[0]).glob("*.so"))
    with binary.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        assert text.find(pinned.LIMIT.encode() + b"\0") > 0
