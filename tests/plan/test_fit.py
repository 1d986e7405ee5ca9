"""What is refused before any data is prepared."""

import dataclasses
import json

import jax
import pytest

from jaxthru import config as configuration
from jaxthru.build.checks import check_sizes, setting_behind, validate
from jaxthru.build.memory_estimate import layout_of
from jaxthru.build.step import chain_of
from jaxthru.runtime.errors import InputError
from pallas_kernels import collective_matmul, grouped_matmul, linear_cross_entropy, rms_norm, routing
from pallas_kernels.dispatch import Unsupported


def test_bfloat16_on_several_cpu_devices_is_refused_where_xla_would_abort():
    config = configuration.load("configs/quickstart.py", ["precision.compute=bfloat16", "train.rows=8"])
    validate(config, jax.devices()[:1])
    with pytest.raises(InputError, match=r"precision.compute = 'bfloat16': on 2 CPU devices .* 'float32'"):
        validate(config, jax.devices()[:2])


@pytest.mark.parametrize(
    ("operation", "function", "setting"),
    [
        (rms_norm, "rms_norm_rotary", "kernels.rms_norm = 'triton'"),
        (rms_norm, None, "kernels.rms_norm = 'triton'"),
        (collective_matmul, "matmul_reduce_scatter", "kernels.collective_matmul = 'ring'"),
        (linear_cross_entropy, None, "kernels.linear_cross_entropy = 'auto'"),
        (routing, "sort_assignments", "kernels.routing = 'xla'"),
        (grouped_matmul, "grouped_outer", "kernels.grouped_matmul = 'auto'"),
    ],
)
def test_a_refusal_names_the_setting_that_asked(operation, function, setting):
    settings = ["kernels.rms_norm=triton", "kernels.collective_matmul=ring", "kernels.routing=xla"]
    config = configuration.load("configs/quickstart.py", settings)
    none = dataclasses.replace(operation.OPERATION, automatic=lambda **_: ())
    with pytest.raises(Unsupported) as refused:
        none.run(implementation=None, platform="cpu", function=function)
    assert setting_behind(config, refused.value) == setting


def test_tokens_that_do_not_divide_over_tensor_are_refused():
    settings = ["mesh.tensor=2", "mesh.fsdp=1", "train.rows=3", "data.sequence=255"]
    config = configuration.load("configs/quickstart.py", settings)
    with pytest.raises(InputError) as refused:
        validate(config, jax.devices()[:2])
    assert str(refused.value) == (
        "train.rows / train.microbatches × data.sequence = 765: must be a multiple of mesh.tensor = 2"
    )
    even = configuration.load("configs/quickstart.py", [*settings, "data.sequence=256"])
    validate(even, jax.devices()[:2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["mesh.expert=2"],
            "mesh.expert = 2: model.family = 'llama' has no experts to split; choose 1, and give the devices "
            "to mesh.fsdp",
        ),
        (
            ["model.family=moe", "model.experts=6", "mesh.expert=4"],
            "model.experts = 6: must be a multiple of mesh.expert = 4",
        ),
        (
            ["model.family=moe", "model.experts=16", "mesh.fsdp=1", "mesh.expert=-1"],
            "mesh.expert = 16: must be at most 8, each of which gathers the tokens of all; give the other "
            "devices to mesh.fsdp",
        ),
    ],
    ids=["no experts", "do not divide", "too many"],
)
def test_experts_that_cannot_be_split_are_refused(settings, message):
    config = configuration.load("configs/quickstart.py", ["train.rows=16", *settings])
    devices = 16 if "mesh.expert=-1" in settings else 8
    with pytest.raises(InputError) as refused:
        check_sizes(config, layout_of(config, devices))
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        (["precision.matmul=fp8"], "precision.matmul = 'fp8'"),
        (["lora.rank=4", "lora.base=fp8"], "lora.base = 'fp8'"),
        (["lora.rank=4", "lora.base=int8"], "lora.base = 'int8'"),
        (["lora.rank=4"], ""),
    ],
    ids=["fp8", "base fp8", "base int8", "adapters"],
)
def test_experts_that_eight_bits_leave_as_they_are_are_told(settings, asked, caplog):
    caplog.set_level("INFO", "jaxthru")
    mixture = ["model.family=moe", "precision.compute=float32", "train.rows=8", *settings]
    validate(configuration.load("configs/quickstart.py", mixture), jax.devices()[:1], "cpu")
    other = "; precision.matmul = 'fp8_experts' has them multiplied in float8, on Hopper"
    said = f"{asked}: experts stay in float32{other * ('fp8' in asked)}"
    assert [record.getMessage() for record in caplog.records] == [said] * bool(asked)
    caplog.clear()
    validate(
        configuration.load("configs/quickstart.py", ["train.rows=8", *settings]), jax.devices()[:1], "cpu"
    )
    assert not caplog.records


def test_adapters_of_experts_are_refused_and_those_of_attention_are_not():
    def chain(*targets: str):
        adapters = ["model.family=moe", "lora.rank=4", f"lora.targets={json.dumps(targets)}"]
        return chain_of(configuration.load("configs/quickstart.py", adapters))

    (block,) = {stage.name: stage for stage in chain("q_proj", "o_proj").layers}.values()
    assert {target.path for target in block.apply.targets} == {("attention", "query"), ("attention", "out")}
    with pytest.raises(
        InputError, match=r"lora.targets: 'gate_up' is of experts, which have no adapters; .*q_"
    ):
        chain("gate_up")


def test_additions_in_any_order_are_refused_where_repeats_are_to_be_exact():
    settings = [
        "kernels.collective_matmul=mosaic_gpu_adds",
        "mesh.fsdp=1",
        "train.rows=8",
        "train.deterministic=true",
        "model.heads=8",
        "model.kv_heads=4",
    ]
    two, four = (configuration.load("configs/quickstart.py", [*settings, f"mesh.tensor={t}"]) for t in (2, 4))
    validate(two, jax.devices()[:2], "gpu")
    with pytest.raises(InputError, match=r"'mosaic_gpu_adds': .* train.deterministic .* choose 'mosaic_gpu'"):
        validate(four, jax.devices()[:4], "gpu")


@pytest.mark.parametrize(
    ("settings", "processes", "message"),
    [
        ([], 2, "GPUs of one process copy to each other, found 2 processes; choose 'collectives'"),
        (["precision.matmul=fp8"], 1, "parameters are gathered in float8"),
        (["kernels.collective_matmul=none", "mesh.tensor=2", "mesh.fsdp=1"], 1, "XLA places what moves"),
    ],
    ids=["processes", "fp8", "none"],
)
def test_copies_where_none_would_be_made_are_refused(settings, processes, message, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    config = configuration.load("configs/quickstart.py", ["mesh.transfers=copies", "train.rows=8", *settings])
    with pytest.raises(InputError, match=f"mesh.transfers = 'copies': .*{message}"):
        validate(config, jax.devices()[:2], "gpu")
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    validate(configuration.load("configs/quickstart.py", ["mesh.transfers=copies", "train.rows=8"]))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("offload.level=optimizer", "with offload.level = 'optimizer', .* come and go with its programs"),
        ("precision.matmul=fp8", "with precision.matmul = 'fp8' matmuls take them in float8"),
    ],
)
def test_parameters_that_cannot_be_kept_are_refused(setting, message):
    settings = ["remat.keep_parameters=true", "remat.policy=full", "model.loop=unroll", setting]
    with pytest.raises(InputError, match=f"remat.keep_parameters = True: {message}"):
        validate(configuration.load("configs/quickstart.py", settings), jax.devices()[:1])
