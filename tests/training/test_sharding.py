"""Every mesh gives the single device's losses, with no collective that it does not need."""

import collections
import math
import re

import jax
import numpy as np
import pytest
import tiny
from cases import named, slow_but_for

from jaxthru.engine.inline import InlineStep
from jaxthru.runtime import aot
from jaxthru.training.state import sharded_init

MESHES = {
    "data=2": (2, 1, 1),
    "fsdp=4": (1, 4, 1),
    "tensor=2": (1, 1, 2),
    "tensor=2 fsdp=2": (1, 2, 2),
    "fsdp=2 expert=2": (1, 2, 1, 2),  # to layers that are no experts as data=2
    "data=2 fsdp=2 tensor=2": (2, 2, 2),
}
SLOW = {"fsdp=2 expert=2", "data=2 fsdp=2 tensor=2"}
SHAPES = {"fsdp=4": {"loop": "unroll"}}
PLAIN = "reference"  # collective matmuls whose collectives can be told from the program


@pytest.fixture(scope="module")
def single_device():
    return tiny.make().losses(10)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MESHES],
    ids=lambda name: name.replace(" ", ","),
)
def sharded(request):
    settings = SHAPES.get(request.param, {})
    return request.param, tiny.make(MESHES[request.param], collective_matmul=PLAIN, **settings)


def test_losses_equal_the_single_device(sharded, single_device):
    _, made = sharded
    losses = made.losses(10)
    assert losses[-1] < losses[0] - 0.05, "the model learns nothing, so that equal losses prove nothing"
    np.testing.assert_allclose(losses, single_device, atol=1e-4, rtol=0)


def test_the_first_state_is_the_single_device_s():
    """Each shard made where it lives; the other tests here put copies of one device's state there."""
    made = tiny.make((1, 2, 2))
    state = sharded_init(made.step.objective.model, made.step.optimizer, made.abstract, 0)
    for leaf, wanted, to in zip(*map(jax.tree.leaves, (state, made.fresh(), made.abstract)), strict=True):
        assert leaf.sharding == to.sharding
        np.testing.assert_allclose(leaf, wanted, rtol=1e-6, atol=1e-7)


def test_losses_of_four_devices_along_tensor():
    shape = {"heads": 8, "kv_heads": 4, "loop": "unroll", "remat": "projections"}
    losses = tiny.make((1, 1, 4), **shape).losses(5)
    np.testing.assert_allclose(losses, tiny.make(**shape).losses(5), atol=1e-4, rtol=0)


@pytest.mark.parametrize("collective_matmul", ["none", "ring", "ring_bidirectional"])
def test_whatever_moves_the_tokens(collective_matmul, single_device):
    made = tiny.make((1, 2, 2), collective_matmul=collective_matmul)
    np.testing.assert_allclose(made.losses(5), single_device[:5], atol=1e-4, rtol=0)


@slow_but_for("(1, 2, 2)", mesh=named((1, 2, 2), (1, 2, 4), (2, 2, 2)))
def test_each_gradient_equals_the_single_device_s(mesh):
    """Among them those of the norms' scales, of which each device along `tensor` sees only its tokens."""

    def gradients(made):
        of = made.gradients(made.state["params"], made.batch(0))[1]
        return jax.tree_util.tree_flatten_with_path(jax.device_get(of))[0]

    shape = {"kv_heads": 4, "qk_norm": True}
    for (path, found), (_, alone) in zip(
        gradients(tiny.make(mesh, **shape)), gradients(tiny.make(**shape)), strict=True
    ):
        assert np.abs(alone).max() > 0
        distance = np.linalg.norm(found - alone) / np.linalg.norm(alone)
        assert distance < 1e-5, f"{jax.tree_util.keystr(path)}: {distance}"


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
    if "fsdp" in name or "tensor" in name:
        allowed |= {"all-gather", "reduce-scatter"}
        assert "all-gather" in kinds
    if "fsdp" in name:
        allowed |= {"all-to-all"}
    assert kinds <= allowed, f"{name}: {kinds - allowed} in {found}"
    # Only tensor parallelism moves activations, beside the embedding's to and fro; and for that alone what
    # indexes them is gathered, the tokens' numbers.
    indices = [shape for kind, shape, _ in found if kind == "all-gather" and shape[0] == "s"]
    assert len(indices) == ("fsdp" in name), f"{name}: gathers the indices {indices}"
    assert [kind for kind, *_ in found].count("all-to-all") == 2 * ("fsdp" in name)
    tokens = tiny.ROWS * tiny.SEQUENCE // made.layout.size("batch")
    for kind, shape, groups in found:
        for dims in re.findall(r"\[([\d,]*)\]", shape):
            assert not is_activation(dims, made), f"{name}: {kind} of the activation {shape}"
            # The loss adds up two numbers of each token, and nothing more is ever added up whole.
            whole = kind == "all-reduce" and axes_of(groups) == {"tensor"}
            assert not whole or size_of(dims) <= 2 * tokens, f"{name}: {kind} of the activation {shape}"


def test_what_moves_over_tensor_and_over_fsdp():
    """Each layer gathers its tokens for query, key and value and for gate and up, gathers them again where
    those weights' gradients are made, and gathers the gradients of what the output and the down projection
    gave; each of these four maps sums up its parts one way, forward or backward. Beside the layers, the
    embedding scatters its sums and the loss gathers its tokens, and the reverse. Each matrix is gathered for
    either pass, the output matrix for the first alone, and its gradient scattered; of the embedding only the
    tokens' numbers are gathered, and what was looked up, and its gradient, changes places."""
    layers, matrices = tiny.SHAPE.layers, 7
    made = tiny.make((1, 2, 2), loop="unroll", remat="projections", collective_matmul=PLAIN)
    found = collections.Counter(
        (kind, *axes_of(groups))
        for kind, shape, groups in collectives(made.compiled.as_text())
        if kind != "all-reduce"
    )
    assert found == {
        ("all-gather", "tensor"): 6 * layers + 2,
        ("reduce-scatter", "tensor"): 4 * layers + 2,
        ("all-gather", "fsdp"): 2 * matrices * layers + 2,
        ("reduce-scatter", "fsdp"): matrices * layers + 1,
        ("all-to-all", "fsdp"): 2,
    }


@pytest.mark.compiles_for("cuda")
@pytest.mark.parametrize(("loop", "float8"), [("scan", False), ("unroll", False), ("unroll", True)])
def test_matrices_are_cast_before_they_are_gathered(loop, float8):
    """For what the backward pass makes again, too, whose matrices come from behind a barrier."""
    made = tiny.make((1, 2, 1), loop=loop, compute="bfloat16", remat="full", float8=float8)
    lowered = aot.lower(jax.jit(InlineStep(made.step)), made.abstract, made.inputs)
    found = collectives(aot.compile_for(lowered, aot.TARGETS["h200"], 2).hlo)
    dtypes = {
        dtype for kind, shape, _ in found if kind == "all-gather" for dtype in re.findall(r"(\w+)\[", shape)
    }
    assert "bf16" in dtypes and "f32" not in dtypes and float8 == ("f8e4m3fn" in dtypes)


@slow_but_for("(1, 2, 2)", mesh=named((1, 2, 2), (2, 2, 2)))
def test_parameters_that_are_copied(mesh, single_device):
    made = tiny.make(mesh, ops=("copies",), collective_matmul=PLAIN, loop="unroll", remat="projections")
    np.testing.assert_allclose(made.losses(5), single_device[:5], atol=1e-4, rtol=0)
    found = collections.Counter(
        (kind, *axes_of(groups)) for kind, _, groups in collectives(made.compiled.as_text())
    )
    matrices = 7 * tiny.SHAPE.layers
    # Forward and backward, and the gradients of each; the output matrix forward alone.
    assert found[("collective-permute",)] == (mesh[1] - 1) * (3 * matrices + 2)
    assert found[("all-gather", "fsdp")] == 1, "what the embedding is asked for"
    assert found[("reduce-scatter", "fsdp")] == 0


@slow_but_for(
    "(1, 2, 2)-scan-kept",
    "(1, 2, 2)-unroll-kept+copies",
    slow=("(1, 8, 1)-scan-kept+copies", "(1, 8, 1)-unroll-kept", "(2, 2, 2)-scan-kept"),
    mesh=named((1, 2, 2), (1, 8, 1), (2, 2, 2)),
    loop=named("scan", "unroll"),
    ops={"kept": ("keep_parameters",), "kept+copies": ("keep_parameters", "copies")},
)
def test_parameters_that_are_kept(mesh, loop, ops, single_device):
    """They are gathered once; what each policy computes again, it computes from them."""
    made = tiny.make(mesh, ops=ops, collective_matmul=PLAIN, loop=loop, remat="full")
    np.testing.assert_allclose(made.losses(5), single_device[:5], atol=1e-4, rtol=0)
    found = collectives(made.compiled.as_text())
    kinds = collections.Counter((kind, *axes_of(groups)) for kind, _, groups in found)
    matrices = 7 * (tiny.SHAPE.layers if loop == "unroll" else 1)
    if "copies" in ops:
        assert kinds[("collective-permute",)] == (mesh[1] - 1) * (2 * matrices + 2)
    else:
        assert kinds[("all-gather", "fsdp")] == matrices + 2


def axes_of(groups: str) -> set[str]:
    """Returns the mesh axes that a collective goes over, where its groups name them."""
    return set(re.findall(r"'(\w+)'", groups.split("]")[-1]))


def size_of(dims: str) -> int:
    return math.prod(int(size) for size in dims.split(",") if size)


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
    tied = tiny.make((1, 2, 2), tied_embeddings=True)
    np.testing.assert_allclose(tied.losses(5), tiny.make(tied_embeddings=True).losses(5), atol=1e-4, rtol=0)
    assert {kind for kind, _, _ in collectives(tied.compiled.as_text())} <= {
        *("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    }


def test_no_collective_over_one_device(sharded):
    name, made = sharded
    dead = {"data", "fsdp", "tensor"} - set(made.layout.live_axes)
    for _, shape, groups in collectives(made.compiled.as_text()):
        over = axes_of(groups)
        assert not over or over - dead, f"{name}: a collective of {shape} over {groups}"


def test_one_device_needs_no_collective():
    assert collectives(tiny.make().compiled.as_text()) == []
