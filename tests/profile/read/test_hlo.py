import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import tiny
from jax.sharding import AxisType, PartitionSpec

from jaxthru.models import llama, scopes
from jaxthru.profile.account.attribution import PROGRAMS, Attribution, layer_and_phase
from jaxthru.profile.account.build import matmul
from jaxthru.profile.account.ledger import Clock
from jaxthru.profile.read import hlo
from jaxthru.profile.read.buffers import CATEGORIES
from jaxthru.runtime import aot
from jaxthru.runtime.sharding import LOGICAL_AXIS_RULES
from pallas_kernels.collective_matmul import hopper

TOKENS = tiny.ROWS * tiny.SEQUENCE
ATTENTION = 6 * tiny.SHAPE.layers * tiny.SHAPE.heads * tiny.SHAPE.head_dim * tiny.ROWS * tiny.SEQUENCE**2


def attributed(**settings) -> Attribution:
    return Attribution(hlo.modules(tiny.make(**settings).compiled.as_text()))


@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_flops_are_those_that_the_model_needs(loop):
    found = attributed(loop=loop)
    needed = 6 * llama.matmul_parameters(tiny.SHAPE) * TOKENS
    assert found.flops("matmul") == pytest.approx(needed, rel=0.01)
    # The portable attention multiplies the whole square, of which a causal mask leaves half.
    assert found.flops("attention") / 2 == pytest.approx(ATTENTION, rel=0.01)
    both = found.flops("matmul") + found.flops("attention") / 2
    assert both == pytest.approx(llama.train_flops(tiny.SHAPE, TOKENS, tiny.ROWS * 64**2), rel=0.01)


def test_what_is_computed_again_is_told_apart():
    plain, again = attributed(loop="scan"), attributed(loop="scan", remat="full")
    by_phase = dict.fromkeys(("forward", "backward", "recomputation", "loss"), 0.0)
    for work in again.all():
        if work.flops:
            by_phase[work.phase] += work.flops * work.runs
    more = sum(again.flops(line) - plain.flops(line) for line in ("matmul", "attention"))
    assert by_phase["recomputation"] == pytest.approx(more, rel=0.01)
    assert by_phase["backward"] == pytest.approx(2 * by_phase["forward"], rel=0.05)


def test_loops_over_layers_carry_the_models_scope():
    """What they make beside their bodies, such as stacks of what is saved, too."""
    found = attributed(loop="scan")
    loops = [work for work in found.all() if work.instruction.opcode == "while" and work.phase != "loss"]
    over_layers = [work for work in loops if work.instruction.trip_count == tiny.SHAPE.layers]
    assert {work.phase for work in over_layers} == {"forward", "backward"}
    assert all(hlo.within(work.op_name, scopes.MODEL) for work in over_layers)
    bodies = {name for work in over_layers for name in work.instruction.calls}
    inside = [
        work
        for work in found.all()
        if found.modules[work.module].where[work.instruction.name] in bodies and "/" in work.op_name
    ]
    assert len(inside) > 20 and all(hlo.within(work.op_name, scopes.MODEL) for work in inside)
    assert not [work.op_name for work in inside if work.phase == "other"]


def test_shards_do_their_part():
    whole, part = attributed(loop="scan"), attributed(loop="scan", mesh=(1, 2, 2))
    assert part.flops("matmul") * 4 == pytest.approx(whole.flops("matmul"), rel=0.01)
    kinds = {work.collective for work in part.all()}
    assert {"all-gather", "all-reduce", "reduce-scatter"} <= kinds
    assert all(work.line == "exposed_communication" for work in part.all() if work.collective)


def test_instructions_say_where_they_come_from():
    found = attributed(loop="unroll")
    sources = {work.source for work in found.all() if work.line == "matmul"}
    assert any(source.startswith("jaxthru/models/ops.py:") for source in sources)
    layers = {work.layer for work in found.all()}
    assert {"attention", "mlp", "norm", "embedding", "head", "optimizer"} <= layers


@pytest.mark.parametrize(
    ("op_name", "module", "expected"),
    [
        ("jit(train_step)/jvp(model)/while/body/attention/norm/mul", "jit_train_step", ("norm", "forward")),
        ("jit(train_step)/transpose(jvp(model))/mlp/dot", "jit_train_step", ("mlp", "backward")),
        (
            "jit(train_step)/transpose(jvp(model))/checkpoint/rematted_computation/mlp/dot",
            "jit_train_step",
            ("mlp", "recomputation"),
        ),
        ("jit(train_step)/jvp(loss)/while/body/dot", "jit_train_step", ("head", "loss")),
        ("jit(train_step)/model/forward/while/body/copy", "jit_train_step", ("other", "forward")),
        ("jit(train_step)/model/forward/while/body/jvp(model)/mlp/dot", "jit_train_step", ("mlp", "forward")),
        ("jit(train_step)/while/body/model/backward/while", "jit_train_step", ("other", "backward")),
        (
            "jit(train_step)/model/backward/while/body/jvp(model)/mlp/convert",
            "jit_train_step",
            ("mlp", "recomputation"),
        ),
        (
            "jit(train_step)/model/backward/while/body/transpose(jvp(model))/mlp/dot",
            "jit_train_step",
            ("mlp", "backward"),
        ),
        ("jit(train_step)/optimizer/mul", "jit_train_step", ("optimizer", "optimizer")),
        ("jit(train_step)/reduce_sum", "jit_train_step", ("other", "other")),
        ("jit(backward)/jvp(jvp())/mlp/mul", "jit_backward", ("mlp", "recomputation")),
        ("jit(backward)/transpose(jvp(jvp()))/mlp/mul", "jit_backward", ("mlp", "backward")),
        ("jit(update_layer)/mul", "jit_update_layer", ("optimizer", "optimizer")),
        (
            "jit(forward)/jvp(jvp())/attention/dot_product_attention/x",
            "jit_forward",
            ("attention", "forward"),
        ),
    ],
)
def test_layers_and_phases(op_name, module, expected):
    assert layer_and_phase(op_name, module) == expected


@pytest.mark.parametrize(
    ("op_name", "module", "expected"),
    [
        ("jit(train_step)/jvp(model)/mlp/experts/dot", "jit_train_step", ("experts", "forward")),
        ("jit(train_step)/transpose(jvp(model))/experts/mlp/dot", "jit_train_step", ("mlp", "backward")),
        ("jit(backward__moe)/jvp(jvp())/dot", "jit_backward__moe", ("other", "recomputation")),
        (
            "jit(backward__moe)/transpose(jvp(jvp()))/experts/dot",
            "jit_backward__moe",
            ("experts", "backward"),
        ),
    ],
)
def test_layers_by_scopes_of_the_models_own(op_name, module, expected):
    """And in programs of a kind of block: "backward__moe"."""
    assert layer_and_phase(op_name, module, ["experts"]) == expected
    assert layer_and_phase(op_name, module)[0] in (expected[0], "mlp", "other")


def test_what_reads_programs_has_the_names_of_those_that_there_are():
    named = {value for name, value in vars(scopes).items() if name.isupper() and isinstance(value, str)}
    assert set(PROGRAMS) <= named and set(scopes.PURPOSES.values()) <= named
    assert set(scopes.EXCHANGES) <= named and set(scopes.EXCHANGES.values()) <= set(LOGICAL_AXIS_RULES)
    assert set(scopes.PURPOSES) <= set(CATEGORIES)


# Lines are joined where they end with a backslash: HLO has an instruction a line.
GPU = r"""HloModule jit_train_step, is_scheduled=true

FileNames
1 "/home/a/jaxthru/models/ops.py"
2 "/usr/lib/site-packages/jax/x.py"

FunctionNames
1 "project"

FileLocations
1 {file_name_id=1 function_name_id=1 line=72 end_line=72 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%gathering (p.1: bf16[64,32]) -> bf16[128,32] {
  %p.1 = bf16[64,32]{1,0} parameter(0)
  ROOT %all-gather.9 = bf16[128,32]{1,0} all-gather(%p.1), dimensions={0}
}

%inside (p.2: bf16[16,128], p.3: bf16[128,32]) -> bf16[16,32] {
  %p.2 = bf16[16,128]{1,0} parameter(0)
  %p.3 = bf16[128,32]{1,0} parameter(1)
  ROOT %dot.1 = bf16[16,32]{1,0} dot(%p.2, %p.3), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p.4: (s32[], bf16[16,128])) -> (s32[], bf16[16,128]) {
  %p.4 = (s32[], /*index=1*/bf16[16,128]{1,0}) parameter(0)
  %x = bf16[16,128]{1,0} get-tuple-element(%p.4), index=1
  %w = bf16[128,128]{1,0} constant({...})
  %gemm.1 = (bf16[16,128]{1,0}, s8[4096]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", \
    backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}, \
    metadata={op_name="jit(train_step)/jvp(model)/while/body/mlp/dot" stack_frame_id=2}
  %y = bf16[16,128]{1,0} get-tuple-element(%gemm.1), index=0
  %i = s32[] get-tuple-element(%p.4), index=0
  ROOT %t = (s32[], bf16[16,128]{1,0}) tuple(%i, %y)
}

%cond (p.5: (s32[], bf16[16,128])) -> pred[] {
  %p.5 = (s32[], bf16[16,128]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: bf16[64,32], b: (s32[], bf16[16,128]), q: bf16[2,256,4,16]) -> bf16[16,32] {
  %a = bf16[64,32]{1,0:T(8,128)S(5)} parameter(0), metadata={op_name="state[\'params\']"}
  %b = (s32[], bf16[16,128]{1,0}) parameter(1)
  %q = bf16[2,256,4,16]{3,2,1,0} parameter(2)
  %all-gather-start.1 = (bf16[64,32]{1,0}, bf16[128,32]{1,0}) all-gather-start(%a), dimensions={0}
  %all-gather-done.1 = bf16[128,32]{1,0} all-gather-done(%all-gather-start.1)
  %async-start.1 = ((bf16[64,32]{1,0}), bf16[128,32]{1,0}, u32[]) async-start(%a), calls=%gathering
  %async-done.1 = bf16[128,32]{1,0} async-done(%async-start.1)
  %while.1 = (s32[], bf16[16,128]{1,0}) while(%b), condition=%cond, body=%body, \
    backend_config={"known_trip_count":{"n":"5"}}
  %z = bf16[16,128]{1,0} get-tuple-element(%while.1), index=1
  %fmha.1 = (bf16[2,256,4,16]{3,2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), \
    custom_call_target="__cudnn$fmhaSoftmax", \
    metadata={op_name="jit(train_step)/jvp(model)/attention/dot_product_attention/x" stack_frame_id=1}
  %fmha.2 = (bf16[2,256,4,16]{3,2,1,0}, bf16[2,256,4,16]{3,2,1,0}, bf16[2,256,4,16]{3,2,1,0}) \
    custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxBackward", \
    metadata={op_name="jit(train_step)/transpose(jvp(model))/attention/dot_product_attention/x"}
  %copy-start.1 = (bf16[16,128]{1,0}, bf16[16,128]{1,0:S(5)}, u32[]) copy-start(%z)
  ROOT %gemm_fusion.1 = bf16[16,32]{1,0} fusion(%z, %all-gather-done.1), kind=kCustom, calls=%inside, \
    backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
}
// %all-gather-start.1 wraps %all-gather.4.1
// %async-start.1 wraps %loop_add_fusion.2
""".replace("\\\n   ", "")


def test_what_a_gpus_hlo_writes():
    module = hlo.module(GPU)
    found = Attribution({module.name: module})
    work = lambda name: found.find("jit_train_step", name)  # noqa: E731
    assert module.entry == "main" and module.runs["body"] == 5
    for name in ("all-gather-start.1", "all-gather-done.1", "async-start.1", "async-done.1"):
        assert work(name).collective == "all-gather" and work(name).line == "exposed_communication"
        assert work(name).bytes == pytest.approx(2 * 128 * 32, abs=8192 if "done" in name else 4)
    assert work("gemm.1").line == "matmul" and work("gemm.1").runs == 5
    assert work("gemm.1").flops == 2 * 16 * 128 * 128
    assert work("gemm.1").source == "jaxthru/models/ops.py:72"  # not the library's line within
    assert work("gemm_fusion.1").flops == 2 * 16 * 128 * 32
    assert found.of_kernel("gemm_fusion_1").instruction.name == "gemm_fusion.1"
    forward, backward = work("fmha.1"), work("fmha.2")
    assert forward.line == backward.line == "attention"
    assert forward.flops == 2 * 2 * 256**2 * 4 * 16 and backward.flops == 2 * forward.flops
    assert work("all-gather.4.1").instruction is work("all-gather-start.1").instruction
    assert found.of_kernel("loop_add_fusion_2").instruction.name == "async-start.1"
    assert work("copy-start.1").line == "exposed_host_copies"
    assert work("a").op_name == "state['params']" and work("nothing") is None
    assert found.flops("matmul") == 5 * work("gemm.1").flops + work("gemm_fusion.1").flops
    assert hlo.size(("s4", (6,))) == 3 and hlo.size(("f8e4m3fn", (6,))) == 6


@pytest.mark.compiles_for("cuda")
def test_what_a_gpus_trace_calls_a_collective():
    """It goes by the name of what its asynchronous instruction wraps, which XLA's text does not have."""
    mesh = jax.make_mesh((2,), ("fsdp",), (AxisType.Auto,))
    split = jax.shard_map(
        lambda x, w: (jax.lax.all_gather(x, "fsdp", tiled=True), x @ w),
        mesh=mesh,
        in_specs=(PartitionSpec("fsdp"), PartitionSpec()),
        out_specs=(PartitionSpec(), PartitionSpec("fsdp")),
        check_vma=False,
    )
    arguments = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 4096), (4096, 4096)))
    module = hlo.module(aot.compile_for(aot.lower(jax.jit(split), *arguments), aot.TARGETS["h200"], 2).hlo)
    found = Attribution({module.name: module})
    (name,) = (name for name in module.wrapped if "gather" in name)
    work = found.find(module.name, name)
    assert (work.collective, work.instruction.opcode) == ("all-gather", "all-gather-start")
    assert work.bytes == 2 * 8192 * 4096 and work.instruction.groups == [[0, 1]]


FUSED = """HloModule jit_train_step, is_scheduled=true

ENTRY %main (x: bf16[2048,4096], y: bf16[4096,8192]) -> bf16[2048,512] {
  %x = bf16[2048,4096]{1,0} parameter(0)
  %w = bf16[4096,1024]{1,0} parameter(1)
  %y = bf16[4096,8192]{1,0} parameter(2)
  %v = bf16[8192,512]{1,0} parameter(3)
  %f = s32[16]{0} parameter(4)
  %a.1 = (bf16[4096,1024]{1,0}, bf16[4096,1024]{1,0}, bf16[4096,4096]{1,0}, s32[16]{0}) \
    custom-call(%x, %w, %w, %f), custom_call_target="mosaic_gpu_v2", \
    metadata={op_name="jit(train_step)/jvp(model)/mlp/shard_map/jit(GATHER)/body/mpmd_map"}
  %z = bf16[2048,512]{1,0} broadcast(%zero), dimensions={}
  %c.1 = (bf16[4096,4096]{1,0}, bf16[2048,512]{1,0}, s32[65]{0}) \
    custom-call(%y, %v, %x, %z, %f), custom_call_target="mosaic_gpu_v2", \
    output_to_operand_aliasing={{1}: (3, {}), {2}: (4, {})}, \
    metadata={op_name="jit(train_step)/transpose(jvp(model))/mlp/shard_map/jit(SCATTER)/body/mpmd_map"}
  ROOT %b.1 = (bf16[2048,512]{1,0}, bf16[1,2048,512]{2,1,0}, bf16[4096,4096]{1,0}, s32[257]{0}) \
    custom-call(%y, %v, %x, %f), custom_call_target="mosaic_gpu_v2", \
    output_to_operand_aliasing={{3}: (3, {})}, \
    metadata={op_name="jit(train_step)/transpose(jvp(model))/mlp/shard_map/jit(SCATTER)/body/mpmd_map"}
}
""".replace("\\\n   ", "")


def test_kernels_that_communicate_and_multiply():
    """As XLA writes them for two H200s. The scatters gather their odd operand beside the product; one adds to
    zeros, which are an operand too."""
    names = {"GATHER": hopper.gather_matmul.__name__, "SCATTER": hopper.matmul_scatter.__name__}
    module = hlo.module(re.sub("GATHER|SCATTER", lambda found: names[found[0]], FUSED))
    found = Attribution({module.name: module})
    gather, scatter, adds = (found.find("jit_train_step", name) for name in ("a.1", "b.1", "c.1"))
    assert gather.line == scatter.line == adds.line == "collective_matmul"
    assert adds.flops == scatter.flops
    assert gather.flops == 2 * 2 * 4096 * 4096 * 1024 and scatter.flops == 2 * 4096 * 8192 * 512
    assert (gather.phase, scatter.phase, gather.layer) == ("forward", "backward", "mlp")
    assert found.flops("matmul") == 0
    # What the model needs and these kernels multiply takes no part of the line "matmul".
    collected = {"devices": 2, "peak_flops": 1e12, "device_kind": "NVIDIA H200"}
    done = 2 * (gather.flops + scatter.flops + adds.flops)
    split = matmul(SimpleNamespace(attribution=found, runs=None), 0.0, done, collected, Clock())
    assert (split.flops, split.model_flops, split.ideal_seconds, split.recomputation_seconds) == (
        done,
        done,
        0,
        0,
    )


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups=mesh['data'=1,'fsdp'=2,'tensor'=2] {'tensor'}, dimensions={0}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['data'=1,'fsdp'=2,'tensor'=2] {'fsdp'}, dimensions={0}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        ("replica_groups=[2,2]<=[4], to_apply=%sum", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%sum", [[0, 2], [1, 3]]),
        ("replica_groups={{0,1},{2,3}}, dimensions={0}", [[0, 1], [2, 3]]),
        ("replica_groups={{0},{1}}, dimensions={0}", [[0], [1]]),
        ('replica_groups={}, to_apply=%sum, backend_config={"a":{"n":2}}', []),
        ("source_target_pairs={{0,2},{2,0},{1,3},{3,1}}", [[0, 2], [1, 3]]),
        ("source_target_pairs={{0,1},{2,3},{1,2},{3,0}}", [[0, 1, 2, 3]]),
        ("dimensions={0}", []),
    ],
)
def test_which_devices_exchange_data(text, groups):
    line = f"%c.1 = f32[8]{{0}} all-reduce(%a), channel_id=1, {text}"
    module = hlo.module(f"HloModule m\n\nENTRY %main (a: f32[8]) -> f32[8] {{\n  {line}\n}}\n")
    assert module.find("c.1").groups == groups


def test_text_that_is_no_module():
    with pytest.raises(ValueError, match="not an HLO module"):
        hlo.module("ENTRY main")
