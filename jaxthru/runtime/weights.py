"""What a weight is: its axes, role and inputs, read by sharding, the optimizer and the engine."""

import dataclasses
from collections.abc import Collection
from typing import Literal

from jaxthru.runtime.errors import require
from jaxthru.runtime.sharding import LOGICAL_AXIS_RULES, Axes


@dataclasses.dataclass(frozen=True)
class WeightInfo:
    """axes: one logical axis a dim; None is never sharded.
    role: `matrix`: a linear layer within a block, or a stack of them. `table`: an embedding or an LM
        head. `norm`: a norm's scale. `bias`: anything else that is added or scales, and routers: they stay
        float32.
    inputs: the dims of a linear layer that it sums over. stack: dims that count layers of the same kind
        (layers, experts). All others are its outputs.
    trains: without, it has neither gradient nor optimizer state, and is never updated.
    in_base: it is of a frozen base that adapters are trained on: it stays as its stage makes it, or as the
        base's files have it, and no checkpoint holds it.
    """

    axes: Axes
    role: Literal["matrix", "table", "norm", "bias"]
    inputs: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()
    trains: bool = True
    in_base: bool = False

    def __post_init__(self):
        known = [axis for axis in self.axes if axis is not None]
        for axis in known:
            one_of = f"one of {[*LOGICAL_AXIS_RULES]}"
            known = axis in LOGICAL_AXIS_RULES
            require(known, f"weight of axes {self.axes}: no logical axis {axis!r}; {one_of}")
        named = sorted(self.inputs + self.stack)
        said = f"weight of axes {self.axes}: inputs = {self.inputs}, stack = {self.stack}"
        require(named == sorted({*named} & {*range(len(self.axes))}), f"{said}: must be dims, each once")
        require(
            self.role != "matrix" or (self.inputs and self.outputs),
            f"{said}: a matrix sums over some dims, its inputs, and gives others",
        )

    @property
    def decays(self) -> bool:
        """Says whether weight decay and the formats of `optim.state` are for it: norms and biases are small,
        and stay float32."""
        return self.role in ("matrix", "table")

    @property
    def outputs(self) -> tuple[int, ...]:
        """The dims that a linear layer gives."""
        return tuple(dim for dim in range(len(self.axes)) if dim not in self.inputs + self.stack)

    def without(self, dims: Collection[int]) -> "WeightInfo":
        """Returns what of this weight lies at one place of each of these dims, which are not its inputs."""
        left = [dim for dim in range(len(self.axes)) if dim not in dims]
        inputs = tuple(map(left.index, self.inputs))
        stack = tuple(left.index(dim) for dim in self.stack if dim in left)
        return dataclasses.replace(
            self, axes=tuple(self.axes[dim] for dim in left), inputs=inputs, stack=stack
        )

    def stacked(self) -> "WeightInfo":
        """Returns what this weight is with those of all layers stacked, by a leading dim."""
        shifted = {name: tuple(dim + 1 for dim in getattr(self, name)) for name in ("inputs", "stack")}
        stack = (0, *shifted.pop("stack"))
        return dataclasses.replace(self, axes=("layers", *self.axes), stack=stack, **shifted)
