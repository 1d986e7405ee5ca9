"""The table of logical axes, and meshes that fit the devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxthru.runtime import hardware
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.mesh import AXES, MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout, check_divisible


def layout(*shape):
    return Layout(make_mesh(MeshConfig(*shape)))


def test_a_mesh_axis_serves_one_dim_and_batch_comes_first():
    full = layout(2, 2, 2)
    assert full.spec(("batch", "sequence", "embed")) == P(("data", "fsdp"), None, None)
    assert full.spec(("tokens", "embed")) == P(("data", "fsdp", "tensor"), None)
    assert full.spec(("batch", "mlp")) == P(("data", "fsdp"), "tensor")
    assert full.spec(("embed", "heads", "head_dim")) == P("fsdp", "tensor", None)
    assert full.spec(("heads", "head_dim", "embed")) == P("tensor", None, "fsdp")
    assert full.spec(("vocab", "embed"), without=("fsdp",)) == P("tensor", None)
    assert full.spec((None,)) == P(None)
    assert full.spec(("layers", "embed", "mlp")) == P(None, "fsdp", "tensor")
    assert full.spec(("sequence", "batch")) == P(None, ("data", "fsdp"))


def test_axes_of_one_device_are_not_named():
    assert layout(1, 8, 1).spec(("batch", "sequence", "heads")) == P("fsdp", None, None)
    assert layout(8, 1, 1).spec(("embed", "mlp")) == P(None, None)
    assert layout(1, 4, 2).live_axes == ("fsdp", "tensor")


def test_constrain_lays_an_array_out():
    made = layout(2, 4, 1)
    x = jax.jit(lambda: made.constrain(jnp.zeros((8, 4)), ("batch", "embed")))()
    assert x.sharding.spec == P(("data", "fsdp"), None) or x.sharding.spec == P(("data", "fsdp"))
    assert x.addressable_shards[0].data.shape == (1, 4)


@pytest.mark.parametrize(
    ("config", "devices", "shape"),
    [
        (MeshConfig(), 8, (1, 8, 1, 1)),
        (MeshConfig(data=-1, fsdp=2), 8, (4, 2, 1, 1)),
        (MeshConfig(2, 2, 2), 8, (2, 2, 1, 2)),
        (MeshConfig(fsdp=1, tensor=-1), 1, (1, 1, 1, 1)),
        (MeshConfig(expert=2), 8, (1, 4, 2, 1)),
        (MeshConfig(fsdp=1, expert=-1), 8, (1, 1, 8, 1)),
    ],
)
def test_meshes(config, devices, shape):
    assert config.shape(devices) == dict(zip(AXES, shape, strict=True))


@pytest.mark.parametrize(
    ("config", "devices", "message"),
    [
        (MeshConfig(1, 4, 1), 8, "mesh.data=1, fsdp=4, expert=1, tensor=1: needs 4 devices, found 8"),
        (MeshConfig(3, -1, 1), 8, "needs a multiple of 3 devices, found 8"),
        (MeshConfig(fsdp=1, expert=-1), 16, "mesh.expert = 16: must be at most 8, each of which"),
    ],
)
def test_meshes_that_do_not_fit(config, devices, message):
    with pytest.raises(InputError, match=message):
        config.shape(devices)


def test_experts_are_split_over_their_axis_and_all_else_is_data_there():
    made = Layout(make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2)))
    assert made.spec(("batch", "sequence")) == P(("fsdp", "expert"), None)
    assert made.spec(("tokens", "embed")) == P(("fsdp", "expert", "tensor"), None)
    assert made.spec(("experts", "embed", None, "mlp")) == P("expert", "fsdp", None, "tensor")
    assert made.spec(("experts", "mlp", "embed"), without=("fsdp",)) == P("expert", "tensor", None)
    assert made.spec(("embed", "mlp")) == P("fsdp", "tensor")
    with pytest.raises(InputError, match=r"mesh.expert = 9: must be at most 8, .* give .* to mesh.fsdp"):
        MeshConfig(expert=9)
    with pytest.raises(InputError, match=r"mesh.expert_chunks = 0: must be at least 1, or None"):
        MeshConfig(expert_chunks=0)
    with pytest.raises(
        InputError, match=r"mesh.place_experts_every = -1: must be at least 0, which is never"
    ):
        MeshConfig(place_experts_every=-1)
    with pytest.raises(InputError, match=r"model.experts = 3: must be a multiple of mesh.expert = 2"):
        check_divisible(made, {"model.experts": ("experts", 3)})


def test_tokens_go_to_experts_in_the_parts_that_are_asked_for_or_usual():
    shapes = (2, 1), (1, 2), (2, 2), (8, 1)
    assert [MeshConfig().chunks(*shape) for shape in shapes] == [1, 2, 2, 2]
    assert [MeshConfig(expert_chunks=3).chunks(*shape) for shape in shapes] == [3] * 4


def test_what_does_not_divide_is_named():
    check_divisible(layout(2, 2, 2), {"model.heads": ("heads", 4)})
    with pytest.raises(InputError, match=r"model.heads = 3: must be a multiple of mesh.tensor = 2"):
        check_divisible(layout(2, 2, 2), {"model.heads": ("heads", 3)})
    with pytest.raises(InputError, match=r"train.rows = 6: must be a multiple of mesh.data × mesh.fsdp = 4"):
        check_divisible(layout(2, 2, 2), {"train.rows": ("batch", 6)})


class Device:
    def __init__(self, kind):
        self.device_kind = kind


def test_memory_is_unified_beside_grace():
    shared = ("NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e", "NVIDIA GB200", "NVIDIA GB300")
    assert all(map(hardware.has_unified_memory, shared))
    assert not any(map(hardware.has_unified_memory, ("NVIDIA H200", "NVIDIA B200", "cpu", "TPU v5p")))


def test_peaks_by_data_sheet():
    assert hardware.peak_flops([Device("NVIDIA H200")] * 2) == 2 * 989.5e12
    assert hardware.peak_flops([Device("NVIDIA H100 PCIe")]) == 756e12
    assert hardware.peak_flops([Device("NVIDIA GB200")]) == 2500e12
    assert hardware.peak_flops([Device("TPU v5 lite")]) == 197e12
    assert hardware.peak_flops([Device("TPU v5p")]) == 459e12
    assert hardware.peak_flops([Device("TPU7x")] * 2) == 2307e12  # the two of one chip
    assert hardware.peak_flops([Device("NVIDIA H200"), Device("cpu")]) is None
    assert hardware.peak_flops([Device("NVIDIA H200 NVL")]) == 835e12
    assert hardware.peak_flops([Device("NVIDIA A100-SXM4-80GB")]) == 312e12
    assert hardware.peak_flops([Device("NVIDIA RTX A1000 Laptop GPU")]) is None
