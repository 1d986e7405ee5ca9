"""One update: the right loss, the right gradients, and none from what is not finite."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import bind

from jaxthru.engine.gradients import squares
from jaxthru.engine.inline import InlineStep
from jaxthru.engine.inline import hidden as hidden_of
from jaxthru.engine.step import Step, TrainConfig, check_groups
from jaxthru.models.ops import Ops
from jaxthru.optim.optimizer import OptimConfig
from jaxthru.optim.schedules import make_schedule
from jaxthru.profile.read import hlo
from jaxthru.runtime import aot
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout
from pallas_kernels.linear_cross_entropy import xla as linear_cross_entropy


@pytest.fixture(scope="module")
def made():
    return tiny.make()


def run(made, batches, state=None):
    state = made.fresh() if state is None else state
    metrics = None
    for batch in batches:
        state, metrics = made.compiled(state, batch)
    return state, jax.device_get(metrics)


def assert_trees_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def test_metrics_say_what_the_batch_holds(made):
    batch = tiny.batch(0)
    _, metrics = run(made, [made.batch(0)])
    assert metrics["tokens"] == (batch["segment_ids"] > 0).sum()
    span = 0
    for row in batch["segment_ids"]:
        span += sum(int((row == i).sum()) ** 2 for i in (1, 2))
    assert metrics["attention_span"] == span
    for source in range(tiny.SOURCES):
        mask = batch["loss_mask"] * (batch["source"] == source)
        assert metrics["source_tokens"][source] == mask.sum()
    total = metrics["source_loss"].sum() / metrics["source_tokens"].sum()
    assert metrics["loss"] == pytest.approx(total, rel=1e-5)
    assert metrics["loss"] == pytest.approx(np.log(tiny.SHAPE.vocabulary), rel=0.05)


def test_the_update_is_clipped_adamw(made):
    """Against Optax called by hand on the plain gradient of the whole batch."""
    state, metrics = run(made, [made.batch(0)])
    params = made.fresh()["params"]
    weight = 1 / jnp.sum(made.batch(0)["loss_mask"])
    gradients = jax.jit(jax.grad(lambda p: made.loss(p, made.batch(0), weight)[0]))(params)
    norm = np.sqrt(sum(float(jnp.sum(jnp.square(g))) for g in jax.tree.leaves(gradients)))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 1, "nothing is clipped here"
    config = OptimConfig(learning_rate=1e-2)
    rate = float(make_schedule(config, 20)(0))
    assert metrics["learning_rate"] == pytest.approx(rate)
    for path, new in jax.tree_util.tree_flatten_with_path(state["params"])[0]:
        old, gradient = params, gradients
        for key in path:
            at = key.key if hasattr(key, "key") else key.idx
            old, gradient = old[at], gradient[at]
        gradient = np.asarray(gradient, np.float64) / norm
        decay = 0.0 if "norm" in jax.tree_util.keystr(path) else config.weight_decay
        # The first step of Adam: both moments' bias corrections cancel their decay.
        expected = old - rate * (gradient / (np.abs(gradient) + config.epsilon) + decay * old)
        moved = np.abs(gradient) > 1e-6  # below, the sign of a rounding error decides
        # How far, not where to: decay moves a norm by a tenth of a step, which is a thousandth of its 1.0.
        found, wanted = (np.asarray(each, np.float64) - old for each in (new, expected))
        np.testing.assert_allclose(found[moved], wanted[moved], rtol=5e-3, atol=1e-6)


@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_matrices_are_told_from_norms_and_linear_maps_have_two_sides(loop):
    layout = Layout(make_mesh(MeshConfig(), jax.devices()[:1]))
    shape = tiny.dataclasses.replace(tiny.SHAPE, loop=loop, qk_norm=True)
    found = bind(shape, Ops(layout, jnp.dtype(jnp.float32)), "none").weights
    for path, info in jax.tree_util.tree_flatten_with_path(found)[0]:
        name = jax.tree_util.keystr(path)
        assert info.decays == ("norm" not in name), name
        assert (info.role == "matrix") == ("layers" in name and "norm" not in name), name
    first = int(loop == "scan")  # dims are counted with that of stacked layers
    layer = tiny.layers(found) if loop == "scan" else tiny.layers(found)[1]
    sides = lambda info: (info.inputs, info.outputs)  # noqa: E731
    assert sides(layer["attention"]["query"]) == ((first,), (first + 1, first + 2))
    assert sides(layer["attention"]["out"]) == ((first, first + 1), (first + 2,))
    assert sides(layer["mlp"]["down"]) == ((first,), (first + 1,))


@pytest.mark.parametrize(
    ("microbatches", "groups", "shape"),
    [
        (8, 2, {"loop": "scan"}),
        (2, 4, {"loop": "unroll", "mesh": (1, 2, 2)}),
        (2, 4, {"loop": "unroll", "mesh": (2, 2, 1), "tied_embeddings": True}),
        (2, 4, {"loop": "scan", "mesh": (1, 2, 2)}),
    ],
    ids=str,
)
def test_micro_batches_add_up_to_the_batch(microbatches, groups, shape):
    made, parts = tiny.make(**shape), tiny.make(microbatches=microbatches, groups=groups, **shape)
    params, batch = made.fresh()["params"], made.batch(0)
    counts = np.asarray(jnp.sum(parts.step.split(batch["loss_mask"]), axis=(1, 2)))
    assert counts.max() > 1.2 * counts.min(), "equal micro-batches prove nothing"
    whole_sums, whole = made.gradients(params, batch)
    sums, gradients = parts.gradients(params, batch)
    assert_trees_close(gradients, whole, atol=1e-5, rtol=1e-5)
    assert_trees_close(sums, whole_sums, rtol=1e-5)


def test_steps_of_micro_batches_learn_as_whole_ones(made):
    parts = tiny.make(microbatches=2, groups=4)
    np.testing.assert_allclose(parts.losses(10), made.losses(10), atol=1e-4)


@pytest.mark.parametrize(
    "shape",
    [
        {"loop": "scan"},
        {"loop": "unroll"},
        pytest.param({"tied_embeddings": True}, marks=pytest.mark.slow),
        pytest.param({"float8": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layers_gradients_stay_in_the_compute_dtype(shape, request):
    """The very numbers that JAX gives in float32, and nowhere a float32 copy of stacked layers."""
    if "float8" in shape or "tied_embeddings" in shape:  # what is rounded depends on what XLA fuses
        request.getfixturevalue("bit_exact")
    made = tiny.make(compute="bfloat16", **shape)
    params, batch = made.fresh()["params"], made.batch(0)
    weight = 1 / jnp.sum(batch["loss_mask"])
    plain = jax.jit(jax.grad(lambda params: made.loss(params, batch, weight)[0]))(params)
    _, gradients = made.gradients(params, batch)
    assert_trees_close(jax.tree.map(lambda x: x.astype(jnp.float32), gradients), plain, rtol=0, atol=0)
    infos = jax.tree.leaves(made.step.model.weights)
    for (path, x), info in zip(jax.tree.leaves_with_path(gradients), infos, strict=True):
        narrow = info.decays and path[0].key == "layers"
        assert x.dtype == (jnp.bfloat16 if narrow else jnp.float32), jax.tree_util.keystr(path)
    if made.shape.loop == "scan":
        up = tiny.layers(params)["mlp"]["up"].shape
        made_by = jax.make_jaxpr(InlineStep(made.step).gradients)(params, batch).eqns
        stacked = {
            v.aval.dtype
            for e in made_by
            if e.primitive.name == "scan"
            for v in e.outvars
            if v.aval.shape == up
        }
        assert jnp.dtype(jnp.bfloat16) in stacked and jnp.dtype(jnp.float32) not in stacked


def test_micro_batch_k_takes_the_kth_slice_of_every_group():
    step = tiny.make(microbatches=2, groups=2).step
    rows = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32)[:, None], (8, 3))
    # Two groups of four rows: 0-3 and 4-7.
    np.testing.assert_array_equal(step.split(rows)[:, :, 0], [[0, 1, 4, 5], [2, 3, 6, 7]])


def jitted(made):
    """Returns the step as it is compiled: the state is taken over."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, made.abstract)
    return jax.jit(InlineStep(made.step), donate_argnums=0, out_shardings=(shardings, None))


def test_python_walks_through_the_update_of_one_layer_alone(monkeypatch):
    made, walked, update = tiny.make(loop="unroll", layers=4), [], Step.update
    monkeypatch.setattr(Step, "update", lambda *given, **named: walked.append(1) or update(*given, **named))
    assert jitted(made).trace(made.abstract, made.inputs) and len(walked) == 3  # of 1 layer of 4


@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_on_several_devices_gradients_are_put_in_order_before_the_update(loop):
    made, alone = tiny.make(mesh=(1, 2, 1), loop=loop), tiny.make(loop=loop)
    text = jitted(made).lower(made.abstract, made.inputs).as_text()
    ordered = re.findall(r"(%\w+) = stablehlo.custom_call @LayoutConstraint\(", text)
    assert len(ordered) == len(jax.tree.leaves(made.abstract["params"]))
    assert f"stablehlo.optimization_barrier {', '.join(ordered)} :" in text
    assert "LayoutConstraint" not in jitted(alone).lower(alone.abstract, alone.inputs).as_text()


@pytest.mark.compiles_for("cuda")
def test_the_update_on_several_gpus_copies_no_state():
    """Weights and moments, all in float32, are updated where they lie."""
    made = tiny.make(mesh=(1, 2, 1), loop="unroll", compute="bfloat16")
    lowered = aot.lower(jitted(made), made.abstract, made.inputs)
    text = aot.compile_for(lowered, aot.TARGETS["h200"], 2).hlo
    entry = text[text.index("\nENTRY ") :]
    entry = entry[: entry.index("\n}")]
    leaves = [leaf for leaf in jax.tree.leaves(made.abstract) if leaf.ndim > 1]
    least = min(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    copies = re.findall(r" = f32\[([\d,]+)\]\S* copy\(", entry)
    assert not [shape for shape in copies if math.prod(map(int, shape.split(","))) >= least]


@functools.cache
def kernels_for_a_gpu(loop: str) -> list[tuple[hlo.Instruction, list[hlo.Instruction], int]]:
    """Returns the kernels of a step that computes norms and activations again, what runs within each, and how
    often it does."""
    made = tiny.make(loop=loop, compute="bfloat16", remat="projections", layers=3, embed=128, mlp=256)
    chosen = made.step.model.compiler_options(platform="gpu")
    lowered = aot.lower(jitted(made), made.abstract, made.inputs)
    program = hlo.module(aot.compile_for(lowered, aot.TARGETS["h200"], chosen=chosen).hlo)
    found = program.instructions()
    kernels = [(kernel, times) for kernel, times in found if kernel.opcode not in hlo.CONTROL]
    return [(kernel, [one for one, _ in program.inner(kernel)], times) for kernel, times in kernels]


@pytest.mark.compiles_for("cuda")
def test_a_loop_over_layers_makes_no_matmul_twice():
    """As XLA would where a result is both read in the loop and stacked for the backward pass."""

    def matmuls(loop: str) -> int:
        inner = [(times, one.target) for _, within, times in kernels_for_a_gpu(loop) for one in within]
        return sum(times for times, target in inner if target.startswith("__cublas"))

    assert matmuls("scan") == matmuls("unroll") > 0


@pytest.mark.compiles_for("cuda")
def test_a_loop_over_layers_copies_no_matrix_from_its_stack():
    """In the backward pass, too, they are cast as they are read there."""
    slicing = {"parameter", "constant", "subtract", "bitcast", "dynamic-slice"}
    least = 128 * 2 * 16  # of keys
    made = {"cast": 0, "copied": 0}
    for kernel, within, _ in kernels_for_a_gpu("scan"):
        does = {one.opcode for one in within if one is not kernel}
        if "dynamic-slice" in does and "subtract" in does:  # a loop's way back
            large = [dtype for dtype, dims in kernel.shapes if math.prod(dims) >= least]
            made["cast"] += "convert" in does and does <= slicing | {"convert"} and large == ["bf16"]
            made["copied"] += does <= slicing and "f32" in large
    assert made == {"cast": 7, "copied": 0}  # of queries, keys, values, attention's output, gate, up, down


def test_groups_must_fit_the_mesh():
    check_groups(TrainConfig(rows=8, microbatches=2), groups=8, shards=4)
    check_groups(TrainConfig(rows=8, microbatches=1), groups=3, shards=8)
    with pytest.raises(InputError, match=r"data.groups = 2: .* must be a multiple of .* = 4"):
        check_groups(TrainConfig(rows=8, microbatches=2), groups=2, shards=4)


def test_what_is_not_finite_is_skipped_and_counted(made):
    good, _ = run(made, [made.batch(0)])
    kept = jax.tree.map(np.asarray, good)
    bad = made.batch(1) | {"segment_ids": made.batch(1)["segment_ids"] * 0 + jnp.arange(64)[None]}
    state, metrics = run(made, [bad], good)
    assert np.isnan(metrics["loss"])
    assert_trees_close(state["params"], kept["params"], rtol=0, atol=0)
    assert_trees_close(state["opt_state"], kept["opt_state"], rtol=0, atol=0)
    assert (state["step"], state["skipped"], state["skipped_in_a_row"]) == (2, 1, 1)
    state, metrics = run(made, [bad], state)
    assert metrics["skipped_in_a_row"] == 2
    state, metrics = run(made, [made.batch(2)], state)
    assert (metrics["skipped"], metrics["skipped_in_a_row"], state["step"]) == (2, 0, 4)
    # The schedule counts updates made, not steps tried.
    rate = float(make_schedule(OptimConfig(learning_rate=1e-2), 20)(1))
    assert metrics["learning_rate"] == pytest.approx(rate)
    assert np.isfinite(metrics["loss"])


def test_a_gradient_that_is_not_finite_is_skipped_under_a_finite_loss(made):
    """Layers of 1e37 that the last matrix of each multiplies by 0, and a steep head: the loss is that of a
    model without them, the gradient of that matrix overflows."""
    good, _ = run(made, [made.batch(0)])
    mlp, head = tiny.layers(good["params"])["mlp"], good["params"]["head"]
    mlp |= {"up": mlp["up"] * 1e37, "down": mlp["down"] * 0}
    head["matrix"] = head["matrix"] * 1e3
    kept = jax.tree.map(np.asarray, good)
    state, metrics = run(made, [made.batch(1)], good)
    assert np.isfinite(metrics["loss"]) and not np.isfinite(metrics["grad_norm"])
    for name in ("params", "opt_state", "grad_norm"):
        assert_trees_close(state[name], kept[name], rtol=0, atol=0)
    assert (state["step"], state["skipped"], metrics["skipped_in_a_row"]) == (2, 1, 1)


def reference_losses(hidden, matrix, targets):
    hidden, matrix = (np.asarray(x, np.float64) for x in (hidden, matrix))
    logits = np.einsum("btd,dv->btv", hidden.reshape(*targets.shape, -1), matrix)
    log_z = np.log(np.exp(logits).sum(-1))
    return log_z - np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0], log_z


def test_the_record_and_the_minimised_loss_are_the_plain_ones(made):
    """Against float64, with the masks and the sources of the batch."""
    objective, params, batch = made.step.objective, made.fresh()["params"], made.batch(0)
    weight = 1 / jnp.sum(batch["loss_mask"])
    minimised, sums = jax.jit(made.loss)(params, batch, weight)
    hidden = jax.jit(lambda params: hidden_of(objective.model, params, batch, 8))(params)
    losses, _ = reference_losses(hidden, objective.model.lm_head(params)[0], batch["targets"])
    losses = losses * np.asarray(batch["loss_mask"])
    assert float(minimised) == pytest.approx(losses.sum() * float(weight), rel=1e-5)
    assert float(sums["loss"]) == pytest.approx(losses.sum() * float(weight), rel=1e-5)
    for source in range(tiny.SOURCES):
        assert sums["source_loss"][source] == pytest.approx(
            losses[np.asarray(batch["source"]) == source].sum(), rel=1e-5
        )


def test_whole_logits_never_exist(monkeypatch):
    chunk, vocabulary = 128, tiny.SHAPE.vocabulary
    monkeypatch.setattr(linear_cross_entropy, "LOGITS_BYTES", chunk * vocabulary * 4)
    text = tiny.make.__wrapped__().compiled.as_text()
    assert f"[{chunk},{vocabulary}]" in text
    assert f"[{tiny.ROWS},{tiny.SEQUENCE},{vocabulary}]" not in text
    assert f"[{tiny.ROWS * tiny.SEQUENCE},{vocabulary}]" not in text


def test_z_loss_moves_the_gradient_not_the_record(made):
    with_z = tiny.make(z_loss=0.1)
    _, plain = run(made, [made.batch(0)])
    _, z = run(with_z, [with_z.batch(0)])
    assert z["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert z["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-3)
    objective, params = with_z.step.objective, with_z.fresh()["params"]
    batch = with_z.batch(0)
    weight = 1 / jnp.sum(batch["loss_mask"])
    minimised, sums = jax.jit(with_z.loss)(params, batch, weight)
    hidden = jax.jit(lambda params: hidden_of(objective.model, params, batch, 8))(params)
    _, log_z = reference_losses(hidden, objective.model.lm_head(params)[0], batch["targets"])
    expected = 0.1 * np.sum(np.square(log_z) * np.asarray(batch["loss_mask"])) * float(weight)
    assert float(minimised - sums["loss"]) == pytest.approx(expected, rel=1e-3)


def rates(steps, **config):
    schedule = make_schedule(OptimConfig(learning_rate=1.0, **config), steps)
    return np.array([float(schedule(jnp.asarray(i, jnp.int32))) for i in range(steps)])


def test_schedules():
    cosine = rates(100, schedule="cosine", warmup_ratio=0.1, final_ratio=0.1)
    np.testing.assert_allclose(cosine[:10], np.arange(1, 11) / 10, rtol=1e-5)
    # Step 100, one beyond the last, would be at the final rate.
    np.testing.assert_allclose(cosine[10:], 0.55 + 0.45 * np.cos(np.pi * np.arange(90) / 90), rtol=1e-5)
    wsd = rates(100, schedule="wsd", warmup_ratio=0.1, decay_ratio=0.2, final_ratio=0.2)
    np.testing.assert_allclose(wsd[:10], np.arange(1, 11) / 10, rtol=1e-5)
    assert (wsd[10:80] == 1).all()
    np.testing.assert_allclose(wsd[80:], 1 - 0.8 * np.arange(20) / 20, rtol=1e-5)
    assert (rates(10, schedule="constant", warmup_ratio=0.0) == 1).all()
    assert rates(1, schedule="cosine")[0] > 0


def test_a_part_of_which_nothing_trains_adds_nothing_to_the_norm():
    nothing, some = squares({"scale": None}), squares({"matrix": jnp.full((2, 3), 2, jnp.bfloat16)})
    assert nothing.dtype == some.dtype == jnp.float32 and (nothing, some) == (0, 24)
