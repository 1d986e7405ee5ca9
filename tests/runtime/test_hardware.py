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
