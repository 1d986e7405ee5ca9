"""The compiled step hides its communication, as far as the order of its operations can tell without a GPU.

A program for described H200s is run in a model of a GPU: one stream computes, another communicates, each
operation takes what its FLOPs or bytes ask for. What the model leaves out, above all that a collective and a
matmul slow each other down, only a trace shows.
"""

import dataclasses
import functools
import math
import re

import jax
import pytest

from jaxthru import config as configuration
from jaxthru.build.checks import validate
from jaxthru.build.stand_ins import attention_stand_in
from jaxthru.build.step import assemble
from jaxthru.runtime import aot

cuda = pytest.mark.compiles_for("cuda")

SEGMENTS = 64  # most documents in a row
FLOPS, MEMORY, LINK = 700e12, 4e12, 300e9  # about an H200's, a second: bf16 matmuls, HBM and NVLink
LAUNCH = 15e-6  # seconds until a collective moves anything
ATTENTION = 1e-3  # seconds of a kernel behind a stand-in, at least
BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8, "pred": 1, "s8": 1, "u8": 1}
LINE = re.compile(r"\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>.*?) (?P<operation>[\w-]+)\((?P<rest>.*)")
MOVING = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
STARTS = tuple(f"{name}-start" for name in MOVING)


@dataclasses.dataclass(frozen=True)
class Run:
    """Seconds of the step, of all its collectives, and those in which it computes nothing meanwhile."""

    step: float
    communication: float
    exposed: float


def body_of_micro_batches(hlo: str) -> str:
    """Returns the start, as `simulate` takes it, of the loop's body that has most of the products."""
    bodies = re.findall(r"\n%?([\w.-]+) \([^\n]*\{\n(.*?\n\})", hlo, re.S)
    name, _ = max(bodies, key=lambda body: body[1].count("lhs_contracting_dimensions"))
    return f"\n%{name} "


def simulate(hlo: str, start: str = "\nENTRY ") -> Run:
    """Runs a computation of a scheduled module on two devices, by default the entry."""
    entry = hlo[hlo.index(start) :]
    shapes: dict[str, str] = {}
    ends: dict[str, float] = {}
    now = link_free = communication = exposed = 0.0
    for match in map(LINE.match, entry[: entry.index("\n}")].splitlines()):
        if match is None:
            continue
        name, shape, operation, rest = match.groups()
        shapes[name] = shape
        operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
        read = sum(size(shapes.get(operand, "")) for operand in operands)
        collective = operation.removesuffix("-start") + "-start"
        if collective in STARTS:
            # A permute moves its operand. Of what is whole on one side and half on the other, half moves.
            whole = max(size(shape) - read, read) if operation in STARTS else max(size(shape), read)
            takes = LAUNCH + (read if "permute" in operation else whole / 2) / LINK
            communication += takes
            link_free = max(now, link_free) + takes
            if operation in STARTS:
                ends[name] = link_free
            else:  # the compute stream's own
                exposed, now = exposed + link_free - now, link_free
        elif operation.endswith("-done") and operands[0] in ends:
            wait = max(ends.pop(operands[0]) - now, 0.0)
            exposed, now = exposed + wait, now + wait
        elif operation == "custom-call" and "matmul" in rest:
            dim = int(re.search(r'"lhs_contracting_dimensions":\["(\d+)"', rest)[1])
            contracted = dims(shapes[operands[0]])[0][1][dim]
            now += 2 * math.prod(dims(shape)[0][1]) * contracted / FLOPS
        elif operation == "custom-call":
            now += ATTENTION * ("stand_in" in rest)
        elif operation in ("fusion", "copy"):
            now += (read + size(shape)) / MEMORY
    assert not ends
    return Run(now, communication, exposed)


def dims(shape: str) -> list[tuple[str, list[int]]]:
    found = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    return [(dtype, [int(n) for n in sizes.split(",") if n]) for dtype, sizes in found]


def size(shape: str) -> int:
    return sum(BYTES[dtype] * math.prod(sizes) for dtype, sizes in dims(shape) if dtype in BYTES)


def test_the_model_of_a_gpu():
    """A gather of 600 MB, of which half takes 1 ms, beside a matmul of 2.8 ms or after it."""
    matmul = (
        "  %product = (bf16[10000,10000]{1,0}, s8[4]{0}) custom-call(%x, %x), "
        'custom_call_target="__cublas$lt$matmul", '
        'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
    )
    start = "  %start = (bf16[15000,10000]{1,0}, bf16[30000,10000]{1,0}) all-gather-start(%shard)"
    done = "  %done = bf16[30000,10000]{1,0} all-gather-done(%start)"

    def program(*lines: str) -> str:
        arguments = (
            "  %x = bf16[10000,10000]{1,0} parameter(0)",
            "  %shard = bf16[15000,10000]{1,0} parameter(1)",
        )
        return "\n".join(("HloModule m\n", "ENTRY %main {", *arguments, *lines, "}"))

    hidden, bare = simulate(program(start, matmul, done)), simulate(program(matmul, start, done))
    assert hidden.exposed == 0 and hidden.step == pytest.approx(2e12 / FLOPS)
    assert bare.communication == pytest.approx(LAUNCH + 1e-3)
    assert bare.exposed == pytest.approx(bare.communication)
    assert bare.step == pytest.approx(2e12 / FLOPS + bare.exposed)
    synchronous = simulate(program(matmul, done.replace("all-gather-done(%start)", "all-gather(%shard)")))
    assert synchronous.exposed == pytest.approx(bare.exposed)


@functools.cache
def lowered(*settings: str) -> jax.stages.Lowered:
    """Returns the step of the 8-layer configuration with other settings, to be compiled for H200s."""
    config = configuration.load(
        "configs/llama3_8b_8layer.py",
        ["model.layers=4", "remat.policy=projections", "model.loop=unroll", *settings],
    )
    layout = validate(config, jax.devices()[:2], "gpu")
    attention, _ = attention_stand_in(config, layout, SEGMENTS)
    made = assemble(config, layout, segments=SEGMENTS, sources=1, attention=attention)
    return aot.lower(made.jitted, made.abstract, made.batch)


@functools.cache
def compiled(*settings: str, **options) -> str:
    """Returns its program. options: of XLA, beside those that plans are compiled with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aot, "OPTIONS", aot.OPTIONS | options)
        return aot.compile_for(lowered(*settings), aot.TARGETS["h200"], 2).hlo


FSDP = "mesh.fsdp=2", "train.rows=4"


@cuda
def test_fsdp_hides_its_communication():
    """Gathers of parameters and scatters of gradients: each layer's begin while another layer computes."""
    found = simulate(compiled(*FSDP))
    assert found.communication > 0.02 * found.step, "there is nothing to hide"
    assert found.exposed < 0.005 * found.step
    # Without the scheduler, nearly all of it shows.
    plain = simulate(compiled(*FSDP, xla_gpu_enable_latency_hiding_scheduler=False))
    assert plain.exposed > 0.5 * plain.communication


@cuda
def test_kept_parameters_are_gathered_once_and_copies_are_hidden_too():
    again, kept, copied = (
        simulate(compiled(*FSDP, *more))
        for more in (
            (),
            ("remat.keep_parameters=true",),
            ("remat.keep_parameters=true", "mesh.transfers=copies"),
        )
    )
    assert kept.communication < 0.8 * again.communication  # of a layer, two of three; of the tables, all
    assert copied.communication == pytest.approx(kept.communication, rel=0.05)
    assert copied.exposed < 0.005 * copied.step


@cuda
def test_micro_batches_hide_their_communication():
    """Each adds up gradients, layer by layer in turn: while a layer's are scattered, another is computed."""
    hlo = compiled("mesh.fsdp=2", "train.rows=8", "train.microbatches=2")
    found = simulate(hlo, body_of_micro_batches(hlo))
    assert found.communication > 0.02 * found.step, "there is nothing to hide"
    assert found.exposed < 0.01 * found.step  # of four layers, the last one's shows more


@cuda
def test_the_ring_hides_what_plain_collectives_show():
    """A gather that feeds the next matmul hides behind what other work there is, which is little."""
    settings = "mesh.tensor=2", "mesh.fsdp=1"
    plain, ring = (
        simulate(compiled(*settings, f"kernels.collective_matmul={name}")) for name in ("reference", "ring")
    )
    assert plain.communication > 0.05 * plain.step, "there is nothing to hide"
    assert ring.exposed < 0.25 * plain.exposed
