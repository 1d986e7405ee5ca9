"""The only FLOP count: what a step needs, whatever it in fact computes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxthru.models import family
from jaxthru.models.llama import ModelConfig
from jaxthru.profile.read.facts import Facts


def matmul_parameters(config: ModelConfig) -> int:
    """Returns the parameters that each token is multiplied with; looking up an embedding is free."""
    attention = config.embed * config.head_dim * 2 * (config.heads + config.kv_heads)
    return config.layers * (attention + 3 * config.embed * config.mlp) + config.embed * config.vocabulary


def parameters(config: ModelConfig) -> int:
    """Returns the number of parameters."""
    norms = config.layers * (2 * config.embed + 2 * config.head_dim * config.qk_norm) + config.embed
    input_table = 0 if config.tied_embeddings else config.vocabulary * config.embed
    return matmul_parameters(config) + input_table + norms


def train_flops(config: ModelConfig, tokens: float, attention_span: float) -> float:
    """Returns the floating-point operations one update needs: forward, and twice that backward.

    tokens: in documents (padding needs none). attention_span: Σ document length², over the same documents;
    a row of one document has `sequence²`. Per token 6 × matmul parameters, and for causal attention
    6 × layers × heads × head_dim × (attention_span / tokens) (arXiv:2204.02311, appendix B, with the half
    that the causal mask leaves).
    """
    attention = 6 * config.layers * config.heads * config.head_dim * attention_span
    return 6.0 * matmul_parameters(config) * tokens + attention


def facts_of(model: ModelConfig | Mapping[str, Any], compute: str) -> Facts:
    """Returns what the profiler goes by. model: also as the plain values of an older run's config.json.
    compute: the dtype of activations. Raises InputError."""
    if isinstance(model, Mapping):
        cls = family.config_class(model.get("family", family.SHIPPED[0]), trusted=False)
        known = {field.name for field in dataclasses.fields(cls)} - {"rope_scaling"}  # needs no FLOPs
        model = cls(**{name: value for name, value in model.items() if name in known})
    layers, embed, mlp, item = model.layers, model.embed, model.mlp, jnp.dtype(compute).itemsize
    heads = 2 * (model.heads + model.kv_heads) * model.head_dim
    kept = {"full": 0, "attention": heads + embed, "gate": heads + embed + mlp}
    kept["projections"] = kept["gate"] + mlp
    kept["none"] = kept["projections"] + 3 * embed + 2 * mlp  # norms, products
    again = {"full": 2 * mlp + heads, "attention": 2 * mlp, "gate": mlp, "projections": 0, "none": 0}
    return Facts(
        matmul_flops_per_token=train_flops(model, 1, 0),
        attention_flops=train_flops(model, 0, 1),
        layers=layers,
        layer_parameters=layers * embed * (heads + 3 * mlp),
        widths={"embed": embed, "mlp": mlp, "vocabulary": model.vocabulary},
        split_widths=("mlp", "vocabulary"),
        kept={policy: layers * item * width for policy, width in kept.items()},
        recomputed={policy: 2 * layers * embed * width for policy, width in again.items()},
    )
