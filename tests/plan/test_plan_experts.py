"""What is planned for mixtures of experts: rows that a device has room for, and a plan that fits does."""

import re

import pytest

from jaxthru import config as configuration
from jaxthru.build import memory_estimate
from jaxthru.models import moe
from jaxthru.models.remat import kept_bytes
from jaxthru.models.stage import Mixture
from jaxthru.plan import memory
from jaxthru.runtime import aot

cuda = pytest.mark.compiles_for("cuda")
GIB = 2**30
SMALL = "model.layers=2", "model.vocabulary=8192", "model.loop=unroll", "offload.level=none"


def estimated(devices: int, *settings: str) -> memory_estimate.MemoryPlan:
    config = configuration.load("configs/qwen3_235b_a22b.py", [*SMALL, "mesh.fsdp=1", *settings])
    return memory_estimate.estimate(config, devices=devices, segments=8)[0]


def test_a_device_has_room_for_all_that_may_come_to_it():
    few, many = Mixture(2, 8), Mixture(8, 128)
    assert [few.rows(devices) for devices in (1, 2, 4, 8)] == [
        1,
        2,
        4,
        4,
    ]  # of a token's two here is one at most
    assert [many.rows(devices) for devices in (1, 2, 8)] == [1, 2, 8]


def test_rows_that_are_kept_grow_with_the_devices_that_may_send_them():
    config = configuration.load("configs/qwen3_235b_a22b.py", [])
    kept = moe.kept(config.model)
    of = lambda policy, rows: kept_bytes(kept, policy, 2, rows=rows)  # noqa: E731
    hidden, chosen = 2 * (2 * 8 * 1536), 4 * (4 * 8)  # gate and up of a token's experts; where it goes
    assert of("projections", 8) - of("projections", 1) == 7 * (hidden + chosen)
    assert of("attention", 8) - of("attention", 1) == 7 * chosen
    assert of("none", 8) - of("none", 1) == 7 * (hidden + chosen + 2 * 8 * (4096 + 1536))


def test_more_parts_need_less_at_once():
    def planned(chunks: int) -> int:
        settings = "mesh.expert=8", "train.rows=16", "remat.policy=attention", f"mesh.expert_chunks={chunks}"
        return estimated(8, *settings).peak_device

    assert planned(1) > planned(2) > planned(4)


@pytest.mark.parametrize(
    ("settings", "compiled"),
    [
        # settings of two whole layers on eight described H200s -> GiB, compiled for them.
        ("remat.policy=attention", 36.9),
        pytest.param("remat.policy=projections model.loop=scan", 47.5, marks=pytest.mark.slow),
    ],
)
def test_the_arithmetic_is_near_what_was_compiled(settings, compiled):
    whole = "model.vocabulary=151936", "mesh.expert=8", "train.rows=16"
    plan = estimated(8, *whole, *settings.split())
    assert abs(plan.peak_device / GIB / compiled - 1) < 0.05, plan.peak_device / GIB


def test_the_arithmetic_of_a_large_mixture_is_near_what_was_compiled():
    """All 94 layers for 128 H200s, experts over eight of a host and the rest over sixteen hosts: 87.0 GiB as
    JAX 0.11.2 compiled them, which takes minutes."""
    settings = "model.loop=scan", "remat.policy=attention", "offload.level=none", "precision.matmul=compute"
    config = configuration.load("configs/qwen3_235b_a22b.py", settings)
    plan, _ = memory_estimate.estimate(config, devices=128, segments=8)
    assert abs(plan.peak_device / GIB / 87.0 - 1) < 0.05, plan.peak_device / GIB


def scheduled(devices: int, *settings: str) -> str:
    """Returns a step of one layer in the order that XLA gives it on described H200s."""
    shape = "model.embed=1024", "model.heads=8", "model.head_dim=128", "model.layers=1", "train.rows=16"
    settings = *SMALL, *shape, "mesh.fsdp=1", "precision.matmul=compute", *settings
    config = configuration.load("configs/qwen3_235b_a22b.py", settings)
    target = aot.TARGETS["h200"]
    made, _, _ = memory.traced(config, target, devices, 8)
    text = memory.compiled(made, target, devices).hlo
    assert "is_scheduled=true" in text.partition("\n")[0]
    return text


def moved_beside(hlo: str, work: str) -> set[tuple[str, str, bool]]:
    """Returns (collective, scope, whether on the way back) of the experts' tokens that are under way while
    instructions run whose lines say `work`."""
    beside, under_way, kinds = set(), {}, "all-gather|reduce-scatter|collective-permute"
    for line in hlo.splitlines():
        if found := re.search(rf"%?(\S+) = .* ({kinds})-start\(", line):
            if scope := re.search("/(dispatch|combine)/", line):
                under_way[found[1]] = found[2], scope[1], "transpose(" in line
        elif found := re.search(rf" (?:{kinds})-done\(%?([\w.\-]+)\)", line):
            under_way.pop(found[1], None)
        elif work in line:
            beside |= {*under_way.values()}
    return beside


@cuda
@pytest.mark.slow(minutes=0.4)
def test_a_part_of_the_tokens_moves_while_another_is_multiplied():
    beside = moved_beside(scheduled(8, "remat.policy=attention"), "jaxthru_stand_in_grouped_matmul")
    there, back = ("all-gather", "dispatch"), ("reduce-scatter", "combine")
    assert beside >= {(*there, False), (*there, True), (*back, False)}, beside


@cuda
@pytest.mark.slow(minutes=0.3)
def test_copied_tokens_come_behind_the_router_and_go_home_behind_a_device_s_own():
    hlo = scheduled(2, "mesh.expert=2", "mesh.transfers=copies", "remat.policy=none")
    for scope, work in ("dispatch", "/router/"), ("combine", "jaxthru_stand_in_grouped_matmul"):
        beside = moved_beside(hlo, work)
        assert ("collective-permute", scope, False) in beside, beside
