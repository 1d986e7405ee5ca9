"""Which implementation of each operation of `pallas_kernels` a run takes."""

import dataclasses
from typing import Literal

from pallas_kernels.adamw_8bit import OPERATION as ADAMW_8BIT
from pallas_kernels.attention import OPERATION as ATTENTION
from pallas_kernels.cast_transpose import OPERATION as CAST_TRANSPOSE
from pallas_kernels.collective_matmul import OPERATION as COLLECTIVE_MATMUL
from pallas_kernels.collective_matmul import WRITES_TO_PEERS
from pallas_kernels.grouped_matmul import OPERATION as GROUPED_MATMUL
from pallas_kernels.linear_cross_entropy import OPERATION as LINEAR_CROSS_ENTROPY
from pallas_kernels.rms_norm import OPERATION as RMS_NORM
from pallas_kernels.routing import OPERATION as ROUTING
from pallas_kernels.weighted_swiglu import OPERATION as WEIGHTED_SWIGLU


@dataclasses.dataclass(frozen=True)
class KernelsConfig:
    """One key for each operation: `auto`, the first of the operation's own order that can run, or one by
    name, which runs or says why it cannot.

    attention: of each token to the earlier ones of its own document.
    linear_cross_entropy: the matmul with the LM head, and the loss, in one.
    collective_matmul: what moves tokens over the mesh axis `tensor`; also `fused`, the kernels for Hopper
    where they are expected to be faster and otherwise as `auto`, or `none`, collectives that XLA's
    partitioner puts in.
    adamw_8bit: the update of moments that are kept in 8 bits. On several devices each makes that of what it
    has; `reference` is left to the partitioner.
    rms_norm: norms between the blocks and of queries and keys, these with their rotation.
    grouped_matmul: of the experts' tokens with their matrices, and the gradients of these.
    routing: the choice of experts, the sort of tokens by expert, and the way there and back.
    weighted_swiglu: the experts' activation, with the router's weight.
    cast_transpose: the cast of linear layers' operands to float8, where their products take them transposed
    as well. On several devices XLA casts what moves before it is multiplied.
    """

    attention: Literal["auto", *ATTENTION.names] = "auto"
    linear_cross_entropy: Literal["auto", *LINEAR_CROSS_ENTROPY.names] = "auto"
    collective_matmul: Literal["auto", "fused", "none", *COLLECTIVE_MATMUL.names] = "auto"
    adamw_8bit: Literal["auto", *ADAMW_8BIT.names] = "auto"
    rms_norm: Literal["auto", *RMS_NORM.names] = "auto"
    grouped_matmul: Literal["auto", *GROUPED_MATMUL.names] = "auto"
    routing: Literal["auto", *ROUTING.names] = "auto"
    weighted_swiglu: Literal["auto", *WEIGHTED_SWIGLU.names] = "auto"
    cast_transpose: Literal["auto", *CAST_TRANSPOSE.names] = "auto"

    @property
    def writes_to_peers(self) -> bool:
        """Whether kernels address the memory of other GPUs; see `runtime.xla.for_peers`."""
        return self.collective_matmul in WRITES_TO_PEERS

    @property
    def any_named(self) -> bool:
        """Whether an implementation is asked for by name."""
        return any(name != "auto" for name in dataclasses.astuple(self))

    def named(self, operation: str) -> str | None:
        """Returns what an operation takes as `implementation`: the name asked for, or None for `auto`."""
        name = getattr(self, operation)
        return None if name == "auto" else name
