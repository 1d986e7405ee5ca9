"""Every mesh gives the single device's losses, with no collective that it does not need."""

import re

import numpy as np
import pytest
import tiny

MESHES = {
    "data=8": (8, 1, 1),
    "fsdp=8": (1, 8, 1),
    "tensor=2 fsdp=4": (1, 4, 2),
    "data=2 fsdp=2 tensor=2": (2, 2, 2),
}


@pytest.fixture(scope="module")
def single_device():
    return tiny.make().losses(20)


@pytest.fixture(scope="module", params=MESHES, ids=lambda name: name.replace(" ", ","))
def sharded(request):
    loop = "unroll" if request.param == "fsdp=8" else "scan"
    return request.param, tiny.make(MESHES[request.param], loop=loop)


def test_losses_equal_the_single_device(sharded, single_device):
    _, made = sharded
    losses = made.losses(20)
    assert losses[-1] < losses[0] - 0.05, "the model learns nothing, so that equal losses prove nothing"
    np.testing.assert_allclose(losses, single_device, atol=1e-4, rtol=0)


COLLECTIVE = re.compile(
    r"= (?P<shape>.+?) (?P<kind>all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\(.*?replica_groups=(?P<groups>mesh\[.*?\] \{.*?\}|\S+)"
)


def collectives(text: str) -> list[tuple[str, str, str]]:
    return [(m["kind"], m["shape"], m["groups"]) for m in map(COLLECTIVE.search, text.splitlines()) if m]


def test_only_the_collectives_that_the_mesh_needs(sharded):
    name, made = sharded
    found = collectives(made.compiled.as_text())
    kinds = {kind for kind, _, _ in found}
    allowed = {"all-reduce"}
    if "fsdp" in name:
        allowed |= {"all-gather", "reduce-scatter"}
        assert "all-gather" in kinds
    assert kinds <= allowed, f"{name}: {kinds - allowed} in {found}"
    rows = {tiny.ROWS, tiny.ROWS // made.layout.size("batch")}
    for kind, shape, _ in found:
        if kind != "all-gather":
            continue
        for dims in re.findall(r"\[([\d,]*)\]", shape):
            sizes = [int(size) for size in dims.split(",") if size]
            activation = len(sizes) >= 3 and sizes[0] in rows - {1} and sizes[1] == tiny.SEQUENCE
            assert not activation and shape[0] != "s", f"{name}: gathers the activation {shape}"


def test_no_collective_over_one_device(sharded):
    name, made = sharded
    dead = {"data", "fsdp", "tensor"} - set(made.layout.live_axes)
    for _, shape, groups in collectives(made.compiled.as_text()):
        over = set(re.findall(r"'(\w+)'", groups.split("]")[-1]))
        assert not over or over - dead, f"{name}: a collective of {shape} over {groups}"


def test_one_device_needs_no_collective():
    assert collectives(tiny.make().compiled.as_text()) == []
