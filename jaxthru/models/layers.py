"""The layers of a decoder, as Flax NNX modules.

Shapes: B rows, T tokens, D embed, H heads, K kv heads, C head dim, M mlp, V vocabulary.
"""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """parameters: the master weights. compute: activations and matmul operands; the loss is always
    float32. matmul: `compute` multiplies in the compute type."""

    parameters: Literal["float32"] = "float32"
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    matmul: Literal["compute"] = "compute"
