"""How much host memory this process may use."""

import pytest

from jaxthru.runtime import hardware


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Returns a function that sets this process's groups, the limits of groups, and MemTotal."""

    def set_up(own: str, limits: dict[str, str], total_kib: int = 1 << 20) -> int:
        (tmp_path / "own").write_text(own)
        (tmp_path / "meminfo").write_text(f"MemTotal:       {total_kib} kB\nMemFree: 1 kB\n")
        for name, limit in limits.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(limit + "\n")
        monkeypatch.setattr(hardware, "OWN_GROUPS", tmp_path / "own")
        monkeypatch.setattr(hardware, "MEMINFO", tmp_path / "meminfo")
        monkeypatch.setattr(hardware, "CONTROL_GROUPS", tmp_path / "cgroup")
        return hardware.host_limit_bytes()

    return set_up


def test_version_2_takes_the_least_of_all_groups_around(host):
    limits = {"a/memory.max": "4096", "a/b/memory.max": "max", "memory.max": "8192"}
    assert host("0::/a/b\n", limits) == 4096


def test_version_1_takes_the_memory_controller(host):
    own = "9:name=systemd:/\n4:memory:/job\n1:cpu:/other\n0::/\n"
    limits = {"memory/job/memory.limit_in_bytes": "2048", "memory/memory.limit_in_bytes": str(2**63 - 4096)}
    assert host(own, limits) == 2048


def test_in_a_container_the_root_is_its_own_group(host):
    assert host("0::/kubepods/of/the/host\n", {"memory.max": "1024"}) == 1024


def test_a_limit_above_what_the_machine_shows_is_the_limit(host):
    assert host("0::/a\n", {"a/memory.max": str(128 << 30)}, total_kib=24 << 20) == 128 << 30


def test_a_limit_little_above_what_the_machine_has_is_no_limit(host):
    """The system keeps some of the memory that a machine is sold with."""
    found = host("0::/a\n", {"a/memory.max": str(128 << 30)}, total_kib=131_981_020)
    assert found == 131_981_020 << 10


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_without_a_limit_it_is_all_that_the_machine_has(host, limit):
    assert host("0::/a\n", {"a/memory.max": limit}, total_kib=24 << 20) == 24 << 30


def test_this_machine_has_some():
    assert hardware.host_limit_bytes() > 1 << 28


def test_swap_counts_where_it_is_said(host, tmp_path):
    host("0::/\n", {})
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nSwapTotal:       8 kB\n")
    assert hardware.swap_bytes() == 8 << 10 and hardware.host_limit_bytes() == 100 << 10
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\n")
    assert hardware.swap_bytes() == 0


MEMINFO = "MemTotal: 1000 kB\nMemAvailable: 700 kB\nSwapFree: {swap} kB\n"


@pytest.mark.parametrize(
    ("files", "swap", "free"),
    [
        ({}, 0, 700),
        ({}, 50, 750),
        ({"memory.max": 800 << 10, "memory.current": 200 << 10}, 0, 600),
        ({"memory.max": 800 << 10, "memory.current": 200 << 10}, 50, 600),  # swap space is the machine's
        ({"memory.max": 950 << 10, "memory.current": 200 << 10}, 0, 700),  # others use the machine, too
        (
            {
                "memory.max": 800 << 10,
                "memory.current": 500 << 10,
                "memory.stat": f"anon 5\ninactive_file {100 << 10}\nactive_file {50 << 10}\nshmem 4\n"
                "slab_reclaimable 1024\n",
            },
            0,
            451,
        ),
        ({"memory.max": 8000 << 10, "memory.current": 300 << 10}, 0, 7700),  # it grows as it is used
    ],
)
def test_free_memory_is_the_least_that_any_limit_leaves(host, tmp_path, files, swap, free):
    host("0::/a\n", {f"a/{name}": str(text) for name, text in files.items()})
    (tmp_path / "meminfo").write_text(MEMINFO.format(swap=swap))
    assert hardware.host_free_bytes() == free << 10


def test_free_memory_of_version_1_counts_the_files_of_all_groups_within(host, tmp_path):
    limits = {
        "memory/job/memory.limit_in_bytes": 900 << 10,
        "memory/job/memory.usage_in_bytes": 800 << 10,
        "memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {200 << 10}\ntotal_active_file 0\n",
    }
    host("4:memory:/job\n", {name: str(text) for name, text in limits.items()})
    (tmp_path / "meminfo").write_text(MEMINFO.format(swap=0))
    assert hardware.host_free_bytes() == 300 << 10


def test_this_machine_has_some_free():
    assert 0 < hardware.host_free_bytes() <= hardware.host_limit_bytes() + hardware.swap_bytes()
