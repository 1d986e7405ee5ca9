"""The programs of a layered step as XLA builds them for an H200 that is not here: sizes, donation."""

import dataclasses
import functools
import re

import jax
import pytest
import tiny

from jaxthru.engine.dispatched import DispatchedStep
from jaxthru.engine.model import LAYERS, split_stages
from jaxthru.engine.offload import HOST, OffloadConfig, offloaded_state
from jaxthru.engine.programs import trace
from jaxthru.runtime import aot
from pallas_kernels import adamw_8bit
from pallas_kernels.adamw_8bit import Adam, Quantised, Scalars, xla

cuda = pytest.mark.compiles_for("cuda")

LEVELS = {
    "optimizer": OffloadConfig("optimizer"),
    "gradients": OffloadConfig("gradients", 0.5),
    "parameters": OffloadConfig("parameters"),
    "parameters, names": OffloadConfig("parameters", activations="names"),
}
SHAPE = {
    "loop": "unroll",
    "remat": "attention",
    "compute": "bfloat16",
    "layers": 4,
    "embed": 512,
    "mlp": 1536,
}


def make(clip_rule: str, state: str) -> tiny.Tiny:
    return tiny.make(optim=dataclasses.replace(tiny.OPTIM, state=state, clip_rule=clip_rule), **SHAPE)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One of a step's programs for CUDA, its arguments and what it returns."""

    program: aot.Program
    arguments: tuple
    results: object


_programs: dict[str, aot.Program] = {}


def compile_all(whole: tiny.Tiny, config: OffloadConfig) -> dict[str, Compiled]:
    """Returns all programs of a layered step, as compiled for an H200."""
    found = {}

    def compile_(name, function, arguments, donate=(), out_shardings=None, **statics):
        here, results = tiny.compile_once(name, function, arguments, donate, out_shardings, **statics)
        traced = trace(name, function, arguments, donate, out_shardings, **statics)
        lowered = traced.lower(lowering_platforms=("cuda",))
        text = lowered.as_text()
        if text not in _programs:
            _programs[text] = aot.compile_for(lowered, aot.target("h200"))
        found[name] = Compiled(_programs[text], arguments, results)
        return here, results

    DispatchedStep(whole.step, config, offloaded_state(whole.abstract, config), whole.inputs, compile_)
    return found


def nbytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def rounded(tree) -> int:
    """Returns the bytes of a tree as the GPU keeps it: each array, and the table of them, takes blocks."""
    return nbytes(tree) + 256 * (len(jax.tree.leaves(tree)) + 1)


FORMS = [(level, rule, "split_master") for level, rule in zip(LEVELS, ("exact", "previous") * 2, strict=True)]
FORMS += [("optimizer", "exact", "split_master_int8"), ("parameters", "previous", "float32")]


@cuda
@pytest.mark.parametrize(("level", "clip_rule", "state"), FORMS)
def test_programs_for_a_gpu(level, clip_rule, state):
    whole, config = make(clip_rule, state), LEVELS[level]
    programs = compile_all(whole, config)
    assert len(programs) == 10

    # The state is on the host, and no program touches host memory: what is copied is copied by its transfer.
    abstract = offloaded_state(whole.abstract, config)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(abstract["opt_state"]["slots"])}
    assert HOST in kinds
    for name, compiled in programs.items():
        stats = compiled.program.stats
        host = [
            getattr(stats, f"host_{what}_size_in_bytes") for what in ("argument", "output", "alias", "temp")
        ]
        assert host == [0, 0, 0, 0], name
        assert not re.search(r"S\(5\)", compiled.program.hlo), name

    # Donation: the next weights and slots take the place of those before, all of them.
    for part in ("update_embedding", "update_head", "update_layer"):
        compiled = programs[part]
        donated = compiled.arguments[:2]
        stats = compiled.program.stats
        assert nbytes(donated) <= stats.alias_size_in_bytes
        assert stats.output_size_in_bytes - stats.alias_size_in_bytes <= 8 * len(jax.tree.leaves(donated))
    layer = split_stages(whole.abstract["params"])[LAYERS]
    float32 = 4 * sum(leaf.size for leaf in jax.tree.leaves(layer))
    assert programs["update_layer"].program.stats.temp_size_in_bytes < float32

    # A layer's backward pass is given one layer and returns gradients of one, and keeps no others meanwhile.
    backward = programs["backward"]
    _, _, _, dx, _, squares = backward.arguments
    stats = backward.program.stats
    gradients = backward.results[1]
    assert jax.tree.structure(gradients) == jax.tree.structure(layer)
    assert stats.output_size_in_bytes <= rounded((gradients, dx, squares))
    assert stats.argument_size_in_bytes <= rounded(backward.arguments)
    activations = 4 * tiny.ROWS * tiny.SEQUENCE * (2 * SHAPE["mlp"] + 8 * SHAPE["embed"])
    assert stats.temp_size_in_bytes < 2 * float32 + 4 * activations + (64 << 20)  # with cuBLAS's workspace
    assert stats.alias_size_in_bytes >= nbytes(dx)


def three_updates(master: str, implementation: str) -> tuple:
    """Returns a jitted update of three matrices with moments in 8 bits, its arguments, and the bytes of one
    matrix's state."""
    shape = (4096, 14_336)
    array = lambda dtype, shape=shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    moments = [
        Quantised(array(codes), array("float32", (shape[0], shape[1] // 256))) for codes in ("int8", "uint8")
    ]
    remainder = array("int16") if master == "split" else None
    state = array("bfloat16"), remainder, *moments
    scalars = Scalars(*(array("float32", ()) for _ in range(4)), array("bool", ()))

    def three(gradients, states, scalars):
        key = jax.random.key(0) if master == "rounded" else None
        adam = Adam(0.9, 0.95, 1e-8, 0.1)
        pairs = zip(gradients, states, strict=True)
        update = functools.partial(adamw_8bit.update, implementation=implementation)
        return [update(gradient, *state, key, scalars, adam) for gradient, state in pairs]

    arguments = [array("bfloat16")] * 3, [state] * 3, scalars
    return jax.jit(three, donate_argnums=1), arguments, nbytes(state)


SLABS = 3 * 4 * (4 * xla.SLAB)  # of three matrices; four of float32 each, were no two to share memory


@cuda
@pytest.mark.parametrize("master", ["split", "rounded"])
def test_an_update_in_8_bits_needs_a_slab_of_float32_at_a_time(master, monkeypatch):
    """In any order that XLA may choose: buffers are shared only where one has to be over before the other
    begins. And in place."""
    monkeypatch.setitem(aot.OPTIONS, "xla_gpu_command_buffer_scheduling_mode", "CONCURRENT")
    jitted, arguments, state = three_updates(master, "xla")
    stats = aot.compile_for(aot.lower(jitted, *arguments), aot.target("h200")).stats
    assert stats.temp_size_in_bytes < SLABS
    assert stats.alias_size_in_bytes >= 3 * state


@pytest.mark.gpu
@pytest.mark.parametrize("implementation, most", [("xla", SLABS), ("triton", 1 << 16)])
@pytest.mark.parametrize("master", ["split", "rounded"])
def test_an_update_in_8_bits_needs_no_more_on_a_gpu(master, implementation, most):
    jitted, arguments, state = three_updates(master, implementation)
    stats = jitted.lower(*arguments).compile().memory_analysis()
    assert stats.temp_size_in_bytes < most
    assert stats.alias_size_in_bytes >= 3 * state
