"""What the profiler knows of a model: plain numbers, which a run writes down as it is profiled."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Facts:
    """matmul_flops_per_token: what a token needs of an update, forward and backward, without attention.
    attention_flops: the same of attention, for each unit of Σ document length². layer_parameters: of the
    matrices of all layers together. widths: {key of the group `model`: a dim of the matrices}. split_widths:
    those of them that lie split over `mesh.tensor`. kept: {remat policy: bytes that all layers together keep
    of a token for the backward pass, in the compute dtype}. recomputed: {remat policy: FLOPs for each token
    that the backward pass does a second time}. scopes: name scopes of the family's own, which layers are told
    by. exchanges: {name scope whose all-to-alls are meant: logical axis that is split where there are
    any}."""

    matmul_flops_per_token: float
    attention_flops: float
    layers: int
    layer_parameters: int
    widths: dict[str, int]
    split_widths: tuple[str, ...]
    kept: dict[str, int]
    recomputed: dict[str, int]
    scopes: tuple[str, ...] = ()
    exchanges: dict[str, str] = dataclasses.field(default_factory=dict)

    def flops(self, tokens: float, attention_span: float) -> float:
        """Returns the FLOPs that an update needs. attention_span: Σ document length²."""
        return self.matmul_flops_per_token * tokens + self.attention_flops * attention_span
