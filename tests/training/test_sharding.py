"""Every mesh gives the single device's losses, with no collective that it does not need."""

import collections
import re
import typing

import jax
import jax.numpy as jnp

import numpy as np
import pytest
import tiny

MESHES = {
    "data=8": (8, 1, 1),
    "fsdp=8": (1, 8, 1),
    "tensor=2": (1, 1, 2),
    "tensor=2 fsdp=4": (1, 4, 2),
    "data=2 fsdp=2 tensor=2": (2, 2, 2),
}
SHAPES = {"fsdp=8": {"loop": "unroll"}}


@pytest.fixture(scope="module")
def single_device():
    return tiny.make().losses(20)


@pytest.fixture(scope="module", params=MESHES, ids=lambda name: name.replace(" ", ","))
def sharded(request):
    return request.param, tiny.make(MESHES[request.param], **SHAPES.get(request.param, {}))


def test_losses_equal_the_single_device(sharded, single_device):
    _, made = sharded
    losses = made.losses(20)
    assert losses[-1] < losses[0] - 0.05, "the model learns nothing, so that equal losses prove nothing"
    np.testing.assert_allclose(losses, single_device, atol=1e-4, rtol=0)


COLLECTIVE = re.compile(
    r"= (?P<shape>.+?) (?P<kind>all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\((?:.*?replica_groups=(?P<groups>mesh\[.*?\] \{.*?\}|\S+))?"
)


def collectives(text: str) -> list[tuple[str, str, str]]:
    return [
        (m["kind"], m["shape"], m["groups"] or "") for m in map(COLLECTIVE.search, text.splitlines()) if m
    ]


def test_only_the_collectives_that_the_mesh_needs(sharded):
    name, made = sharded
    found = collectives(made.compiled.as_text())
    kinds = {kind for kind, _, _ in found}
    allowed = {"all-reduce"}
    if "fsdp" in name:
        allowed |= {"all-gather", "reduce-scatter"}
        assert "all-gather" in kinds
    assert kinds <= allowed, f"{name}: {kinds - allowed} in {found}"
    # Only tensor parallelism adds activations up; nothing ever gathers them, or what indexes them.
    moved = [(kind, shape) for kind, shape, _ in found if kind == "all-gather" or "tensor" not in name]
    for kind, shape in moved:
        assert kind != "all-gather" or shape[0] != "s", f"{name}: gathers the indices {shape}"
        for dims in re.findall(r"\[([\d,]*)\]", shape):
            assert not is_activation(dims, made), f"{name}: {kind} of the activation {shape}"


def is_activation(dims: str, made: tiny.Tiny) -> bool:
    """Says whether a shape is [rows, sequence, ...], whole or a device's share."""
    sizes = [int(size) for size in dims.split(",") if size]
    rows = {tiny.ROWS, tiny.ROWS // made.layout.size("batch")} - {1}
    return len(sizes) >= 3 and sizes[0] in rows and sizes[1] == tiny.SEQUENCE


def test_collectives_are_recognised():
    """Lines as XLA prints them: a check that sees nothing would pass everything."""
    lines = """
    %a = f32[8]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1}}
    %b = (f32[2]{0}, f32[2]{0}) all-reduce-start(%x, %y), replica_groups=mesh['data'=1,'fsdp'=8] {'fsdp'}
    %c = f32[8]{0} all-to-all(%x), replica_groups=[1,8]<=[8]
    %d = f32[8]{0} add(%x, %y)
    """
    assert [kind for kind, _, _ in collectives(lines)] == ["collective-permute", "all-reduce", "all-to-all"]


def test_tied_embeddings_shard_over_tensor():
    tied = tiny.make((1, 4, 2), tied_embeddings=True)
    np.testing.assert_allclose(tied.losses(5), tiny.make(tied_embeddings=True).losses(5), atol=1e-4, rtol=0)
    assert {kind for kind, _, _ in collectives(tied.compiled.as_text())} <= {
        *("all-reduce", "all-gather", "reduce-scatter")
    }


def test_no_collective_over_one_device(sharded):
    name, made = sharded
    dead = {"data", "fsdp", "tensor"} - set(made.layout.live_axes)
    for _, shape, groups in collectives(made.compiled.as_text()):
        over = set(re.findall(r"'(\w+)'", groups.split("]")[-1]))
        assert not over or over - dead, f"{name}: a collective of {shape} over {groups}"


def test_one_device_needs_no_collective():
    assert collectives(tiny.make().compiled.as_text()) == []
