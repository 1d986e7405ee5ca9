"""On a GPU: both passes are taken, nearly all kernels are known, and the clock has a source."""

import jax
import pytest
from runs import make_workplace

from jaxthru.profile.account import ledger
from jaxthru.runtime import nvml

pytestmark = pytest.mark.gpu

PROFILED = {"profile__at": 30, "profile__steps": 5, "train__steps": 80, "checkpoint__every": 0}
SHAPE = {
    "model__embed": 1024,
    "model__heads": 8,
    "model__kv_heads": 8,
    "model__head_dim": 128,
    "model__mlp": 4096,
    "model__layers": 4,
    "data__sequence": 1024,
    "precision__compute": "bfloat16",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_workplace(tmp_path_factory.mktemp("runs"), "cuda")


@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_the_ledger_of_a_gpu(place, loop):
    place.run(loop, model__loop=loop, **PROFILED, **SHAPE)
    folder = place.folder / loop / "profile" / "30"
    found = ledger.read(folder / "ledger.json")
    assert (folder / "attribution.hlo.txt").is_file() and found.window.attribution_seconds
    assert "command_buffer" not in (folder / "attribution.hlo.txt").read_text()
    assert found.seconds("unclassified") <= 0.01 * found.window.step_seconds
    assert found.seconds("dependency") <= 0.02 * found.window.step_seconds
    assert found.window.closure == pytest.approx(0, abs=max(0.02, 2 * found.window.noise))
    assert found.seconds("attention") > 0 and found.seconds("matmul") > 0
    assert found.clock.source in ("cupti", "nvml") and 200 < found.clock.mean_mhz < 2100
    assert found.matmul.flops == pytest.approx(found.matmul.model_flops, rel=0.02)
    seen = {(scope.layer, scope.phase) for scope in found.scopes}
    assert {("mlp", "forward"), ("mlp", "backward"), ("optimizer", "optimizer"), ("head", "loss")} <= seen


def test_nvml_and_jax_mean_the_same_gpus():
    library = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    own, named = jax.local_devices(), nvml.names(range(jax.local_device_count()))
    assert len(named) == len(own)
    if nvml.nvml():
        handles = [nvml.handle(library, name) for name in named]
        assert [library.nvmlDeviceGetName(each) for each in handles] == [each.device_kind for each in own]


def test_a_layered_step_on_a_gpu(place):
    offload = {"model__loop": "unroll", "remat__policy": "attention", "offload__level": "optimizer"}
    place.run("layered", **PROFILED, **SHAPE, **offload)
    found = ledger.read(place.folder / "layered" / "profile" / "30" / "ledger.json")
    assert found.seconds("unclassified") <= 0.01 * found.window.step_seconds
    assert found.memory.host_pinned_bytes > 0
    assert found.matmul.flops >= 0.98 * found.matmul.model_flops
