"""Whole runs of the family moe: what they record and show, and that they go on to the bit."""

import json
import shutil

import pytest
from runs import SETTINGS, make_workplace, resumed_from

pytestmark = pytest.mark.slow(minutes=0.1)

STEPS, SAVED, PROFILED, LAYERS, EXPERTS = 10, 5, 4, 2, 4
MIXTURE = {
    **{"model.family": "moe", "model.experts": EXPERTS, "model.top_k": 2, "model.expert_mlp": 32},
    **{"model.bias_rate": 0.01, "model.aux_loss": 0.01, "kernels.attention": "xla"},
    **{"train.steps": STEPS, "checkpoint.every": SAVED},
}
WAYS = {
    "scan": {"profile__at": PROFILED, "profile__steps": 3},
    "offloaded": {"model__loop": "unroll", "remat__policy": "full", "offload__level": "parameters"},
    "placed": {"devices": 2, "mesh__fsdp": 1, "mesh__expert": 2, "mesh__place_experts_every": SAVED},
}
COUNTED = ("expert_load_max", "expert_entropy", "balance_loss", "expert_tokens")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    settings = SETTINGS | MIXTURE
    made = make_workplace(tmp_path_factory.mktemp("experts"), settings=settings, forks=True)
    for way, settings in WAYS.items():
        (made.folder / f"{way}.log").write_text(made.run(way, **settings))
    return made


def test_loads_are_recorded_by_layer(place):
    rows = place.metrics("scan")
    assert rows[-1]["loss"] < rows[0]["loss"]
    for row in rows:
        assert len(row["expert_load_max"]) == len(row["expert_entropy"]) == LAYERS
        assert all(1 <= load <= EXPERTS / 2 for load in row["expert_load_max"])
        assert all(0 < entropy <= 1 for entropy in row["expert_entropy"])
        assert ("expert_tokens" in row) == (row["step"] in (1, 10))
    assert [sum(layer) for layer in rows[0]["expert_tokens"]] == [2 * rows[0]["tokens"]] * LAYERS
    for row, other in zip(place.metrics("offloaded"), rows, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_a_profile_shows_the_parts_of_a_layer_of_experts(place):
    folder = place.folder / "scan" / "profile" / str(PROFILED)
    ledger = json.loads((folder / "ledger.json").read_text())
    phases = {(scope["layer"], scope["phase"]) for scope in ledger["scopes"] if scope["seconds"] > 0}
    for part in ("router", "dispatch", "experts"):
        assert {(part, "forward"), (part, "backward")} <= phases, part
    # Forward, a CPU combines within the residual sum: about 1 µs of its own is left, and at times nothing.
    assert ("combine", "backward") in phases
    assert ledger["expert_tokens"] == place.metrics("scan")[0]["expert_tokens"]
    assert "Tokens of each expert" in (folder / "report.html").read_text()


def test_experts_are_placed_anew_between_steps(place):
    """And the losses stay those of one device."""
    said = (place.folder / "placed.log").read_text()
    assert f"step {SAVED}: experts placed anew: the busiest of 2 devices has" in said
    events = map(json.loads, (place.folder / "placed" / "goodput.jsonl").read_text().splitlines())
    assert "custom_badput_events.expert_placement" in {event["event"] for event in events}
    for step, found in place.losses("placed").items():
        assert found == pytest.approx(place.losses("scan")[step], rel=1e-4)


def test_two_processes_place_them_alike(place):
    settings = {key: value for key, value in WAYS["placed"].items() if key != "devices"}
    for process in place.start_job("processes", 2, **settings):
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
    check_alike(place, "processes", "placed")


@pytest.mark.parametrize("way", WAYS)
def test_resumed_it_goes_on_to_the_bit(place, way):
    """Tokens of each expert of the last step say where each was placed before."""
    again = f"{way} again"
    shutil.copytree(place.folder / way, place.folder / again)
    shutil.rmtree(place.folder / again / "checkpoints" / str(STEPS))
    assert resumed_from(place.run(again, **WAYS[way])) == SAVED
    check_alike(place, again, way)


def check_alike(place, one: str, other: str):
    assert place.losses(one) == place.losses(other)
    for row, wanted in zip(place.metrics(one), place.metrics(other), strict=True):
        assert [row.get(name) for name in COUNTED] == [wanted.get(name) for name in COUNTED]
