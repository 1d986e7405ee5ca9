"""python -m jaxthru.plan limits: the walls move as their formulas say, and published limits are met."""

import dataclasses
import json
import xml.etree.ElementTree

import numpy as np
import pytest
from runs import ROOT

from jaxthru import config as configuration
from jaxthru.plan import cluster, demand, fabric, frontier, limits, walls
from jaxthru.plan.__main__ import main
from jaxthru.plan.cluster import Cluster
from jaxthru.runtime import aot

H200 = Cluster("H200", 690e12, 144e9, 4.8e12)


@pytest.fixture(scope="module")
def need():
    return demand.demand(configuration.load(ROOT / "configs" / "llama3_70b.py", ["train.rows=512"]))


def test_a_step_is_what_the_model_says(need):
    assert need.parameters == 70_553_706_496
    assert need.tokens == 512 * 8192
    per_token = 6 * (need.parameters - 128_256 * 8192 - 161 * 8192) + 6 * 80 * 64 * 128 * 8192
    assert need.flops == pytest.approx(per_token * need.tokens, rel=1e-6)
    assert (need.width, need.splits, need.layers, need.state) == (8192, 8, 80, 12)


def test_of_a_mixture_the_experts_of_a_token_count():
    """Its operations are of these, what is read and gathered is of all; float8 is for the other matrices."""
    need = demand.demand(configuration.load(ROOT / "configs" / "qwen3_30b_a3b.py"))
    assert need.parameters == 30_532_122_624
    layers, router, head = 48, 2048 * 128, 2048 * 151_936
    of_token = 2 * 2048 * (32 + 4) * 128 + 8 * 3 * 2048 * 768
    assert need.multiplied() == layers * of_token
    assert need.multiplied(experts=False) == layers * 2 * 2048 * (32 + 4) * 128
    spans = 6 * layers * 32 * 128 * 4096
    assert need.flops / need.tokens == 6 * (layers * (of_token + router) + head) + spans
    plain, fast = (demand.rate_of("h200", "NVIDIA H200", need, how)[0] for how in ("compute", "fp8"))
    assert plain < fast < 1.3 * plain
    gate_up, down = (one for one in {*need.matrices} if one.experts > 1)
    assert {(one.experts, one.top_k) for one in (gate_up, down)} == {(128, 8)}
    tokens, each = 1e6, 3 * 2048 * 768
    read = sum(limits._read(need, one, tokens, 1) for one in (gate_up, down))
    assert read == need.item * (8 * tokens * (2 * 2048 + 3 * 768) + 128 * each)
    of_few = sum(limits._read(need, one, 1, 1) for one in (gate_up, down))  # one token has eight of them
    assert of_few == need.item * 8 * (2 * 2048 + 3 * 768 + each)


@pytest.fixture(scope="module")
def mixture():
    path = ROOT / "configs" / "qwen3_235b_a22b.py"
    return demand.demand(configuration.load(path, ["train.rows=512"]))


def of_mesh(need, on=H200, **sizes):
    """Returns the walls of one mesh and the bytes that it holds, with full rematerialisation."""
    axes = [np.array([float(sizes.get(axis, 1))]) for axis in limits.Meshes._fields]
    meshes = limits.Meshes(*axes)
    times = limits.walls_of(need, on, meshes, np.array([need.recomputed["full"]]))
    held = limits._held(need, meshes, ["full"])
    return {name: float(each[0]) for name, each in times.items()}, float(held[0])


def test_of_a_mixture_meshes_split_experts_too(mixture, need):
    """At most eightfold, into parts that divide them; a dense model has no such axis."""
    found = limits.points(mixture, H200, 256)
    assert [*found[-1].mesh] == ["data", "fsdp", "expert", "tensor"]
    assert all(np.prod([*point.mesh.values()]) == point.devices for point in found)
    assert 1 < max(point.mesh["expert"] for point in found) <= 8
    of_six = dataclasses.replace(mixture, mixture=mixture.mixture._replace(experts=6))
    assert {point.mesh["expert"] for point in limits.points(of_six, H200, 64)} <= {1, 2}
    assert "expert" not in limits.best(need, H200, 64).mesh


@pytest.mark.parametrize("expert, units", [(2, 1), (4, 3), (8, 7)])
def test_tokens_of_experts_move_as_the_docs_say(mixture, expert, units):
    """docs/parallelism.md: gathered and scattered, forward and backward; of all layers here."""
    no_weights = {"matrices": mixture.matrices[-1:], "blocks": 0.0, "parameters": 0.0}  # nor gradients
    none = dataclasses.replace(mixture, **no_weights)
    times, _ = of_mesh(none, expert=expert)
    own = mixture.tokens / expert * mixture.width * mixture.item
    assert times["NVLink"] == pytest.approx(94 * 4 * units * own / H200.nvlink)
    assert times["NIC"] == 0


def test_split_experts_are_held_gathered_and_summed_in_parts(mixture):
    """And what is no expert's as often as without; rows have room for all that may come."""
    experts, whole = mixture.expert_parameters, mixture.parameters
    assert experts == 94 * 128 * 3 * 4096 * 1536
    (_, alone), (_, split) = of_mesh(mixture, parts=512), of_mesh(mixture, parts=64, expert=8)
    saved = 7 / 8 * experts * (mixture.state + 4 + 2 * mixture.item / 94)
    # Eight rooms for the rows of as many tokens, of one of two parts at a time.
    more = mixture.sequence * (7 * mixture.kept_rows["full"] + (8 / 2 - 1) * mixture.room)
    assert alone - split == pytest.approx(saved - more, rel=1e-9)
    by_fsdp, both = (of_mesh(mixture, fsdp=fsdp, expert=8 // fsdp, parts=64)[0] for fsdp in (8, 4))
    gathered = 3 * 64 * mixture.item * (mixture.blocks * 7 / 8 - (mixture.blocks - experts / 2) * 3 / 4)
    # Of two devices along `expert` each sums a half of what is no expert's shard.
    sums = 2 * mixture.item * (whole - experts) / 4 / 2
    tokens = 94 * 64 * 4 * mixture.sequence * mixture.width * mixture.item
    moved = (by_fsdp["NVLink"] - both["NVLink"]) * H200.nvlink
    assert moved == pytest.approx(gathered - sums - tokens, rel=1e-9)


def test_each_part_of_the_tokens_reads_the_experts_again(mixture):
    """Its rooms are smaller for that; without split experts there are no parts."""
    one, four = (dataclasses.replace(mixture, chunks=chunks) for chunks in (1, 4))
    for expert, parts in ((1, 1), (8, 4)):
        (few, of_few), (many, of_many) = (of_mesh(each, parts=64, expert=expert) for each in (one, four))
        passes = 64 * (3 + mixture.recomputed["full"] * mixture.tokens / mixture.flops)
        again = (parts - 1) * passes * mixture.item * mixture.expert_parameters / expert
        assert (many["HBM"] - few["HBM"]) * H200.bandwidth == pytest.approx(again, rel=1e-9)
        room = mixture.tokens / 64 * mixture.room  # of 1/8 of the tokens with eight rooms each, as of all
        assert of_few - of_many == pytest.approx(room * (1 - 1 / parts), rel=1e-9)


def test_limits_take_as_many_parts_as_a_step_does(mixture):
    named = [dataclasses.replace(mixture, chunks=chunks) for chunks in (1, 2)]
    usual = dataclasses.replace(mixture, chunks=None)
    for expert, tensor, as_of in ((2, 1, 0), (1, 2, 1), (2, 2, 1), (8, 1, 1)):
        mesh = {"parts": 64, "expert": expert, "tensor": tensor}
        assert of_mesh(usual, **mesh) == of_mesh(named[as_of], **mesh) != of_mesh(named[1 - as_of], **mesh)


@pytest.mark.parametrize("factor", (0.5, 2.0, 4.0))
def test_each_wall_moves_as_its_formula_says(need, factor):
    before, replace = limits.closed(need, H200), dataclasses.replace

    def moved(of, on):
        after = limits.closed(of, on)
        return {name: pytest.approx(after[name] / before[name]) for name in before}

    rows = replace(need, rows=int(factor * need.rows), flops=factor * need.flops)
    assert moved(rows, H200) == dict.fromkeys(before, factor)
    still = dict.fromkeys(before, 1.0)
    assert moved(need, replace(H200, bandwidth=factor * H200.bandwidth)) == still | {"HBM": factor}
    assert moved(need, replace(H200, network=factor * H200.network)) == still | {"NIC": factor}
    latency = H200.latency.scaled(1 / factor)
    assert moved(need, replace(H200, latency=latency)) == still | {"latency": factor}


def test_a_longer_domain_moves_what_is_split_within_it(need):
    narrow = limits.closed(need, dataclasses.replace(H200, domain=4))
    wide = limits.closed(need, H200)
    assert wide["HBM"] == pytest.approx(2 * narrow["HBM"])
    assert wide["NIC"] == pytest.approx(2 * narrow["NIC"])
    assert wide["latency"] < narrow["latency"]  # an all-reduce among more devices takes longer
    assert limits.closed(need, dataclasses.replace(H200, domain=72)) == wide  # 8 heads split no further


def test_the_switches_slow_what_crosses_them():
    even, hashed = fabric.load("infiniband_400g"), fabric.load("roce_two_tier")
    assert cluster.contention(even, 256) == 1
    assert 1 < cluster.contention(hashed, 4096) < 1.5
    one = cluster.contention(dataclasses.replace(hashed, qps=1), 4096)
    assert one > 1.3 * cluster.contention(hashed, 4096)
    narrow = dataclasses.replace(even, rails=False, leaves=1024, ports_per_leaf=16, uplinks_per_leaf=2)
    assert cluster.contention(narrow, 256) == pytest.approx(4)  # 8 of 16 NICs cross, over 2 uplinks


def test_a_fabric_bounds_the_devices(need):
    small = fabric.load("infiniband_400g", ["hosts=4"])
    target = aot.target("h200")
    found = cluster.described(small, target, 690e12, 1.0, "", 1 << 16)
    assert [point.devices for point in limits.points(need, found)] == [8, 16, 32]
    hashed = fabric.load("roce_two_tier", ["qps=1"])
    assert cluster.described(hashed, target, 690e12, 1.0, "", 1536).contention[1536] > 1.5


def test_the_walls_of_frontier_runs_move_as_their_formulas_say():
    wall = lambda **how: walls.latency_wall(**{"seconds": 1e7, "layer": 1e-4, "batch": 6e7} | how)  # noqa: E731
    once = wall()
    for how in ({"seconds": 2e7}, {"layer": 5e-5}, {"batch": 1.2e8}):
        assert wall(**how) / once == pytest.approx(2 ** (1 / 1.27))
    grows = wall(reference=70e9, exponent=0.36)
    assert wall(reference=70e9, exponent=0.36, layer=5e-5) / grows == pytest.approx(2 ** (1 / 0.91))
    linear = walls.linear_compute(1e7, 3e12, 8, 6e7, 2)
    for place in range(4):
        doubled = [1e7, 3e12, 8, 6e7]
        doubled[place] *= 2
        assert walls.linear_compute(*doubled, 2) == pytest.approx(2 * linear)
    assert walls.linear_compute(1e7, 3e12, 8, 6e7, 1) == pytest.approx(2 * linear)


def test_the_latency_wall_is_where_all_steps_take_their_least_time():
    parameters = walls.latency_wall(1e7, 1e-4, 4e6, 70e9, 0.36)
    steps = 20 * parameters / walls.batch_of(parameters, 4e6, 70e9, 0.36)
    assert steps * walls.layers_of(parameters) * 1e-4 == pytest.approx(1e7)


def test_published_limits_are_met_within_half_again():
    found = frontier.figures()
    assert len(found) == 10
    assert not [(row.what, row.ratio) for row in found if not 1 / 1.5 < row.ratio < 1.5]
    assert {row.kind for row in found} == {"test", "calibration"}
    assert all(bool(row.chosen) == (row.kind == "calibration") for row in found)


def test_a_search_never_beats_its_bounds():
    machine = frontier.MACHINES["H100 in FP8"]
    how = {"seconds": 7.9e6, "batch": 6e7, "exponent": 0.0}
    small, large = (walls.search(scale, machine, **how).utilisation for scale in (1e26, 1e29))
    assert 0 < large < small <= 1
    hidden = walls.search(1e29, machine, **how, exposed=False).utilisation
    narrow = walls.search(1e29, machine, **how, wide=False).utilisation
    assert large <= min(hidden, narrow)
    assert walls.search(1e33, machine, **how).utilisation == 0  # beyond the latency wall


def test_points_are_bounded_by_each_wall_and_by_linear(need):
    found = limits.points(need, H200, 4096)
    assert [point.devices for point in found] == [2**power for power in range(3, 13)]
    for point in found:
        assert point.seconds == max(point.parts.values()) <= point.exposed
        assert 0 < point.share_exposed <= point.share <= 1
        assert np.prod([*point.mesh.values()]) == point.devices
        groups = point.mesh["data"] * point.mesh["fsdp"]
        assert need.rows % (groups * point.microbatches) == 0
        assert need.splits % point.mesh["tensor"] == 0
    rates = [point.tokens_per_second for point in found]
    assert rates == sorted(rates)


def test_a_slow_network_ends_scaling_sooner_and_is_named(need):
    slow = dataclasses.replace(H200, network=1e9 / 8)  # a gigabit a device
    end = limits.ends(need, slow, limits.points(need, slow, 4096))
    fast = limits.ends(need, H200, limits.points(need, H200, 4096))
    assert end.binds == "NIC"
    assert end.overlapped < fast.overlapped
    assert end.shortest == fast.shortest == need.layers * float(limits.layer_latency(H200, 8))


def test_rows_that_are_no_power_of_two_end_at_their_last_mesh(need):
    few = dataclasses.replace(need, rows=12, flops=need.flops * 12 / 512)
    found = limits.points(few, H200)
    assert found[-1].devices == 4 * 8
    assert limits.ends(few, H200, found).binds == "batch"


def test_no_step_is_shorter_than_the_shortest():
    small = demand.demand(configuration.load(ROOT / "configs" / "quickstart.py"))
    found = limits.points(small, H200, 64)
    assert limits.ends(small, H200, found).shortest <= min(point.seconds for point in found)


def test_links_carry_what_a_collective_moves():
    links = limits.Links(dataclasses.replace(H200, nvlink=100.0, network=10.0))
    assert links.gather(800.0, 1, 1).tolist() == [0, 0]
    assert links.gather(800.0, 8, 1).tolist() == [7.0, 0.0]
    near, far = links.gather(800.0, 16, 1)  # two hosts: each GPU brings an eighth of the other's half
    assert (near, far) == (7.0, 800 / 2 / 8 / 10)
    assert links.gather(800.0, 4, 8).tolist() == [0.0, 60.0]  # each rank on a host of its own


def command(capsys, *arguments):
    code = main(["limits", *arguments])
    return code, capsys.readouterr()


def test_the_command_says_where_scaling_ends_and_draws_it(capsys, tmp_path):
    picture, set_rows = tmp_path / "curve.svg", ("--config", "llama3_70b", "--most", "64")
    code, said = command(capsys, *set_rows, "--plot", str(picture), "--days", "30")
    assert code == 0
    assert "80% of linear to 64 devices if all is overlapped" in said.out
    assert "shortest step, however many devices: 80 layers × 97 µs" in said.out
    assert "in 30 days: " in said.out
    assert "…" not in said.out, "columns are cut"
    assert xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg")
    code, said = command(capsys, *set_rows, "--json", "--device", "h100")
    found = json.loads(said.out)
    assert code == 0
    assert [point["devices"] for point in found["points"]] == [16, 32, 64]
    assert {change["what"] for change in found["changes"]} > {"batch × 2", "NICs × 2", "NVLink domain × 2"}


def test_meshes_of_experts_have_room_in_80_columns(capsys):
    code, said = command(capsys, "--config", "quickstart_moe", "--set", "train.rows=64", "--most", "64")
    assert code == 0 and "1×2×1×1" in said.out and "…" not in said.out


def test_float8_is_faster_in_the_blocks_alone(need):
    plain, _ = demand.rate_of("h200", "NVIDIA H200", need, "compute")
    fast, said = demand.rate_of("h200", "NVIDIA H200", need, "fp8")
    assert plain < fast < 2 * plain
    assert "float8" in said
    assert demand.rate_of("h100", "NVIDIA H100 80GB HBM3", need, "compute") == (989.5e12, "by data sheet")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--config FILE"),
        (("--frontier", "--config", "quickstart"), "--frontier"),
        (("--config", "llama3_70b", "--device", "h300"), "h300"),
        (("--config", "llama3_70b", "--most", "0"), "--most 0"),
        (("--config", "llama3_70b", "--most", "4"), "no mesh of up to 4 devices holds"),
        (("--config", "llama3_70b", "--fabric-set", "nic_gbps=0"), "nic_gbps"),
        (("--config", "llama3_70b", "--tflops", "-1"), "--tflops -1"),
        (("--config", "llama3_70b", "--tflops", "inf"), "--tflops inf"),
        (("--config", "llama3_70b", "--days", "0"), "--days 0"),
        (("--config", "llama3_70b", "--fabric", "no_such"), "--fabric no_such"),
        (("--config", "llama3_70b", "--fabric", "v5p_slice"), "torus of TPUs"),
        (("--config", "no_such"), "no_such"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, words):
    code, said = command(capsys, *arguments)
    assert code == 2
    assert words in said.err
    assert said.err.count("\n") == 1
