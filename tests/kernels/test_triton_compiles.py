"""The Triton kernels, as JAX calls them, compiled to the code of GPUs that are not here: NVIDIA's and AMD's.

JAX lowers them only where one is. So what it would pass to jax-triton is caught, and given to Triton itself.
"""

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.adamw_8bit import Adam, Scalars, quantise, update
from pallas_kernels.attention import attention, find_segments
from pallas_kernels.cast_transpose import cast_transpose
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_outer
from pallas_kernels.grouped_matmul.triton_tiles import choose
from pallas_kernels.linear_cross_entropy import linear_cross_entropy
from pallas_kernels.rms_norm import rms_norm_residual, rms_norm_rotary
from pallas_kernels.routing import combine, dispatch, route, sort_assignments
from pallas_kernels.weighted_swiglu import weighted_swiglu

pytestmark = pytest.mark.compiles_for("triton")

TYPES = {"bfloat16": "bf16", "float32": "fp32", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8"}
TYPES |= {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_86": ("cuda", 86, 32),
    "sm_90": ("cuda", 90, 32),
    "gfx942": ("hip", "gfx942", 64),
}
OPTIONS = ("num_warps", "num_stages")
bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32


class Caught:
    """Takes the place of jax-triton. calls: (kernel, operands and results in order, constants) of each."""

    def __init__(self):
        self.calls = []

    def triton_call(
        self, *operands, kernel, out_shape, grid, input_output_aliases=None, **constants
    ) -> jax.Array:
        results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape)
        self.calls.append((kernel, (*operands, *jax.tree.leaves(results)), constants))
        return results


def calls(operation: str, function, arguments, monkeypatch) -> list[tuple]:
    """Returns the calls of kernels that a function makes, of an operation's implementation in Triton."""
    module = importlib.import_module(f"pallas_kernels.{operation}.triton")
    kernels = importlib.import_module(f"pallas_kernels.{operation}.triton_kernels")
    caught = Caught()
    monkeypatch.setattr(module, "load_triton", lambda package: (caught, kernels))
    jax.clear_caches()
    jax.eval_shape(function, *arguments)
    assert caught.calls
    return caught.calls


SHARED = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90": 227 << 10}
"""Bytes of shared memory that a block may have, by NVIDIA's CUDA programming guide."""
OWN_TILES = ("attention", "grouped_matmul")
"""Operations whose tiles depend on it. Of others sm_86 gets the tiles of sm_80, and has less for them."""


@pytest.fixture(scope="module")
def compiled_already(tmp_path_factory):
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(autouse=True)
def compiled_once(compiled_already, monkeypatch):
    """What cases have in common; and not the user's own folder, which may have it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled_already))
    monkeypatch.setattr("triton.knobs.runtime.add_stages_inspection_hook", keep_what_ptxas_says)
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")


def keep_what_ptxas_says(backend, stages: dict, options, language, capability) -> None:
    """Triton prints it and forgets it. With the metadata it is kept in its cache as well, and the assembler,
    which takes seconds, need not run again to be asked."""
    if (assemble := stages.get("cubin")) is None:
        return

    def and_keep(ptx: str, metadata: dict[str, Any]) -> bytes:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            binary = assemble(ptx, metadata)
        metadata["ptxas"] = said.getvalue()
        return binary

    stages["cubin"] = and_keep


def compile_for(case: str, target: str, kernel, arrays, constants):
    """Returns a kernel as Triton compiles it, and its assembly. Arrays begin at multiples of 16 bytes: so
    jax-triton says of all that JAX has."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: constants[name] for name in OPTIONS if name in constants}
    constants = {name: value for name, value in constants.items() if name not in OPTIONS}
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {
        name: "i32" if isinstance(x, int) else "*" + TYPES[str(x.dtype)]
        for name, x in zip(names, arrays, strict=True)
    }
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    pointers = [name for name in names if signature[name].startswith("*")]
    known = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    # Triton's PTX for sm_86 is that for sm_80: with the same tiles it is compiled already.
    code_of = GPUTarget(*TARGETS["sm_80" if target == "sm_86" else target])
    compiled = triton.compile(ASTSource(kernel, signature, places, known), target=code_of, options=options)
    if target in SHARED:
        own = case.split()[0] in OWN_TILES or target != "sm_80"
        assert compiled.metadata.shared <= SHARED[target if own else "sm_86"]
    text = compiled.asm["amdgcn" if target.startswith("gfx") else "ptx"]
    assert kernel.__name__ in text and "multimem" not in text
    return compiled, text


def struct(*shape, dtype=bf16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def of_adamw(master: str):
    def function(gradient, weight, remainder, key):
        moments = (quantise(jnp.ones(weight.shape, f32), kind) for kind in ("signed", "unsigned"))
        scalars = Scalars(*(f32(1),) * 4, jnp.asarray(True))
        remainder, key = remainder if master == "split" else None, key if master == "rounded" else None
        adam = Adam(0.9, 0.95, 1e-8, 0.1)
        return update(
            gradient, weight, remainder, *moments, key, scalars, adam, implementation="triton", platform="gpu"
        )

    weight = struct(64, 4096, dtype=f32 if master == "whole" else bf16)
    return function, (struct(64, 4096), weight, struct(64, 4096, dtype=jnp.int16), jax.random.key(0))


def of_linear_cross_entropy():
    def function(hidden, matrix, targets, weights):
        loss = lambda hidden, matrix: linear_cross_entropy(  # noqa: E731
            hidden, matrix, targets, weights, implementation="triton", platform="gpu"
        )[0]
        return jax.grad(loss, (0, 1))(hidden, matrix)

    shapes = struct(1, 256, 128), struct(128, 4096, dtype=f32), struct(1, 256, dtype=i32)
    return function, (*shapes, struct(1, 256, dtype=f32))


def of_attention(head_dim: int = 128, window: int | None = None):
    def function(q, k, v, ids):
        def summed(q, k, v):
            segments = find_segments(ids, 8)
            how = {"implementation": "triton", "platform": "gpu"}
            o = attention(q, k, v, segments, window=window, **how)
            return jnp.sum(o.astype(f32))

        return jax.grad(summed, (0, 1, 2))(q, k, v)

    q, k = struct(1, 512, 8, head_dim), struct(1, 512, 2, head_dim)
    return function, (q, k, k, struct(1, 512, dtype=i32))


def of_rms_norm(D: int, dtype=bf16):
    def function(x, scale, dy):
        how = {"epsilon": 1e-5, "implementation": "triton", "platform": "gpu"}
        return jax.vjp(lambda *a: rms_norm_residual(*a, **how), x, scale)[1]((dy, dy))

    x = struct(4096, D, dtype=dtype)
    return function, (x, struct(D, dtype=f32), x)


def of_rms_norm_rotary(head_dim: int):
    def function(x, scale, cos, sin, dy):
        how = {"epsilon": 1e-5, "implementation": "triton", "platform": "gpu"}
        return jax.vjp(lambda *a: rms_norm_rotary(*a, cos, sin, **how), x, scale)[1](dy)

    x, angle = struct(2, 512, 16, head_dim), struct(2, 512, head_dim // 2, dtype=f32)
    return function, (x, struct(head_dim, dtype=f32), angle, angle, x)


def of_grouped_matmul(I: int, O: int, dtype=bf16):  # noqa: E741
    """Forward and backward, and a sum into a float32 buffer."""
    R, E, how = 4096, 8, {"implementation": "triton", "platform": "gpu"}

    def function(x, w, sizes, dy, into):
        pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, **how), x, w)[1]
        return pullback(dy), grouped_outer(x, dy, sizes, into, **how)

    shapes = struct(R, I, dtype=dtype), struct(E, I, O, dtype=dtype), struct(E, dtype=i32)
    return function, (*shapes, struct(R, O, dtype=dtype), struct(E, I, O, dtype=f32))


def of_routing(N: int, E: int, K: int, D: int, **rule):
    how = {"implementation": "triton", "platform": "gpu"}

    def function(logits, valid, bias, x, d_weights, dy):
        def routed(logits, x):
            made = route(logits, valid, bias, top_k=K, normalise=True, **rule, **how)
            order = sort_assignments(made.ids_NK, E, **how)
            return made.weights_NK, combine(dispatch(x, order, K, **how), order, N, **how)

        return jax.vjp(routed, logits, x)[1]((d_weights, dy))

    valid, x = struct(N, dtype=jnp.bool_), struct(N, D)
    return function, (struct(N, E, dtype=f32), valid, struct(E, dtype=f32), x, struct(N, K, dtype=f32), x)


def of_weighted_swiglu(M: int):
    def function(gate_up, weights, dy):
        how = {"implementation": "triton", "platform": "gpu"}
        return jax.vjp(lambda *a: weighted_swiglu(*a, **how), gate_up, weights)[1](dy)

    return function, (struct(4096, 2, M), struct(4096, dtype=f32), struct(4096, M))


def of_cast_transpose(rows: int, columns: int, dtype=bf16, to=jnp.float8_e4m3fn):
    function = lambda x, up: cast_transpose(x, up, to, implementation="triton", platform="gpu")  # noqa: E731
    return function, (struct(rows, columns, dtype=dtype), struct(dtype=f32))


CASTS = {
    "cast_transpose": of_cast_transpose(32_768, 8192),
    "cast_transpose float32": of_cast_transpose(2048, 512, f32),
    "cast_transpose of gradients": of_cast_transpose(32_768, 2048, to=jnp.float8_e5m2),
    "cast_transpose off the tile": of_cast_transpose(1028, 300),
}
NORMS = {f"rms_norm {D}": of_rms_norm(D) for D in (1024, 2048, 2560, 4096, 8192)}
NORMS |= {f"rms_norm heads {C}": of_rms_norm_rotary(C) for C in (64, 96, 128, 256)}
CASES = NORMS | {
    "rms_norm float32": of_rms_norm(8192, f32),
    "adamw_8bit split": of_adamw("split"),
    "adamw_8bit whole": of_adamw("whole"),
    "adamw_8bit rounded": of_adamw("rounded"),
    "linear_cross_entropy": of_linear_cross_entropy(),
    "grouped_matmul": of_grouped_matmul(2048, 1536),
    "grouped_matmul off the tile": of_grouped_matmul(200, 136),
    "grouped_matmul float32": of_grouped_matmul(256, 512, f32),
    "routing": of_routing(512, 128, 8, 2048, score="softmax"),
    "routing in groups": of_routing(512, 256, 8, 7168, score="sigmoid", groups=8, top_groups=4),
    "routing of chosen": of_routing(512, 60, 3, 200, score="softmax_of_chosen"),
    "weighted_swiglu": of_weighted_swiglu(768),
    "weighted_swiglu wide": of_weighted_swiglu(14_336),
    "attention": of_attention(),
    "attention 64 wide": of_attention(64),
    "attention 256 wide, windowed": of_attention(256, 100),
}
ATTENTION = ("attention", "attention 64 wide", "attention 256 wide, windowed")
EXPERTS = ("grouped_matmul", "routing", "routing in groups", "weighted_swiglu", "weighted_swiglu wide")


def targets_of(case: str) -> list[str]:
    """Returns where a case is compiled, beside where tests further down compile it and look closer."""
    closer = ("sm_80", "sm_90") if case in (*ATTENTION, *EXPERTS, *NORMS) else ()
    without = () if case.split()[0] in OWN_TILES else ("sm_86",)
    without += ("gfx942",) if case.startswith("attention") else ()  # its tiles are for NVIDIA's memory
    return [target for target in TARGETS if target not in closer + without]


@pytest.mark.parametrize(
    ("case", "target"), [(case, target) for case in CASES for target in targets_of(case)]
)
def test_kernels_compile(case, target, monkeypatch):
    capability = tuple(divmod(TARGETS[target][1], 10)) if target in SHARED else None
    monkeypatch.setattr(
        "pallas_kernels.grouped_matmul.triton.tile_of", lambda problem: choose(problem, None, capability)
    )
    if target in SHARED:  # the tiles of attention depend on it
        monkeypatch.setattr("pallas_kernels.attention.triton.nvidia_compute_capability", lambda: capability)
    else:  # whose warps are of 64 threads
        monkeypatch.setattr("pallas_kernels.linear_cross_entropy.triton.on_nvidia", lambda: False)
    for kernel, arrays, constants in calls(case.split()[0], *CASES[case], monkeypatch):
        compile_for(case, target, kernel, arrays, constants)


def resources(compiled) -> tuple[int, int]:
    """Returns the registers of a thread, and the bytes of them that go to memory and back."""
    (registers,) = re.findall(r"Used (\d+) registers", compiled.metadata.ptxas)
    return int(registers), sum(map(int, re.findall(r"(\d+) bytes spill", compiled.metadata.ptxas)))


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", EXPERTS)
def test_experts_kernels_do_not_spill(case, target, monkeypatch):
    """Products are of matrix units, whose operands are loaded ahead."""
    capability = tuple(divmod(TARGETS[target][1], 10))
    monkeypatch.setattr(
        "pallas_kernels.grouped_matmul.triton.tile_of", lambda problem: choose(problem, None, capability)
    )
    for kernel, arrays, constants in calls(case.split()[0], *CASES[case], monkeypatch):
        compiled, text = compile_for(case, target, kernel, arrays, constants)
        registers, spilled = resources(compiled)
        print(f"{case} {target} {kernel.__name__}: {registers} registers, {spilled} bytes spilled")
        assert not spilled
        if "grouped" in kernel.__name__:
            assert "cp.async" in text and ("wgmma" if target == "sm_90" else "mma.sync") in text


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_does_not_spill(case, target, monkeypatch):
    """The gradients of keys and values, half of what it takes, did: they have two sums to keep."""
    capability = tuple(divmod(TARGETS[target][1], 10))
    monkeypatch.setattr("pallas_kernels.attention.triton.nvidia_compute_capability", lambda: capability)
    for kernel, arrays, constants in calls("attention", *CASES[case], monkeypatch):
        registers, spilled = resources(compile_for(case, target, kernel, arrays, constants)[0])
        print(f"{case} {target} {kernel.__name__}: {registers} registers, {spilled} bytes spilled")
        assert not spilled


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", NORMS)
def test_the_norm_keeps_its_rows_in_registers(case, target, monkeypatch):
    """Without spilling. Loads and stores are of 16 bytes; the backward pass loads ahead of its work."""
    for kernel, arrays, constants in calls("rms_norm", *NORMS[case], monkeypatch):
        compiled, text = compile_for(case, target, kernel, arrays, constants)
        registers, spilled = resources(compiled)
        print(f"{case} {target} {kernel.__name__}: {registers} registers, {spilled} bytes spilled")
        assert not spilled and registers * 32 * constants["num_warps"] <= 65_536
        wide = "cp.async.cg.shared.global" if "backward" in kernel.__name__ else r"ld.global\S*.v4.b32"
        assert re.search(wide, text) and "st.global.v4.b32" in text


@pytest.mark.parametrize("case", CASTS)
def test_casts_to_float8_store_whole_words(case, monkeypatch):
    """Of 16 bytes where a row has them; what is transposed lies in shared memory by words, too. Numbers are
    rounded once: for capability 8.9 Triton has them cut to float16 first."""
    ((kernel, arrays, constants),) = calls("cast_transpose", *CASTS[case], monkeypatch)
    compiled, text = compile_for(case, "sm_90", kernel, arrays, constants)
    registers, spilled = resources(compiled)
    print(f"{case}: {registers} registers, {spilled} bytes spilled")
    assert not spilled and registers <= 64
    assert not re.search(r"(ld|st)\.(global|shared)\S*\.b8\b", text)
    assert "cvt.rn.satfinite.e" in text and "cvt.rz" not in text
    assert ("st.global.v4.b32" in text) == ("off the tile" not in case)


def test_pytorch_is_not_imported_for_a_kernel(tmp_path):
    """Triton looks for its tensors at its first kernel: where it is installed, that takes seconds."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported')")
    code = (
        "import sys, types\n"
        "from pallas_kernels.triton_loading import _specialise_without_torch\n"
        "_specialise_without_torch()\n"
        "from triton._C.libtriton import native_specialize_impl\n"
        "array = types.SimpleNamespace(data_ptr=lambda: 16, dtype='bf16')\n"
        "from triton.backends.compiler import GPUTarget\n"
        "from triton.backends.nvidia.compiler import CUDABackend\n"
        "backend = CUDABackend(GPUTarget('cuda', 90, 32))\n"
        "print(native_specialize_impl(backend, array, False, True, True), 'torch' in sys.modules)\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ran.stdout.strip() == "('*bf16', 'D') False", ran.stderr
