"""The only FLOP count: what an update needs, whatever it in fact computes."""


def of_update(matmul_parameters: float, width: float, tokens: float, attention_span: float) -> float:
    """Returns the floating-point operations that one update needs: forward, and twice that backward.

    matmul_parameters: that each token is multiplied with. width: layers × heads × head_dim. tokens: in
    documents (padding needs none). attention_span: Σ document length², over the same documents; a row of one
    document has `sequence²`. Per token 6 × matmul parameters, and for causal attention 6 × width ×
    (attention_span / tokens) (arXiv:2204.02311, appendix B, with the half that the causal mask leaves).
    """
    return 6.0 * matmul_parameters * tokens + 6 * width * attention_span


def span_within(window: int, tokens: float, attention_span: float) -> float:
    """Returns what takes the place of Σ document length² for attention within a window.

    window: tokens that each one sees, itself among them. tokens, attention_span: as for `of_update`.

    As s² counts a document of s tokens, twice the triangle that the causal mask leaves, a window w < s leaves
    2·w·s - w². Per token that is s, or 2·w - w²/s. Of s nothing is known but its mean over tokens,
    attention_span / tokens: so the result is exact for documents of one length. Both branches are one concave
    function of s, with equal slopes where they meet, so for documents of several lengths the result is never
    below the truth. Without tokens there is no mean, and the whole span is returned.
    """
    if tokens <= 0 or attention_span <= window * tokens:
        return attention_span
    return 2 * window * tokens - window * window * tokens * tokens / attention_span
