"""Triton kernels of attention and the norm, run on a CPU by Triton's interpreter, against the reference.

    TRITON_INTERPRET=1 python tests/kernels/triton_interpreted.py [OFF | unmasked | residual]

OFF makes the kernels' windows wrong by so many tokens, `unmasked` leaves the mask out of one block too many,
`residual` loses the gradient that comes along the norm's residual stream: one case, which then must fail.

A process of its own, because Triton reads the variable when it is imported. In float32, which the kernels
take as they do half precision, so that a boundary that is off by one shows.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from pallas_kernels import rms_norm
from pallas_kernels.attention import find_segments, reference, triton, triton_kernels
from pallas_kernels.rms_norm import triton as norm
from pallas_kernels.rms_norm import triton_kernels as norm_kernels
from pallas_kernels.rms_norm.shapes import CPU, CPU_HEADS
from pallas_kernels.testing import (
    CPU_TOLERANCE,
    GPU_TOLERANCE,
    assert_close,
    fresh_seed,
    normal,
    segment_ids,
)

TILE = {"BQ": 16, "BK": 16, "num_warps": 4, "num_stages": 1}
TILES = {
    "square": dict.fromkeys(triton.TILES, TILE),
    "tall": dict.fromkeys(triton.TILES, TILE | {"BQ": 32}),
    "wide": dict.fromkeys(triton.TILES, TILE | {"BK": 32}),
}
CASES = (
    # tiles, layout, tokens, query heads, key heads, head dim, window
    ("square", "documents", 80, 2, 1, 16, None),
    ("square", "one_document", 96, 1, 1, 16, 1),
    ("square", "one_document", 96, 1, 1, 16, 16),
    ("square", "one_document", 90, 2, 1, 16, 17),
    ("tall", "one_document", 150, 1, 1, 16, 70),
    ("wide", "one_document", 150, 1, 1, 16, 70),
    ("tall", "mixed", 75, 2, 2, 16, 20),
    ("wide", "mixed", 75, 2, 2, 16, 20),
    ("square", "tiny_documents", 64, 1, 1, 16, 50),
    ("square", "padding_tail", 64, 1, 1, 256, 20),
    # Blocks without a mask between those at the rims, in each kernel, and queries that share keys.
    ("square", "one_document", 90, 2, 1, 16, None),
    ("tall", "padding_tail", 150, 4, 2, 16, None),
    ("wide", "padding_tail", 150, 4, 2, 16, None),
)


class Tensor:
    """What the interpreter asks of an argument, over an array of NumPy's that it works on in place."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, f"numpy.{array.dtype}"

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "Tensor":
        return self

    def cpu(self) -> "Tensor":
        return self

    def new_empty(self, *_, **__) -> "Tensor":
        return Tensor(self.array)

    def set_(self, *_) -> None: ...

    def copy_(self, _) -> None: ...

    storage_offset = size = stride = lambda self: 0


def numbers_are_numbers(scope_of=interpreter._patch_lang_tensor) -> None:
    """Triton's interpreter makes a number of an array of one, which NumPy 2.5 refuses."""

    def patch(tensor, scope):
        scope_of(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


def triton_call(*arrays, kernel, out_shape, grid, **constants):
    """Takes the place of jax_triton's."""
    shapes, tree = jax.tree.flatten(out_shape)
    arrays = [x if isinstance(x, int) else np.array(x) for x in arrays]
    results = [np.full(shape.shape, np.nan, shape.dtype) for shape in shapes]
    constants = {name: value for name, value in constants.items() if name not in ("num_warps", "num_stages")}
    grid = (grid,) if isinstance(grid, int) else grid
    kernel[grid](*(x if isinstance(x, int) else Tensor(x) for x in (*arrays, *results)), **constants)
    return jax.tree.unflatten(tree, map(jnp.asarray, results))


def check(tiles: str, layout: str, T: int, H: int, K: int, C: int, window: int | None) -> None:
    rng = np.random.default_rng(fresh_seed())
    B = 5 if layout == "mixed" else 1
    q, do = (normal(rng, (B, T, H, C), jnp.float32) for _ in range(2))
    k, v = (normal(rng, (B, T, K, C), jnp.float32) for _ in range(2))
    segments = find_segments(jnp.asarray(segment_ids(rng, B, T, layout)), T)
    triton.tiles = lambda head_dim: TILES[tiles]
    o, residuals = triton._forward(q, k, v, segments, window)
    exact = functools.partial(reference.attention, segments=segments, window=window)
    expected, pullback = jax.vjp(exact, q, k, v)
    found = [o, *triton._backward(window, residuals, do)[:3]]
    expected = [expected, *pullback(do)]
    if window == 1:  # each token sees itself alone, so that queries and keys have no gradient
        expected[1:3] = (1 + x for x in expected[1:3])
        found[1:3] = (1 + x for x in found[1:3])
    assert_close(found, expected, CPU_TOLERANCE)


def check_norm(kind: str, shape: tuple[int, ...], dtype, scale_dtype, offset: float) -> None:
    """Values, and gradients of cotangents that differ; half precision is rounded once, at the end."""
    rng, rotated = np.random.default_rng(fresh_seed()), kind == "rms_norm_rotary"
    x, dy, d_residual = (normal(rng, shape, dtype) for _ in range(3))
    scale = (1 - offset + 0.3 * normal(rng, shape[-1:], jnp.float32)).astype(scale_dtype)
    angle = normal(rng, (*shape[:2], shape[-1] // 2), jnp.float32)
    angles = (jnp.cos(angle), 1.1 * jnp.sin(angle)) if rotated else ()
    function = getattr(rms_norm, kind)

    def run(implementation: str, wide: bool):
        arrays = tuple(leaf.astype(jnp.float32) if wide else leaf for leaf in (x, scale))
        how = {"epsilon": 1e-5, "offset": offset, "implementation": implementation, "platform": "gpu"}
        values, pullback = jax.vjp(lambda x, scale: function(x, scale, *angles, **how), *arrays)
        gradient = (d_residual, dy) if kind == "rms_norm_residual" else dy
        return values, pullback(jax.tree.map(lambda g, y: g.astype(y.dtype), gradient, values))

    found = run("triton", False)
    assert [leaf.dtype for leaf in found[1]] == [x.dtype, scale.dtype]
    exact = dtype == scale_dtype == jnp.float32
    assert_close(found, run("reference", True), CPU_TOLERANCE if exact else GPU_TOLERANCE)


ALONE, RESIDUAL, ROTARY = "rms_norm", "rms_norm_residual", "rms_norm_rotary"
NORMS = (
    # function, shape, dtype, the scale's, offset
    *((RESIDUAL, shape, jnp.float32, jnp.float32, 0.0) for shape in CPU.values()),
    *((ROTARY, shape, jnp.float32, jnp.float32, 0.0) for shape in CPU_HEADS.values()),
    (ALONE, CPU["odd"], jnp.float32, jnp.float32, 1.0),
    (RESIDUAL, CPU["odd"], jnp.bfloat16, jnp.float32, 1.0),
    (RESIDUAL, CPU["wide"], jnp.bfloat16, jnp.bfloat16, 0.0),
    (ROTARY, CPU_HEADS["odd"], jnp.bfloat16, jnp.bfloat16, 1.0),
)


def check_norms() -> None:
    """With few programs, so that each has several blocks, and with as many as there are."""
    for programs in (2, norm.PROGRAMS):
        norm.PROGRAMS = programs
        for case in NORMS:
            check_norm(*case)
            print("ok norm", programs, *case, flush=True)


if __name__ == "__main__":
    numbers_are_numbers()
    stub = type("jax_triton", (), {"triton_call": staticmethod(triton_call)})
    triton.load_triton = lambda package: (stub, triton_kernels)
    norm.load_triton = lambda package: (stub, norm_kernels)
    if sys.argv[1:] == ["unmasked"]:
        parts = triton_kernels._parts
        triton_kernels._parts = lambda low, high, free_low, free_high: parts(
            low, high, free_low, tl.minimum(free_high + TILE["BK"], high)
        )
        check("square", "one_document", 96, 2, 1, 16, None)  # whole blocks: nothing is read beyond the row
    elif sys.argv[1:] == ["residual"]:
        backward = norm._backward
        norm._backward = lambda kept, dy, _, *how: backward(kept, dy, None, *how)
        check_norm(*NORMS[0])
    elif sys.argv[1:]:
        sound = triton._bounds
        triton._bounds = lambda segments, window: sound(segments, window + int(sys.argv[1]))
        check(*CASES[3])
    else:
        for case in CASES:
            check(*case)
            print("ok", *case, flush=True)
        check_norms()
