"""Mixtures trained with experts in float8: as well as without, in every way that a step is made."""

import jax
import numpy as np
import pytest
import tiny

from jaxthru.engine.offload import OffloadConfig
from jaxthru.models import fp8, moe
from jaxthru.models.lora import LoraConfig
from jaxthru.runtime import aot
from pallas_kernels.dispatch import assumed

FLOAT8 = ("float8", "float8_experts")
MIXTURE = moe.Config(
    **{"vocabulary": tiny.VOCABULARY, "layers": 2, "embed": 64, "heads": 2, "kv_heads": 1, "head_dim": 16},
    **{"experts": 4, "top_k": 2, "expert_mlp": 64},
)


def losses(steps: int = 2, float8: bool = True, offload: OffloadConfig | None = None, **settings):
    made = tiny.make(of=MIXTURE, ops=FLOAT8 * float8, **settings)
    if offload is None:
        return made.losses(steps)
    compiled, state = tiny.dispatched(made, offload)
    found = []
    for index in range(steps):
        state, metrics = compiled(state, made.batch(index))
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.slow(minutes=0.3)
def test_a_small_mixture_learns_as_well():
    plain, float8 = losses(40, float8=False), losses(40)
    assert np.mean(plain[-8:]) < plain[0] - 1 and float8 != plain
    assert np.mean(float8[-8:]) == pytest.approx(np.mean(plain[-8:]), rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        {"remat": "projections", "loop": "unroll"},
        {"remat": "full", "loop": "scan", "microbatches": 2},
        {"remat": "projections", "loop": "unroll", "offload": OffloadConfig("parameters")},
    ],
    ids=["remat", "micro-batches", "offload"],
)
def test_every_way_of_training_gives_the_same_losses(way):
    """Micro-batches have scales of their own, which are powers of two."""
    np.testing.assert_allclose(losses(**way), losses(loop="unroll"), rtol=2e-3)


@pytest.mark.slow
def test_adapters_train_beside_frozen_experts_in_float8():
    made = tiny.make(of=MIXTURE, ops=FLOAT8, adapters=LoraConfig(rank=2))
    first, *_, last = made.losses(6)
    assert last < first


@pytest.mark.slow
@pytest.mark.compiles_for("cuda")
def test_all_three_products_compile_for_hopper():
    """Both in float8 and the sums, a kernel each, with what quantises around them."""
    arrays = ((4096, 1024), "bfloat16"), ((8, 1024, 1536), "bfloat16"), ((8,), "int32")
    x, w, sizes = (jax.ShapeDtypeStruct(*each) for each in arrays)

    def both(x, w, sizes):
        y, pullback = jax.vjp(lambda x, w: fp8.grouped(x, w, sizes, "mosaic_gpu"), x, w)
        return y, pullback(y)

    with assumed("gpu"):
        lowered = aot.lower(jax.jit(both), x, w, sizes)
    assert lowered.as_text().count("@mosaic_gpu_v2") == 3
    aot.compile_for(lowered, aot.TARGETS["h200"])
