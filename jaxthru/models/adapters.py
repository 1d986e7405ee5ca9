"""How linear layers are multiplied with adapters beside them: the hook of `Ops` in an adapted block.

W + s·A·B is never formed. Targets that read one input share one matmul with their As, and what each B makes
of that is added to the target's product as a matmul writes it (models/fan_out.py says when XLA does so).

Shapes: N rows × tokens, I input and O output of a linear layer, R rank.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxthru.models.fan_out import fan_out
from jaxthru.models.remat import EXPERT_ROWS, FLOAT8, LEFT_OUT, LOW_RANK, REST
from jaxthru.runtime.weights import WeightInfo

Path = tuple[str, ...]


class Beside(NamedTuple):
    """What a linear layer is multiplied with beside its weight: A [I, R] and B [R, O], and their axes."""

    a: jax.Array
    b: jax.Array
    input: str | None
    output: str | None


@dataclasses.dataclass(frozen=True)
class Target:
    """A linear layer with an adapter: its place in the block, what it is, and its shape."""

    path: Path
    info: WeightInfo
    shape: tuple[int, ...]

    @property
    def inputs(self) -> int:
        """How many numbers of a token it reads."""
        return math.prod(self.shape[dim] for dim in self.info.inputs)

    @property
    def infos(self) -> dict[str, WeightInfo]:
        """What A [*in, R] and B [R, *out] are: laid out as the target."""
        info = self.info
        inputs, outputs = ([info.axes[dim] for dim in side] for side in (info.inputs, info.outputs))
        return {
            "a": WeightInfo((*inputs, None), "matrix", tuple(range(len(inputs)))),
            "b": WeightInfo((None, *outputs), "matrix", (0,)),
        }

    def init(self, key: jax.Array, rank: int) -> dict[str, jax.Array]:
        """Returns A, drawn evenly from ±1/√in, and B, zero."""
        inputs, outputs = (
            [self.shape[dim] for dim in side] for side in (self.info.inputs, self.info.outputs)
        )
        bound = math.prod(inputs) ** -0.5
        a = jax.random.uniform(key, (*inputs, rank), jnp.float32, -bound, bound)
        return {"a": a, "b": jnp.zeros((rank, *outputs), jnp.float32)}


def kept(of_base: Mapping[str, int], targets: Sequence[Target], rank: int, drops: bool) -> dict[str, int]:
    """Returns `Stage.kept` of an adapted block. of_base: of the block without adapters. drops: whether
    dropout leaves out some of their inputs.

    A frozen weight has no gradient, for which its input would be kept, in whatever dtype: of inputs it is
    those that adapters read. Dropout makes arrays of their own of these, each with a mask.
    """
    widths = {(each.path[:-1], each.info.axes[0]): each.inputs for each in targets}  # one of shared inputs
    read = sum(widths.values())
    named = sum(width for (_, axis), width in widths.items() if axis == "heads")  # attention's, kept anyway
    others = {name: of_base[name] for name in of_base if name not in (FLOAT8, EXPERT_ROWS)}
    dropped = {REST: read, LEFT_OUT: read} if drops else {REST: read - named}
    return {**others, **dropped, LOW_RANK: rank * len(targets)}


class Adapters:
    """The adapters and scales of one block, while it is applied. A hook of `Ops`."""

    def __init__(
        self,
        pairs: dict[int, dict[str, jax.Array]],
        scales: dict[int, jax.Array],
        scale: float,
        dropout: float = 0.0,
        key: jax.Array | None = None,
    ):
        """pairs: {"a": A, "b": B} of weights, by the identity of their arrays. scales: of quantised ones,
        alike. scale: what adapters are multiplied by. dropout: share of their inputs that is left out;
        key: of what is drawn, None leaves out nothing."""
        self._pairs, self._scales, self._scale = pairs, scales, scale
        self._dropout, self._key, self._calls = dropout, key, 0
        self._met: set[int] = set()

    def check(self) -> None:
        """Raises ValueError for a weight that was not multiplied by `Ops`: its adapter would be ignored."""
        if missed := len((self._pairs.keys() | self._scales.keys()) - self._met):
            said = f"{missed} linear layers of a block are multiplied by neither column_parallel nor"
            raise ValueError(f"lora: {said} row_parallel of Ops, and would go without what is beside them")

    def scale(self, weight: Any) -> jax.Array | None:
        """Returns the scale of a quantised weight, None of others."""
        self._met.add(id(weight[...]))
        return self._scales.get(id(weight[...]))

    def started(
        self, ops: Any, x_NI: jax.Array, weights: Sequence, by_rows: bool
    ) -> tuple[jax.Array, Callable[[list[jax.Array]], list[jax.Array]]]:
        """Returns the input, for the weights, and what adds to their products that of the adapters.

        by_rows: the products are sharded over rows and outputs, else over tokens.
        """
        besides = [self._beside(weight) for weight in weights]
        some = [each for each in besides if each is not None]
        if not some:
            return x_NI, lambda ys: ys
        # The adapters' gradient comes first in the sum: a product that cuBLAS adds the rest to.
        own_NI, x_NI = fan_out(x_NI, 2)
        own_NI = self._dropped(own_NI)
        each = [ops.gather(each.a, (each.input, None)) for each in some]
        a_IR = each[0] if len(each) == 1 else jnp.concatenate(each, axis=1)
        low_NR = checkpoint_name(ops.constrain(own_NI @ a_IR, "tokens", None), LOW_RANK)
        rows = "batch" if by_rows else "tokens"
        low_NR = ops.constrain(low_NR, rows, None)
        parts = iter(jnp.split(low_NR, len(some), axis=1))

        def added(y_NO: jax.Array, beside: Beside | None) -> jax.Array:
            if beside is None:
                return y_NO
            b_RO = ops.gather(self._scale * beside.b, (None, beside.output))
            product = next(parts) @ b_RO
            return ops.constrain(product, rows, beside.output if by_rows else None) + y_NO

        return x_NI, lambda ys: [added(*pair) for pair in zip(ys, besides, strict=True)]

    def _dropped(self, x_NI: jax.Array) -> jax.Array:
        """Returns an input of adapters with a share of it left out: the same for all that read it."""
        if self._key is None:
            return x_NI
        key, self._calls = jax.random.fold_in(self._key, self._calls), self._calls + 1
        kept = jax.random.bernoulli(key, 1 - self._dropout, x_NI.shape)
        return jnp.where(kept, x_NI / (1 - self._dropout), jnp.zeros((), x_NI.dtype))

    def _beside(self, weight: Any) -> Beside | None:
        self._met.add(id(weight[...]))
        if (pair := self._pairs.get(id(weight[...]))) is None:
            return None
        inputs, axes = weight.info.inputs, weight.info.axes
        rank = len(pair["b"])
        a_IR, b_RO = pair["a"].reshape(-1, rank), pair["b"].reshape(rank, -1)
        return Beside(a_IR, b_RO, axes[0], axes[len(inputs)])
