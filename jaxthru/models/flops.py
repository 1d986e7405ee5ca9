"""The only FLOP count: what a step needs, whatever it in fact computes."""

from jaxthru.models.llama import Config as ModelConfig


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
