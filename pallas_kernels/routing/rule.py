"""How a router chooses experts from its logits: what a model is configured with, the same for all tokens."""

import dataclasses
from typing import Literal

SCORES = ("softmax", "sigmoid", "softmax_of_chosen")


@dataclasses.dataclass(frozen=True)
class Rule:
    """See `route` of the package.

    Raises ValueError where there cannot be such a choice among `experts`.
    """

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "softmax_of_chosen"]
    normalise: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    balanced: bool = False

    def __post_init__(self):
        if self.score not in SCORES:
            raise ValueError(f"route: no score {self.score!r}; there are {', '.join(SCORES)}")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"route: top_k is 1 to {self.experts}, the number of experts, got {self.top_k}")
        if self.groups < 1 or self.experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(
                f"route: groups divide the {self.experts} experts and top_groups is 1 to groups, got groups "
                f"{self.groups} and top_groups {self.top_groups}"
            )
        if self.limited and self.of_group < 2:
            raise ValueError(
                f"route: a group is judged by its best two experts, so it has at least 2, got {self.experts} "
                f"experts in {self.groups} groups"
            )
        if self.top_groups * self.of_group < self.top_k:
            raise ValueError(
                f"route: {self.top_groups} groups of {self.of_group} experts do not hold top_k {self.top_k}"
            )

    @property
    def of_group(self) -> int:
        """How many experts a group has."""
        return self.experts // self.groups

    @property
    def limited(self) -> bool:
        """Whether some groups are left out of the choice."""
        return self.top_groups < self.groups
