"""The only FLOP count: what an update needs, whatever it in fact computes."""


def of_update(matmul_parameters: float, width: float, tokens: float, attention_span: float) -> float:
    """Returns the floating-point operations that one update needs: forward, and twice that backward.

    matmul_parameters: that each token is multiplied with. width: layers × heads × head_dim. tokens: in
    documents (padding needs none). attention_span: Σ document length², over the same documents; a row of one
    document has `sequence²`. Per token 6 × matmul parameters, and for causal attention 6 × width ×
    (attention_span / tokens) (arXiv:2204.02311, appendix B, with the half that the causal mask leaves).
    """
    return 6.0 * matmul_parameters * tokens + 6 * width * attention_span
