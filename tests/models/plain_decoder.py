"""A decoder of one document in numpy's float64, token by token where that is plainer: no code of jaxthru's.

Shapes: T tokens, D embed, H heads, K kv heads, C head_dim, M mlp, V vocabulary.
"""

import math

import numpy as np


def norm(x, weight, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def frequencies(head_dim: int, theta: float, scaling=None) -> np.ndarray:
    """Returns the angle a token of each pair of dims, by the formulas of the papers."""
    found = []
    for pair in range(head_dim // 2):
        frequency = theta ** (-2 * pair / head_dim)
        if scaling is None:
            kept = 1.0
        elif scaling.kind == "linear":
            kept = 0.0
        else:
            assert scaling.kind == "yarn"
            where = [
                head_dim * math.log(scaling.original_sequence / (beta * 2 * math.pi)) / (2 * math.log(theta))
                for beta in (scaling.beta_fast, scaling.beta_slow)
            ]
            low, high = max(math.floor(where[0]), 0), min(math.ceil(where[1]), head_dim - 1)
            kept = 1 - min(max((pair - low) / (high - low), 0.0), 1.0)
        found.append(kept * frequency + (1 - kept) * frequency / (scaling.factor if scaling else 1))
    return np.asarray(found)


def rotated(x_THC, angle_per_token, amplitude=1.0):
    half = x_THC.shape[-1] // 2
    out = np.empty_like(x_THC)
    for position, vectors in enumerate(x_THC):
        cos, sin = np.cos(position * angle_per_token), np.sin(position * angle_per_token)
        out[position, :, :half] = amplitude * (vectors[:, :half] * cos - vectors[:, half:] * sin)
        out[position, :, half:] = amplitude * (vectors[:, half:] * cos + vectors[:, :half] * sin)
    return out


def attended(q_THC, k_TKC, v_TKC, window, divisor):
    out = np.empty_like(q_THC)
    shared = q_THC.shape[1] // k_TKC.shape[1]
    for position in range(len(q_THC)):
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q_THC.shape[1]):
            keys, values = (x[first : position + 1, head // shared] for x in (k_TKC, v_TKC))
            score = keys @ q_THC[position, head] / divisor
            share = np.exp(score - score.max())
            out[position, head] = share @ values / share.sum()
    return out


def attention(config, weights, x_TD, window, angle, amplitude, offset, divisor):
    heads = {name: np.einsum("td,dhc->thc", x_TD, weights[name]) for name in ("query", "key", "value")}
    for name in heads:
        if f"{name}_bias" in weights:
            heads[name] = heads[name] + weights[f"{name}_bias"]
    for name in ("query", "key"):
        if f"{name}_norm" in weights:
            scale = weights[f"{name}_norm"]["scale"] + offset
            heads[name] = norm(heads[name], scale, config.norm_epsilon)
        heads[name] = rotated(heads[name], angle, amplitude)
    out = attended(heads["query"], heads["key"], heads["value"], window, divisor)
    return np.einsum("thc,hcd->td", out, weights["out"])


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def feed_forward(weights, x_TD, activation):
    return (activation(x_TD @ weights["gate"]) * (x_TD @ weights["up"])) @ weights["down"]


def logits(config, params, tokens) -> np.ndarray:
    """Returns the logits [T, V] of a document. params: unrolled, as jaxthru has them."""
    gemma = hasattr(config, "global_every")
    as64 = lambda tree: {k: as64(v) if isinstance(v, dict) else np.asarray(v, float) for k, v in tree.items()}  # noqa: E731
    # Of each group: the pattern's blocks, each a tuple over the repetitions.
    layers = [
        as64(block[repetition])
        for group in params["layers"]
        for repetition in range(len(group[0]))
        for block in group
    ]
    assert len(layers) == config.layers
    embedding, head = as64(params["embedding"]), as64(params["head"])
    x_TD, offset = embedding["table"][tokens], 0.0
    if gemma:
        x_TD, offset = x_TD * math.sqrt(config.embed), 1.0
    for index, weights in enumerate(layers):
        scale = lambda name, of=weights: of[name]["scale"] + offset  # noqa: E731
        amplitude, divisor = 1.0, math.sqrt(config.head_dim)
        if gemma:
            whole = (index + 1) % config.global_every == 0
            window = None if whole else config.window
            angle = frequencies(config.head_dim, config.rope_theta if whole else config.rope_local_theta)
            angle = angle / config.rope_factor if whole else angle
            divisor = math.sqrt(config.query_scalar)
        else:
            window = config.window if index >= config.window_from else None
            angle = frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
            if config.rope_scaling is not None and config.rope_scaling.kind == "yarn":
                amplitude = 0.1 * math.log(config.rope_scaling.factor) + 1
        of = window, angle, amplitude, offset, divisor
        normed = norm(x_TD, scale("attention_norm"), config.norm_epsilon)
        branch = attention(config, weights["attention"], normed, *of)
        x_TD = x_TD + (norm(branch, scale("attention_out_norm"), config.norm_epsilon) if gemma else branch)
        normed = norm(x_TD, scale("mlp_norm"), config.norm_epsilon)
        branch = feed_forward(weights["mlp"], normed, gelu if gemma else silu)
        x_TD = x_TD + (norm(branch, scale("mlp_out_norm"), config.norm_epsilon) if gemma else branch)
    x_TD = norm(x_TD, head["norm"]["scale"] + offset, config.norm_epsilon)
    return x_TD @ (embedding["table"].T if config.tied_embeddings else head["matrix"])
