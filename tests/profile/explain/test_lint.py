"""Each rule on a program that breaks it, compiled where a CPU's compiler shows it, and on the step, which
breaks none."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import tiny

from jaxthru.models import facts, family, moe
from jaxthru.models.scopes import COMBINE, DISPATCH, EXPERTS, ROUTER
from jaxthru.profile.account.attribution import Attribution
from jaxthru.profile.explain.lint import lint
from jaxthru.profile.read import hlo
from jaxthru.runtime import aot
from jaxthru.runtime.mesh import AXES
from pallas_kernels.grouped_matmul import grouped_matmul, ragged
from pallas_kernels.routing import combine, dispatch, dispatch_weights, route, sort_assignments
from pallas_kernels.weighted_swiglu import weighted_swiglu

CONFIG = {
    "mesh": {"data": 1, "fsdp": 2, "tensor": 1},
    "precision": {"compute": "bfloat16"},
    "data": {"sequence": 64},
}


def findings(text: str, rule: str, exchanges: dict[str, str] | None = None, flops: float = 1e9, **config):
    attribution = Attribution(hlo.modules(text))
    spent = {(work.module, work.instruction.name): 0.5 for work in attribution.all()}
    model = SimpleNamespace(exchanges=exchanges or {}, matmul_flops_per_token=flops, layers=1)
    of = SimpleNamespace(program=attribution, spent=spent, runs={}, config=CONFIG | config)
    found = lint(SimpleNamespace(**vars(of), ledger=SimpleNamespace(model=model)))
    return [entry for entry in found if entry.rule == rule]


def compiled(function, *arguments, **options) -> str:
    return jax.jit(function, **options).lower(*arguments).compile().as_text()


def array(*dims: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def program(*lines: str, header: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule jit_f, is_scheduled=true{header}\n\nENTRY %main (a: f32[2]) -> f32[2] {{\n{body}\n}}\n"


def test_large_copies():
    text = compiled(lambda x: x.T.copy(), array(1024, 512))
    (entry,) = findings(text, "copies")
    assert entry.bytes == 2 * 4 * 1024 * 512 and entry.seconds == 0.5
    assert not findings(compiled(lambda x: x.T.copy(), array(64, 64)), "copies")


def test_float32_products_in_a_bfloat16_run():
    wide = program(
        "%a = f32[64,64]{1,0} parameter(0)",
        "ROOT %dot.1 = f32[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
        'metadata={op_name="jit(f)/jvp(model)/mlp/dot"}',
    )
    (entry,) = findings(wide, "float32_matmuls")
    assert entry.instruction == "dot.1" and "5.24e+05 FLOPs" in entry.text and entry.scope.endswith("mlp/dot")
    assert not findings(wide, "float32_matmuls", precision={"compute": "float32"})


def test_products_that_the_compiler_widens_are_its_own():
    text = compiled(lambda x, y: x @ y, *[array(64, 64, dtype=jnp.bfloat16)] * 2)
    assert " dot(" in text and not findings(text, "float32_matmuls")


@pytest.mark.parametrize(("last", "wide"), [("multiply(%c, %c)", True), ("copy(%c)", False)])
def test_what_is_computed_from_a_widened_array_is_not_the_compilers(last, wide):
    """A fusion may convert to compute in float32, and leave that; or do no more than convert and copy."""
    fused = (
        "%fused (p: bf16[64,64]) -> f32[64,64] {\n  %p = bf16[64,64]{1,0} parameter(0)\n"
        f"  %c = f32[64,64]{{1,0}} convert(%p)\n  ROOT %r = f32[64,64]{{1,0}} {last}\n}}\n\n"
    )
    text = program(
        "%a = bf16[64,64]{1,0} parameter(0)",
        "%f = f32[64,64]{1,0} fusion(%a), kind=kLoop, calls=%fused",
        "ROOT %dot.1 = f32[64,64]{1,0} dot(%f, %f), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    header, _, entry = text.partition("\n\n")
    assert bool(findings(f"{header}\n\n{fused}{entry}", "float32_matmuls")) is wide


@pytest.mark.parametrize(
    ("opcode", "shape", "mesh", "why"),
    [
        ("all-to-all", "bf16[512,64]", {"data": 1, "fsdp": 2, "tensor": 1}, "no axis of the mesh"),
        ("all-gather", "bf16[512,64]", {"data": 2, "fsdp": 1, "tensor": 1}, "nothing is split"),
        ("all-gather", "bf16[8,64,64]", {"data": 1, "fsdp": 2, "tensor": 1}, "gathers activations"),
        ("all-gather", "bf16[512,64]", {"data": 1, "fsdp": 2, "tensor": 1}, None),
        ("all-gather", "bf16[8,64,64]", {"data": 1, "fsdp": 1, "tensor": 2}, None),
        ("all-reduce", "bf16[512,64]", {"data": 2, "fsdp": 1, "tensor": 1}, None),
    ],
)
def test_collectives_that_the_mesh_does_not_explain(opcode, shape, mesh, why):
    text = program(f"%a = {shape} parameter(0)", f"ROOT %c.1 = {shape} {opcode}(%a), dimensions={{0}}")
    texts = [entry.text for entry in findings(text, "collectives", mesh=mesh)]
    assert len(texts) == (why is not None) and all(why in text for text in texts)


@pytest.mark.parametrize("scope", ["jit(train_step)/jvp(model)/embedding", "jit(embed)/jvp(embedding)"])
@pytest.mark.parametrize(("fsdp", "found"), [(1, 1), (2, 0)])
def test_columns_of_embedded_tokens_are_exchanged_over_fsdp(fsdp, found, scope):
    text = program(
        "%a = bf16[2,512,64] parameter(0)",
        "ROOT %c.1 = bf16[2,512,64] all-to-all(%a), dimensions={0}, "
        f'metadata={{op_name="{scope}/shard_map/all_to_all"}}',
    )
    assert len(findings(text, "collectives", mesh={"data": 1, "fsdp": fsdp, "tensor": 2})) == found


def test_an_all_to_all_is_meant_in_scopes_that_exchange():
    text = program(
        "%a = bf16[2,512,64] parameter(0)",
        "%c.1 = bf16[2,512,64] all-to-all(%a), dimensions={0}, "
        'metadata={op_name="jit(train_step)/jvp(model)/mlp/experts/all_to_all"}',
        "ROOT %c.2 = bf16[2,512,64] all-to-all(%c.1), dimensions={0}, "
        'metadata={op_name="jit(train_step)/jvp(model)/mlp/all_to_all"}',
    )
    assert {entry.instruction for entry in findings(text, "collectives")} == {"c.1", "c.2"}
    (entry,) = findings(text, "collectives", {"experts": "embed"})
    assert entry.instruction == "c.2" and "no axis of the mesh needs it" in entry.text


def test_what_stages_exchange_is_among_the_facts(monkeypatch):
    chain = family.chain(tiny.SHAPE)
    embedding = dataclasses.replace(chain.embedding, exchanges={"experts": "embed"})
    monkeypatch.setattr(family, "chain", lambda config: chain._replace(embedding=embedding))
    assert facts.facts(tiny.SHAPE, "float32").exchanges == {"experts": "embed"}


def test_loops_of_unknown_length():
    unknown = compiled(lambda x: jax.lax.while_loop(lambda x: x[0] < 9, lambda x: x * 2, x), array(8))
    assert len(findings(unknown, "loops")) == 1
    known = compiled(lambda x: jax.lax.fori_loop(0, 9, lambda _, x: jnp.sin(x), x), array(8))
    assert "while(" in known and not findings(known, "loops")


def test_state_that_is_not_donated():
    def update(state):
        return {"params": state["params"] * 2}

    state = {"params": array(1024, 512)}
    (entry,) = findings(compiled(update, state), "not_donated")
    assert entry.bytes == 4 * 1024 * 512 and entry.text == "state['params'] is not donated"
    assert not findings(compiled(update, state, donate_argnums=0), "not_donated")


def test_attention_that_is_computed_again():
    again = tiny.make(loop="scan", remat="full").compiled.as_text()
    entries = findings(again, "attention_again")
    assert entries and all("rematted_computation" in entry.scope for entry in entries)
    assert not findings(tiny.make(loop="scan").compiled.as_text(), "attention_again")


def test_the_step_breaks_no_rule_of_the_mesh():
    text = tiny.make(loop="scan", mesh=(2, 2, 2)).compiled.as_text()
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    for rule in ("collectives", "loops", "not_donated", "attention_again"):
        assert not findings(text, rule, mesh=mesh), rule


MIXTURE = {"experts": 16, "top_k": 4}
OF_EXPERTS = {"train": {"rows": 2, "microbatches": 1}, "mesh": {"data": 1, "fsdp": 1}}
EXPERTS_RULES = ("dense_experts", "sorted_scores", "scattered_sums")


def mixture(x, logits, gate_up, down, *, routing="xla", grouped="xla", dispatched=dispatch, platform="cpu"):
    """A layer of experts in the scopes that a model has; implementations by name."""
    E, K, how = len(gate_up), MIXTURE["top_k"], {"implementation": routing}
    with jax.named_scope(ROUTER):
        valid = jnp.ones(len(x), bool)
        routed = route(logits, valid, top_k=K, score="softmax", normalise=True, **how)
    with jax.named_scope(DISPATCH):
        order = sort_assignments(routed.ids_NK, E, **how)
        rows, weights = dispatched(x, order, K, **how), dispatch_weights(routed.weights_NK, order)
    with jax.named_scope(EXPERTS):
        of = {"implementation": grouped, "platform": platform}
        hidden = grouped_matmul(rows, gate_up.reshape(E, x.shape[1], -1), order.sizes_E, **of)
        hidden = weighted_swiglu(hidden.reshape(len(rows), 2, -1), weights, implementation="xla")
        rows = grouped_matmul(hidden, down, order.sizes_E, **of)
    with jax.named_scope(COMBINE):
        return jnp.sum(jnp.square(combine(rows, order, len(x), **how)).astype(jnp.float32))


def lowered_mixture(dtype=jnp.float32, times: int = 1, platforms=None, **how) -> jax.stages.Lowered:
    """times: how many times as wide as MIXTURE says."""
    N, E, D, M = 2 * CONFIG["data"]["sequence"], MIXTURE["experts"], 32 * times, 24 * times
    x, *matrices = (array(*dims, dtype=dtype) for dims in ((N, D), (E, D, 2, M), (E, M, D)))
    gradient = jax.jit(jax.grad(lambda *a: mixture(*a, **how), (0, 1, 2, 3)))
    return gradient.trace(x, array(N, E), *matrices).lower(lowering_platforms=platforms)


def broken(text: str, times: int = 1) -> dict[str, str]:
    """Returns the rules of experts that a program breaks, with what the first finding of each says."""
    flops = 6 * MIXTURE["top_k"] * 3 * (32 * times) * (24 * times)  # of a token, in three passes
    found = {rule: findings(text, rule, flops=flops, **OF_EXPERTS) for rule in EXPERTS_RULES}
    return {rule: entries[0].text for rule, entries in found.items() if entries}


def test_a_layer_of_experts_breaks_no_rule():
    assert not broken(lowered_mixture().compile().as_text())


def test_what_a_layer_of_experts_is_not_to_have(monkeypatch):
    """A top-k of all scores; a ragged dot off a TPU; a gradient of rows that is left to JAX."""
    monkeypatch.setattr(ragged, "require_tpu", lambda platform: None)
    assert "sorted_scores" in broken(lowered_mixture(routing="reference").compile().as_text())
    by_take = lambda x, order, K, **_: x[order.order_R // K]  # noqa: E731
    assert broken(lowered_mixture(dispatched=by_take).compile().as_text()).keys() == {"scattered_sums"}
    (told,) = broken(lowered_mixture(grouped="ragged").compile().as_text()).items()
    assert told == ("dense_experts", "multiplies 10.7 times as much as a whole layer needs forward")


@pytest.mark.slow
def test_the_step_of_a_mixture_breaks_no_rule():
    """With experts over two of four devices."""
    shape = moe.Config(vocabulary=512, layers=2, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=128)
    shape = dataclasses.replace(shape, expert_mlp=32, aux_loss=1e-2, bias_rate=1e-3)
    mesh = dict(zip(AXES, (1, 2, 2, 1), strict=True))
    text = tiny.make((1, 2, 1, 2), of=shape, loop="scan").compiled.as_text()
    flops = facts.facts(shape, "float32").matmul_flops_per_token / shape.layers
    how = {"mesh": mesh, "train": {"rows": tiny.ROWS, "microbatches": 1}}
    for rule in (*EXPERTS_RULES, "collectives", "loops", "not_donated", "attention_again"):
        assert not findings(text, rule, flops=flops, **how, data={"sequence": tiny.SEQUENCE}), rule


@pytest.mark.compiles_for("cuda")
@pytest.mark.parametrize("grouped", ["xla", "mosaic_gpu", "ragged"])
def test_a_layer_of_experts_compiled_for_a_gpu(grouped, monkeypatch):
    """XLA has no ragged dot there, and multiplies all rows with all experts' matrices."""
    monkeypatch.setattr(ragged, "require_tpu", lambda platform: None)
    how = {"times": 16, "platforms": ("cuda",), "grouped": grouped, "platform": "gpu"}
    text = aot.compile_for(lowered_mixture(jnp.bfloat16, **how), aot.TARGETS["h200"]).hlo
    assert broken(text, 16).keys() == ({"dense_experts"} if grouped == "ragged" else set())
