"""Experts over a mesh: every mesh gives one device's outputs and gradients, whatever the router does."""

import collections
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import named, slow_but_for
from jax.sharding import PartitionSpec

from jaxthru.models.experts import _copied, _sum_of_copied, experts, routed
from jaxthru.models.layers import Weight
from jaxthru.models.ops import Ops
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout
from jaxthru.runtime.weights import WeightInfo
from pallas_kernels.testing import CPU_TOLERANCE, assert_close, normal

N, D, E, K, M = 64, 16, 8, 2, 8
GATE_UP = WeightInfo(("experts", "embed", None, "mlp"), "matrix", (1,), (0, 2))
DOWN = WeightInfo(("experts", "mlp", "embed"), "matrix", (1,), (0,))
EXPERT_8, SHARDED, MIXED = {"expert": 8}, {"expert": 4, "fsdp": 2}, {"expert": 2, "fsdp": 2, "tensor": 2}
MESHES = (
    *({"expert": 2}, SHARDED, EXPERT_8, MIXED),
    *({"data": 2, "expert": 4}, {"expert": 2, "tensor": 4}, {"fsdp": 4, "tensor": 2}),
)
BY_NAME = {str(mesh): mesh for mesh in ({}, *MESHES)}
FAST = (str(SHARDED),)


def ops_on(mesh: dict[str, int], chunks: int = 2, copies: bool = False) -> Ops:
    config = MeshConfig(**({"fsdp": 1} | mesh))
    devices = jax.devices()[: math.prod(mesh.values())]
    how = {"expert_chunks": chunks, "copies": copies}
    return Ops(Layout(make_mesh(config, devices)), jnp.dtype(jnp.float32), **how)


@functools.cache
def operands(skew: str = "none") -> dict[str, jax.Array]:
    """skew: `one`, all tokens choose the first two experts; `rank`, those of the first two devices of
    four."""
    rng = np.random.default_rng(7)
    draw = lambda *shape: normal(rng, shape, jnp.float32)  # noqa: E731
    logits_NE = draw(N, E)
    if skew != "none":
        logits_NE = logits_NE.at[:, : {"one": K, "rank": 4}[skew]].add(20.0)
    return {
        **{"x": draw(N, D), "logits": logits_NE, "cotangent": draw(N, D)},
        **{"gate_up": draw(E, D, 2, M) / D**0.5, "down": draw(E, M, D) / M**0.5},
    }


def layer(ops: Ops, x_ND, logits_NE, gate_up, down, valid_N=None):
    """Returns the output and the routing."""
    valid_N = jnp.ones(len(x_ND), bool) if valid_N is None else valid_N
    routing = routed(ops, logits_NE, valid_N, None, top_k=K, score="softmax", normalise=True)
    return experts(ops, x_ND, routing, Weight(gate_up, info=GATE_UP), Weight(down, info=DOWN)), routing


def jitted(ops: Ops, apply=layer):
    """Returns the layer with its gradients, (x, logits, gate_up, down, cotangent) -> all of them."""
    tokens, homes = ops.layout.sharding(("tokens", None)), stored(ops)

    def run(x, logits, gate_up, down, cotangent):
        y_ND, back, routing = jax.vjp(functools.partial(apply, ops), x, logits, gate_up, down, has_aux=True)
        return y_ND, back(cotangent), routing.counts_E

    outputs = tokens, (tokens, tokens, homes["gate_up"], homes["down"]), None
    return jax.jit(run, out_shardings=outputs)


def stored(ops: Ops) -> dict[str, jax.sharding.Sharding]:
    return {"gate_up": ops.layout.sharding(GATE_UP.axes), "down": ops.layout.sharding(DOWN.axes)}


def placed(ops: Ops, skew: str = "none") -> dict[str, jax.Array]:
    homes, tokens = stored(ops), ops.layout.sharding(("tokens", None))
    return {name: jax.device_put(value, homes.get(name, tokens)) for name, value in operands(skew).items()}


def loop_over_experts(ops, x_ND, logits_NE, gate_up, down):
    """The definition: each expert multiplies all tokens, and counts where it was chosen."""
    everywhere = jnp.ones(len(x_ND), bool)
    routing = routed(ops, logits_NE, everywhere, None, top_k=K, score="softmax", normalise=True)
    y_ND = jnp.zeros_like(x_ND)
    for expert in range(E):
        gate_NM, up_NM = (x_ND @ gate_up[expert, :, side] for side in (0, 1))
        made_ND = (jax.nn.silu(gate_NM) * up_NM) @ down[expert]
        weight_N = jnp.sum(jnp.where(routing.ids_NK == expert, routing.weights_NK, 0), axis=1)
        y_ND += weight_N[:, None] * made_ND
    return y_ND, routing


@functools.cache
def definition():
    return jitted(ops_on({}), loop_over_experts)


@functools.cache
def wanted(skew: str):
    return jax.device_get(definition()(**placed(ops_on({}), skew)))


@functools.cache
def compiled(mesh: str, chunks: int = 2, copies: bool = False) -> jax.stages.Compiled:
    ops = ops_on(BY_NAME[mesh], chunks, copies)
    return jitted(ops).lower(**placed(ops)).compile()


def check(mesh: str, skew: str = "none", chunks: int = 2, copies: bool = False) -> None:
    """Asserts that outputs and gradients are those of the definition, and counts to the last one."""
    ops = ops_on(BY_NAME[mesh], chunks, copies)
    found = compiled(mesh, chunks, copies)(**placed(ops, skew))
    assert_close(jax.device_get(found[:2]), wanted(skew)[:2], CPU_TOLERANCE)
    np.testing.assert_array_equal(found[2], wanted(skew)[2])
    assert found[2].dtype == jnp.int32 and int(np.sum(found[2])) == N * K
    # Each gradient lies as its weight is stored, in parts over `expert` and `fsdp`.
    for gradient, home in zip(found[1][2:], stored(ops).values(), strict=True):
        assert gradient.sharding.is_equivalent_to(home, gradient.ndim)


def test_one_device_does_what_the_definition_says():
    check(str({}))
    check(str({}), "one")


@slow_but_for(*FAST, mesh=dict(zip(map(str, MESHES), map(str, MESHES), strict=True)))
def test_every_mesh_gives_the_outputs_and_gradients_of_one_device(mesh):
    check(mesh)


@slow_but_for(f"{SHARDED}-one", mesh=named(str(SHARDED), str(EXPERT_8)), skew=named("one", "rank"))
def test_no_token_is_dropped_where_all_go_to_one_device(mesh, skew):
    check(mesh, skew)


@slow_but_for(slow=("1", "4"), chunks=named(1, 4))
def test_chunks_change_nothing(chunks):
    check(str(SHARDED), chunks=chunks)


@slow_but_for(*FAST, slow=map(str, (*MESHES[2:5], MESHES[6])), mesh=named(*map(str, MESHES)))
def test_copies_change_nothing(mesh):
    """In one part on other meshes than these two, one of them with `tensor`: over eight devices each part has
    many copies, which take long to compile."""
    chunks = 2 if mesh in (*FAST, str(MIXED)) else 1
    check(mesh, chunks=chunks, copies=True)
    if mesh in FAST:
        check(mesh, "rank", copies=True)


def test_copies_are_rounded_once():
    """A token's sums from three devices beside its own, and its gradients: 3 × 2⁻⁹ and 1, which added one at
    a time leave 1 in bfloat16."""
    ops = dataclasses.replace(ops_on({"expert": 4}, 1), copies=True, compute=jnp.dtype(jnp.bfloat16))
    split = PartitionSpec("expert")

    def local(x_nD):
        part = jnp.where(jax.lax.axis_index("expert") == 0, 1, 2.0**-9).astype(x_nD.dtype)

        def joined(x_nD):
            ids = jnp.zeros(x_nD.shape, jnp.int32)
            parts = _copied(ops, (x_nD, ids, x_nD.astype(jnp.float32)), ("expert",))
            return _sum_of_copied([one.home(one.arrays[0] * part) for one in parts])

        y_nD, pull = jax.vjp(joined, x_nD)
        return y_nD, *pull(jnp.ones_like(y_nD))

    run = jax.jit(ops.layout.shard_map(local, (split,), (split, split), check_vma=False))
    for found in run(jnp.ones((4, 8), jnp.bfloat16)):
        assert (found == jnp.bfloat16(1 + 3 * 2.0**-9)).all()


COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def test_what_copies_move():
    """Tokens, their experts and their weights: no collective gathers or scatters any."""
    kinds = set(COLLECTIVE.findall(compiled(str(SHARDED), copies=True).as_text()))
    assert kinds == {"collective-permute", "all-reduce"}  # the latter for the counts


def test_what_moves():
    """Of each of two parts the tokens, their experts and their weights are gathered, and the sums scattered;
    the way back scatters and gathers the gradients of all but the experts' numbers. The weights' gradients
    need nothing along `expert`."""
    text = compiled(str(SHARDED)).as_text()
    kinds = collections.Counter(
        (
            found[1],
            *re.findall(r"'(\w+)'", line.partition("replica_groups=")[2].partition("{")[2].partition("}")[0]),
        )
        for line in text.splitlines()
        if (found := COLLECTIVE.search(line))
    )
    parts = 2
    assert kinds["all-gather", "expert"] == parts * (3 + 1)
    assert kinds["reduce-scatter", "expert"] == parts * (1 + 2)
    assert kinds["all-gather", "fsdp"] == kinds["reduce-scatter", "fsdp"] == 2
    assert {kind for kind, *_ in kinds} <= {"all-gather", "reduce-scatter", "all-reduce"}
    of_floats = [line for line in text.splitlines() if " all-reduce(" in line and " s32[" not in line]
    assert not of_floats, of_floats


def test_nothing_is_sorted_or_added_by_atomics():
    text = compiled(str(SHARDED)).as_text()
    assert " sort(" not in text
    scatters = [line for line in text.splitlines() if " scatter(" in line and "= f" in line]
    assert not scatters, scatters


def test_a_token_that_goes_nowhere_has_no_output_and_no_gradient():
    ops, given = ops_on({"expert": 4}), operands()
    valid_N = jnp.arange(N) % 3 != 0
    x_ND = jnp.where(valid_N[:, None], given["x"], jnp.nan)  # whatever padding holds

    def run(x_ND, gate_up, down):
        y_ND, routing = layer(ops, x_ND, given["logits"], gate_up, down, valid_N)
        return jnp.sum(y_ND * given["cotangent"]), (y_ND, routing)

    both = jax.jit(jax.value_and_grad(run, (0, 1, 2), has_aux=True))
    (_, (y_ND, routing)), gradients = both(x_ND, given["gate_up"], given["down"])
    assert np.all(np.asarray(y_ND)[~np.asarray(valid_N)] == 0) and np.isfinite(y_ND).all()
    assert int(routing.counts_E.sum()) == int(valid_N.sum()) * K
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert np.all(np.asarray(gradients[0])[~np.asarray(valid_N)] == 0)


@pytest.mark.slow
def test_in_float8_a_mesh_gives_one_device_s_numbers():
    """Scales are each device's own and powers of two: another one rounds otherwise only what is tiny."""

    def run(mesh: str):
        ops = dataclasses.replace(ops_on(BY_NAME[mesh]), float8_experts=True)
        return jax.tree.leaves(jax.device_get(jitted(ops)(**placed(ops))[:2]))

    def apart(a, b) -> float:
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    exact = jax.tree.leaves(wanted("none")[:2])
    for one, other, plain in zip(run("{}"), run(str(SHARDED)), exact, strict=True):
        assert apart(other, one) < 0.01 < 0.02 < apart(one, plain) < 0.1
