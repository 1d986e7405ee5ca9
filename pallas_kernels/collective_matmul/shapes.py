"""Named shapes of collective matmuls, which drive their tests and their benchmarks alike.

All numbers are of the whole operation, over all devices of the mesh axis: all_gather_matmul splits the rows
of x and the columns of its matrices, matmul_reduce_scatter what is contracted and the rows of its result.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import collective_matmul

DEVICES = (2, 4)  # on the axis; each divides every shape of GPU


@dataclass(frozen=True)
class Shape:
    """One call: [rows, contracted] times a [contracted, N] for each N of `columns`."""

    operation: str  # "all_gather_matmul", "matmul_reduce_scatter"
    rows: int
    contracted: int
    columns: tuple[int, ...]

    def scaled(self, by: int) -> "Shape":
        """Returns the shape with every number divided by the same one, for a CPU."""
        columns = tuple(n // by for n in self.columns)
        return Shape(self.operation, self.rows // by, self.contracted // by, columns)

    def arrays(self, mesh: Mesh, dtype) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
        """Returns the operands and the results over the mesh, with this many rows on each "tensor" axis."""
        rows = self.rows * mesh.size // mesh.shape["tensor"]
        operands = (rows, self.contracted), *((self.contracted, n) for n in self.columns)
        in_specs, out_spec = self._specs(mesh)

        def struct(size, spec):
            return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))

        return (
            tuple(struct(*pair) for pair in zip(operands, in_specs, strict=True)),
            tuple(struct((rows, n), out_spec) for n in self.columns),
        )

    def on(self, mesh: Mesh | AbstractMesh, check_vma: bool = True, **options) -> Callable[..., tuple]:
        """Returns the operation on whole arrays, operands -> tuple of results.

        mesh: has an axis "tensor", which takes part; all others split rows. options: of the operation.
        """
        operation = getattr(collective_matmul, self.operation)

        def local(x, *weights):
            if self.operation == "all_gather_matmul":
                return operation(x, weights, axis_name="tensor", **options)
            return (operation(x, *weights, axis_name="tensor", **options),)

        in_specs, out_spec = self._specs(mesh)
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_spec, check_vma=check_vma)

    def _specs(self, mesh) -> tuple[tuple[PartitionSpec, ...], PartitionSpec]:
        others = tuple(name for name in mesh.axis_names if name != "tensor")
        split, whole = PartitionSpec((*others, "tensor")), PartitionSpec(others or None, "tensor")
        if self.operation == "all_gather_matmul":
            return (split, *[PartitionSpec(None, "tensor")] * len(self.columns)), whole
        return (whole, PartitionSpec("tensor")), split


def _gather(rows: int, contracted: int, *columns: int) -> Shape:
    return Shape("all_gather_matmul", rows, contracted, columns)


def _scatter(rows: int, contracted: int, columns: int) -> Shape:
    return Shape("matmul_reduce_scatter", rows, contracted, (columns,))


# Small enough for a CPU; on an axis of up to 8 devices.
CPU = {
    "one_matrix": _gather(32, 24, 16),
    "three_matrices": _gather(64, 16, 32, 8, 8),
    "one_row": _gather(8, 8, 24),
    "odd_rows": _gather(40, 7, 8, 24),
    "scatter": _scatter(32, 24, 16),
    "scatter_one_row": _scatter(8, 16, 5),
    "scatter_odd_rows": _scatter(24, 8, 7),
}

# Of configs/llama3_8b.py: 8,192 and 16,384 tokens are one and two rows. "gate_up" is one matrix of both;
# a model has them apart.
GPU = {
    "qkv": _gather(8192, 4096, 6144),
    "gate": _gather(8192, 4096, 14_336),
    "gate_up": _gather(16_384, 4096, 28_672),
    "qkv_apart": _gather(16_384, 4096, 4096, 1024, 1024),
    "gate_up_apart": _gather(16_384, 4096, 14_336, 14_336),
    "scatter_6144": _scatter(8192, 6144, 4096),
    "down": _scatter(8192, 14_336, 4096),
    "attention_output": _scatter(16_384, 4096, 4096),
    "down_two_rows": _scatter(16_384, 14_336, 4096),
}

# In no table of tiles, so that what is chosen for an unknown shape is measured too.
UNTUNED = {
    "untuned_gather": _gather(12_288, 3072, 16_384),
    "untuned_scatter": _scatter(10_240, 11_008, 4096),
}
