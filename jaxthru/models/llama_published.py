"""What the family llama has been published as: model types llama, mistral, qwen2 and qwen3."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxthru.models import published_rope
from jaxthru.models.published import (
    Published,
    Tensor,
    kinds_of_layers,
    layer_kinds,
    layer_tensors,
    refuse,
    size_of,
    value_of,
)
from jaxthru.runtime.errors import require

LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as query heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "max_position_embeddings": 2048,
    "sliding_window": None,
}
QWEN = LLAMA | {
    **{"vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32},
    **{"max_position_embeddings": 32_768, "sliding_window": 4096},
}
MISTRAL = {"intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
ABSENT = {
    "llama": LLAMA,
    "mistral": LLAMA | MISTRAL | {"sliding_window": 4096},
    "qwen2": QWEN,
    "qwen3": QWEN | {"head_dim": 128},
}
"""Of each model type, what a key means that is absent: files hold what differs from the class's default."""

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
BUILT = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "no_rope_layers": (),
    "no_rope_layer_interval": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
}


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of `Config`, see `Published`."""
    kind = raw["model_type"]
    refuse(raw, BUILT)
    found = decoder(raw, ABSENT[kind])
    window, window_from = _window(raw, kind, found["layers"])
    return found | {
        "mlp": size_of(raw, "intermediate_size", ABSENT[kind]["intermediate_size"]),
        "qk_norm": kind == "qwen3",
        "qkv_bias": kind == "qwen2",
        "window": window,
        "window_from": window_from,
    }


def decoder(raw: Mapping[str, Any], absent: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of attention, embeddings and norms. absent: what a key means that is."""
    size = lambda name, most=2**31 - 1: size_of(raw, name, absent[name], most)  # noqa: E731
    layers, embed, heads = size("num_hidden_layers", 10_000), size("hidden_size"), size("num_attention_heads")
    if "num_key_value_heads" in raw and raw["num_key_value_heads"] is None:
        kv_heads = heads
    else:
        kv_heads = size("num_key_value_heads") or heads
    head_dim = absent["head_dim"] if "head_dim" not in raw else None
    head_dim = size_of(raw, "head_dim", head_dim)
    if head_dim is None:
        require(
            embed % heads == 0,
            f"hidden_size = {embed}: is no multiple of num_attention_heads = {heads}, and head_dim is absent",
        )
        head_dim = embed // heads
    positions = size("max_position_embeddings")
    theta, scaling = published_rope.read(raw, absent.get("rope_theta", 10_000.0), positions)
    return {
        "vocabulary": size("vocab_size"),
        "layers": layers,
        "embed": embed,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_sequence": positions,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_epsilon": value_of(raw, "rms_norm_eps", float, absent.get("rms_norm_eps", 1e-6)),
        "tied_embeddings": value_of(raw, "tie_word_embeddings", bool, False),
    }


def _window(raw: Mapping[str, Any], kind: str, layers: int) -> tuple[int | None, int]:
    """Returns the window and the first layer that has it."""
    given = kinds_of_layers(raw, layers)
    # Null switches it off; what is absent is the class's default.
    default = None if "sliding_window" in raw else ABSENT[kind]["sliding_window"]
    window = size_of(raw, "sliding_window", default)
    if kind == "llama":
        require(window is None, f"sliding_window = {window}: model_type 'llama' has none; must be null")
    if kind.startswith("qwen") and not value_of(raw, "use_sliding_window", bool, False):
        said = "layer_types: names sliding_attention, but use_sliding_window is false"
        require(not any(given or ()), said)
        return None, 0
    if window is None:
        require(not any(given or ()), "layer_types: names sliding_attention, but sliding_window is null")
        return None, 0
    if not kind.startswith("qwen"):
        said = "layer_types: of this model_type all layers have the window of sliding_window"
        require(all(given or ()), said)
        return window, 0
    first = value_of(raw, "max_window_layers", int, 28)
    require(first >= 0, f"max_window_layers = {first}: must be at least 0")
    if given is not None:
        first = given.index(True) if any(given) else layers
        said = "layer_types: full_attention behind sliding_attention is not built for this model_type"
        require(all(given[first:]), said)
    return (window, first) if first < layers else (None, 0)


def write(config: Any) -> dict[str, Any]:
    """Returns the keys of config.json, see `Published`. Raises InputError for a shape that no published model
    type has."""
    require(
        not (config.qkv_bias and config.qk_norm),
        "model.qkv_bias = True: no published model type has model.qk_norm with it",
    )
    window = config.window if config.windowed_layers else None
    kind = "qwen2" if config.qkv_bias else "qwen3" if config.qk_norm else "mistral" if window else "llama"
    first = config.window_from if window else config.layers
    require(
        kind != "mistral" or first == 0,
        f"model.window_from = {first}: published model types have a window in some layers only with "
        "model.qkv_bias or model.qk_norm",
    )
    windows: dict[str, Any] = {"sliding_window": window} if kind == "mistral" else {}
    if kind.startswith("qwen"):
        kinds = layer_kinds(layer >= first for layer in range(config.layers))
        windows = {"use_sliding_window": window is not None, "sliding_window": window}
        windows |= {"max_window_layers": first, "layer_types": kinds}
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "intermediate_size": config.mlp,
        **decoder_written(config),
        **({} if config.qkv_bias else {"attention_bias": False}),
        **({"mlp_bias": False} if kind == "llama" else {}),
        **windows,
    }


def decoder_written(config: Any) -> dict[str, Any]:
    """Returns the keys of config.json that `decoder` reads."""
    return {
        "vocab_size": config.vocabulary,
        "hidden_size": config.embed,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_sequence,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_dropout": 0.0,
        **published_rope.write(config.rope_theta, config.rope_scaling),
    }


ATTENTION = {
    "input_layernorm.weight": ("attention_norm", "scale"),
    "self_attn.q_proj.weight": ("attention", "query"),
    "self_attn.k_proj.weight": ("attention", "key"),
    "self_attn.v_proj.weight": ("attention", "value"),
    "self_attn.o_proj.weight": ("attention", "out"),
    "post_attention_layernorm.weight": ("mlp_norm", "scale"),
}
FEED_FORWARD = {
    "mlp.gate_proj.weight": ("mlp", "gate"),
    "mlp.up_proj.weight": ("mlp", "up"),
    "mlp.down_proj.weight": ("mlp", "down"),
}
BIASES = {
    "self_attn.q_proj.bias": ("attention", "query_bias"),
    "self_attn.k_proj.bias": ("attention", "key_bias"),
    "self_attn.v_proj.bias": ("attention", "value_bias"),
}
QK_NORMS = {
    "self_attn.q_norm.weight": ("attention/query_norm", "scale"),
    "self_attn.k_norm.weight": ("attention/key_norm", "scale"),
}


def tensors(config: Any) -> Iterator[Tensor]:
    """Yields all published tensors, see `Published`."""
    table = attention(config) | FEED_FORWARD
    layers = (layer_tensors(layer, table) for layer in range(config.layers))
    yield from with_ends(config, itertools.chain.from_iterable(layers))


def attention(config: Any) -> dict[str, tuple[str, str]]:
    """Returns the tensors of a layer but its feed-forward network's, as `layer_tensors` takes them."""
    return ATTENTION | (BIASES if config.qkv_bias else {}) | (QK_NORMS if config.qk_norm else {})


def with_ends(config: Any, layers: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields the tensors of all layers, and those before and behind them."""
    yield Tensor("model.embed_tokens.weight", ("embedding", "table"))
    yield from layers
    yield Tensor("model.norm.weight", ("head", "norm", "scale"))
    if not config.tied_embeddings:
        yield Tensor("lm_head.weight", ("head", "matrix"), transposed=True)


PUBLISHED = Published(tuple(ABSENT), read, write, tensors)
