"""Which implementation of each operation of `pallas_kernels` runs."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class KernelsConfig:
    """A key per operation: one of its implementations, or `auto`.

    attention: `pallas_kernels.attention`.
    linear_cross_entropy: the output matrix and the loss.
    collective_matmul: what moves tokens over `mesh.tensor`; `fused` is the kernels for Hopper where they are
    expected to be faster and otherwise as `auto`, `none` collectives that XLA's partitioner puts in.
    adamw_8bit: the update of optim.state = int8.
    """

    attention: Literal["auto", "reference", "xla", "cudnn_packed", "triton"] = "auto"
    linear_cross_entropy: Literal["auto", "reference", "xla", "triton"] = "auto"
    collective_matmul: Literal[
        "auto",
        "fused",
        "none",
        "reference",
        "ring",
        "ring_bidirectional",
        "mosaic_gpu",
        "mosaic_gpu_adds",
        "mosaic_tpu",
    ] = "auto"
    adamw_8bit: Literal["auto", "reference", "xla", "triton"] = "auto"

    @property
    def writes_to_peers(self) -> bool:
        """Whether kernels address the memory of other GPUs; see `runtime.xla.for_peers`."""
        return self.collective_matmul in ("fused", "mosaic_gpu", "mosaic_gpu_adds")
