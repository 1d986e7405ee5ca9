"""What a family has been published as: the tensors and the config.json of Hugging Face folders.

A family's module exports `PUBLISHED`, a `Published`. A family without one can be trained, and neither
started from published weights nor exported.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxthru.runtime.weights import WeightInfo


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One published tensor, and which weight it is.

    name: in the files, as `model.layers.3.self_attn.q_proj.weight`. path: where the weight is in a training
    state's `params`, one entry a layer: ("layers", "3", "attention", "query"). transposed: it is
    published as [*out, *in] and here is [*in, *out]. Published, dims of a kind are one: [D, H, C] is
    [H·C, D].
    """

    name: str
    path: tuple[str, ...]
    transposed: bool = False

    def shape(self, info: WeightInfo, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the published shape. info, shape: of the weight."""
        inputs = math.prod(shape[dim] for dim in info.inputs)
        if self.transposed:
            return math.prod(shape) // inputs, inputs
        return tuple(shape) if info.inputs else (math.prod(shape),)


@dataclasses.dataclass(frozen=True)
class Published:
    """model_types: of config.json, those that are this family. read: the keys of a config.json -> the keyword
    arguments of `Config`; raises InputError that names a key whose value is not built. write: a Config -> the
    keys of config.json that it decides, `model_type` and `architectures` among them. tensors: a Config -> all
    tensors, each once, in the order in which they are written. ignored: patterns (`re.fullmatch`) of names
    that may stand in a file and hold nothing that is trained.
    """

    model_types: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    tensors: Callable[[Any], Iterable[Tensor]]
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
