"""Grouped matmuls in float8: every implementation's values, and what of Hopper's kernel needs no GPU."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_grouped_matmul_hopper import CTAS, SIZES, SMALL, Emulated, by_group, forms, needs_hopper

from jaxthru.runtime import aot
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.grouped_matmul import hopper, hopper_tiles, mosaic_gpu
from pallas_kernels.grouped_matmul.float8 import grouped_matmul_float8
from pallas_kernels.grouped_matmul.hopper_tiles import Problem, Tiles
from pallas_kernels.testing import GPU_TOLERANCE, assert_close, fresh_seed, normal

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
bfloat16 = jnp.bfloat16


def draw(sizes, columns: int, results: int, dtype):
    """Returns x, w, scales and sizes; rows behind the last group are not numbers."""
    rng = np.random.default_rng(fresh_seed())
    own = sum(sizes)
    rows = max(-(-(own + 5) // 8) * 8, 128)
    x = normal(rng, (rows, columns), dtype).at[own:].set(jnp.nan)
    w = normal(rng, (len(sizes), results, columns), E4M3)
    scales = jnp.asarray(2.0 ** rng.integers(-3, 3, len(sizes)), jnp.float32)
    return x, w, scales, jnp.asarray(sizes, jnp.int32)


def expected(x, w, scales, sizes):
    matrices = np.asarray(w, np.float64) * np.asarray(scales, np.float64)[:, None, None]
    return [a @ matrix.T for a, matrix in zip(by_group(x, sizes), matrices, strict=True)]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_agrees_with_numpy(implementation):
    x, w, scales, sizes = draw(SIZES["few"], 32, 16, E5M2)
    y = grouped_matmul_float8(x, w, scales, sizes, jnp.float32, implementation=implementation)
    assert_close(by_group(y, SIZES["few"]), expected(x, w, scales, SIZES["few"]), 1e-5)
    rounded = grouped_matmul_float8(x, w, scales, sizes, exact=False, implementation=implementation)
    np.testing.assert_array_equal(rounded, y.astype(bfloat16))


@pytest.mark.parametrize(
    ("name", "dtype", "exact", "form"),
    [
        ("few", E4M3, False, {}),
        pytest.param("begin_late", E4M3, False, {"late": True}, marks=pytest.mark.slow),
        pytest.param("off_the_tile", E5M2, True, {"cluster": 2, "shares_w": True}, marks=pytest.mark.slow),
    ],
)
def test_on_an_emulated_gpu(name, dtype, exact, form, monkeypatch):
    tiles = dataclasses.replace(SMALL, **form)
    x, w, scales, sizes = draw(SIZES[name], 384 if exact else 128, tiles.n, dtype)
    arguments = x, w, scales, sizes, tiles, CTAS
    y = Emulated(monkeypatch)(hopper.grouped_matmul_float8, *arguments, dtype=bfloat16, exact=exact)
    assert y.dtype == bfloat16
    assert_close(by_group(y, SIZES[name]), expected(x, w, scales, SIZES[name]), GPU_TOLERANCE)


def structs(groups: int, rows: int, columns: int, results: int, dtype) -> list[jax.ShapeDtypeStruct]:
    shapes = ((rows, columns), dtype), ((groups, results, columns), E4M3), ((groups,), jnp.float32)
    return [jax.ShapeDtypeStruct(*each) for each in (*shapes, ((groups,), jnp.int32))]


@pytest.mark.compiles_for("cuda")
@pytest.mark.parametrize("form", [0, -1])
@pytest.mark.parametrize("exact", [False, True])
def test_compiles_without_spilling_registers(exact, form, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mocked = {name: value for name, value in aot.OPTIONS.items() if name != "xla_gpu_mock_custom_calls"}
    monkeypatch.setattr(aot, "OPTIONS", mocked)
    problem = Problem(f"float8{'_exact' * exact}", 16, 4096, 1536, 1536)
    tiles = forms(problem, (128, 128 if exact else 256))[form]

    def run(*arrays):
        return mosaic_gpu.grouped_matmul_float8(*arrays, dtype=bfloat16, exact=exact, tiles=tiles)

    aot.compile_for(
        aot.lower(jax.jit(run), *structs(16, 4096, 1536, 1536, E5M2 if exact else E4M3)), aot.TARGETS["h200"]
    )
    said = "".join(capfd.readouterr())
    assert re.findall(r"(\d+) bytes spill stores", said) == ["0"]
    assert "wgmma" not in said


@pytest.mark.parametrize(
    "reason, operation, tiles",
    [
        ("columns of x, 64, do not divide by 128", "float8", Tiles()),
        ("no registers for sums", "float8_exact", Tiles(128, 256)),
        ("to be stored late", "float8_exact", Tiles(128, 128, late=True)),
        ("to be stored late", "float8", Tiles(cluster=2, late=True)),
    ],
)
def test_tiles_that_cannot_run_are_refused(reason, operation, tiles):
    columns = 64 if "64" in reason else 1024
    with pytest.raises(Unsupported, match=reason):
        Problem(operation, 4, 1024, columns, 1024).check(tiles)


def test_every_candidate_can_run():
    for operation in ("float8", "float8_exact"):
        problem = Problem(operation, 8, 32_768, 4096, 28_672)
        found = hopper_tiles.candidates(problem)
        assert len(found) == len(set(found)) >= 4
        for tiles in found:
            problem.check(tiles)


@pytest.mark.parametrize(
    "said, change",
    [
        ("shapes do not fit", {"x": (64, 96)}),
        ("x and w are float8", {"dtype": bfloat16}),
    ],
)
def test_bad_operands_are_named(said, change):
    x, w, scales, sizes = structs(4, 64, 128, 64, change.get("dtype", E4M3))
    x = jax.ShapeDtypeStruct(change.get("x", x.shape), x.dtype)
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(grouped_matmul_float8, x, w, scales, sizes)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("exact", [False, True])
def test_on_a_gpu(exact, dtype):
    """In each form; summed exactly, as close as bfloat16 is, otherwise as 14 bits are."""
    sizes = (127, 129, 128, 63, 0, 1, 64, 300)
    x, w, scales, sizes_E = draw(sizes, 2048, 1024, dtype)
    wanted = expected(x, w, scales, sizes)
    problem = Problem(f"float8{'_exact' * exact}", len(sizes), *x.shape, w.shape[1])
    for tiles in forms(problem, (128, 128 if exact else 256)):
        how = {"dtype": bfloat16, "exact": exact, "tiles": tiles}
        y = mosaic_gpu.grouped_matmul_float8(x, w, scales, sizes_E, **how)
        for part, of in zip(by_group(y, sizes), wanted, strict=True):
            if len(of):
                assert_close(part, of, GPU_TOLERANCE)
